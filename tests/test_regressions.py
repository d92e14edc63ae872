"""Defects found by trying to break partir, one test each."""

from __future__ import annotations

import copy

import torch
from torch import nn

import partir


class SharedLayer(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def test_a_module_under_two_names_keeps_its_parameters() -> None:
    """Tracing left fakes in it, for the fake of one name was put back under the other."""
    torch.manual_seed(0)
    model = SharedLayer()
    parameters = list(model.parameters())
    partir.verify(model, (2, 2, 2), torch.randn(8, 8))
    x = torch.randn(8, 8)
    expected = copy.deepcopy(model)(x)
    parallel = partir.parallelize(model, (2, 2, 2))
    torch.testing.assert_close(parallel(x), expected)
    assert all(now is before for now, before in zip(parallel.parameters(), parameters, strict=True))
