"""Small models and their plans, made once for all the tests that read them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import partir
from examples.models.gpt import GPT, GPTConfig

B, S, V = 24, 4, 48


@functools.cache
def gpt(num_layers: int = 1, device: str = "cpu") -> GPT:
    """A float64 GPT whose sizes divide on every mesh of these tests."""
    torch.manual_seed(0)
    with torch.device(device):
        return GPT(GPTConfig(vocab_size=V, block_size=V, num_layers=num_layers, num_heads=12, hidden=48)).double()


def ids() -> Tensor:
    return torch.randint(V, (B, S), generator=torch.Generator().manual_seed(0))


@functools.cache
def gpt_plan(sizes: tuple[int, ...], **options: Any) -> partir.Plan:
    return partir.plan(gpt(), sizes, (ids(), ids()), **options)


@functools.cache
def meta_plan() -> partir.Plan:
    """Two layers, model and inputs on meta."""
    tokens = ids().to("meta")
    return partir.plan(gpt(2, "meta"), (2, 2, 2), tokens, {"labels": tokens})


class MLP(nn.Module):
    """Two linears, hidden 4 times as wide."""

    def __init__(self, size: int = 16, bias: bool = True) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size, 4 * size, bias=bias)
        self.fc2 = nn.Linear(4 * size, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.nn.functional.gelu(self.fc1(x)))


@functools.cache
def mlp() -> MLP:
    torch.manual_seed(0)
    return MLP().double()


def rows() -> Tensor:
    return torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def mlp_plan(sizes: tuple[int, ...] = (2, 2, 2), **options: Any) -> partir.Plan:
    return partir.plan(mlp(), sizes, rows(), **options)
