"""A GPT whose greedy tokens vary, and the loop that asks for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.models.gpt import GPT, GPTConfig


def model_to_generate() -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=32, block_size=64, num_layers=1, num_heads=2, hidden=16)).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


def prompt() -> Tensor:
    return torch.randint(0, 32, (4, 5), generator=torch.Generator().manual_seed(3))


def greedy(model: nn.Module, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the prompt with its greedy continuation, and the logits of each step."""
    logits: list[Tensor] = []
    with torch.no_grad():
        for _ in range(count):
            logits.append(model(ids)[:, -1])
            ids = torch.cat([ids, logits[-1].argmax(-1, keepdim=True)], dim=1)
    return ids, torch.stack(logits)
