"""Teach partir an op that it has never seen: its rule, the check of the rule, its use on 8 simulated ranks.

    python examples/new_op.py
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import partir


# 1. The rule. Each dim of each tensor has a name; what is not mentioned is free: split it, and nothing moves.
@partir.rule(
    """x[* k], centres[c k], width -> y[* c]
    sum k"""
)
def squared_distance(x: Tensor, centres: Tensor, width: float) -> Tensor:
    """Return the squared distance of each x [..., k] from each centre [c, k], divided by width: [..., c]."""
    return (x.unsqueeze(-2) - centres).square().sum(-1) / width


# 2. The use: one op in an ordinary module.
class Clusters(nn.Module):
    """Features, then how near each is to 8 centres: [rows, 16] -> [rows, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(16, 32)
        self.centres = nn.Parameter(torch.randn(8, 32))

    def forward(self, x: Tensor) -> Tensor:
        """Return weights of the centres, each row summing to 1."""
        return torch.softmax(-squared_distance(torch.relu(self.features(x)), self.centres, 4.0), -1)


def main() -> None:
    """Check the rule, then compare the module on 8 ranks with the same module on one device."""
    report = partir.check_rules(ops=[squared_distance])
    print(report)
    report.raise_on_error()

    torch.manual_seed(0)
    model = Clusters().double()
    one_device = copy.deepcopy(model)
    model = partir.parallelize(model, mesh=(2, 2, 2))
    x = torch.randn(8, 16, dtype=torch.float64)
    for module in (model, one_device):
        module(x).square().sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), one_device.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        print(f"{name}: largest difference of the gradient {float((mine.grad - theirs.grad).abs().max()):.1e}")


if __name__ == "__main__":
    main()
