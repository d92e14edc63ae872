"""A model with every kind of parameter, and ids for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Kinds(nn.Module):
    """Every kind of parameter: fused, tied, vectors, sizes that nothing divides, one frozen, one unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(24, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.odd = nn.Linear(16, 7)
        self.back = nn.Linear(7, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.table(ids))
        q, k, v = self.qkv(h).chunk(3, -1)
        h = h + torch.tanh(q) * k + v + self.back(torch.relu(self.odd(self.frozen(h))))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())


def few_ids() -> Tensor:
    return torch.randint(0, 24, (8, 4), generator=torch.Generator().manual_seed(1))
