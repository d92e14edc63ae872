"""Small GPTs in float64, and one batch for each."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.models.gpt import GPT, GPTConfig


def make_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=48, block_size=8, num_layers=1, num_heads=8, hidden=64)).double()


def tokens() -> Tensor:
    return torch.randint(0, 48, (8, 8), generator=torch.Generator().manual_seed(1))


def make_odd_gpt() -> GPT:
    """Return one of sizes that no axis divides."""
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=37, block_size=7, num_layers=1, num_heads=6, hidden=30)).double()


def odd_tokens() -> Tensor:
    return torch.randint(0, 37, (3, 7), generator=torch.Generator().manual_seed(1))
