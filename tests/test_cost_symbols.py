"""Which dims are symbols of a cost, and what is refused: sizes of weights, sizes that ops change, words that mean nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import partir
from partir.errors import PartirError
from tests.planned import gpt


class Features(nn.Module):
    """Its input's second dim is one of a weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(size, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.into(x).relu()).square().mean()


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2), (2, 1, 4), (2, 2, 1, 2)])
@pytest.mark.parametrize("memory", ["low", "fast"])
def test_a_symbol_that_is_a_dim_of_a_weight_is_in_its_gradient(mesh: tuple[int, ...], memory: str) -> None:
    plan, other = (partir.plan(Features(s).to("meta"), mesh, torch.empty(16, s, device="meta"), memory=memory) for s in (32, 64))
    cost, own = plan.cost(), other.cost()
    assert cost.value(cost.bytes(), S=64) == other.bytes()
    assert cost.value(cost.flops(), S=64) == own.value(own.flops())
    for kind in ("parameters", "optimizer"):
        assert cost.value(cost.memory[kind], S=64) == own.value(own.memory[kind])
    assert cost.peak_memory({"S": 64}) == own.peak_memory()


class Sizes(nn.Module):
    """Makes another size of its sequence."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.out, self.token = how, nn.Linear(32, 32), nn.Parameter(torch.zeros(1, 1, 32))
        self.convolution = nn.Conv1d(32, 32, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "token":
            x = torch.cat([self.token.expand(x.shape[0], 1, 32), x], 1)
        if self.how == "shift":
            x = x[:, :-1]
        if self.how == "convolution":
            x = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        if self.how == "pairs":
            x = x.reshape(x.shape[0], x.shape[1] // 2, 2, 32).mean(2)
        return self.out(x).square().mean()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("token", "aten.cat makes a dim of 17 of it"),
        ("shift", "aten.slice.Tensor makes a dim of 15 of it"),
        ("convolution", "aten.conv1d makes a dim of 16 of it"),
        ("pairs", "the model takes it apart, 8*2"),
    ],
)
def test_a_size_of_which_another_is_made_is_no_symbol(how: str, why: str) -> None:
    plan = partir.plan(Sizes(how).to("meta"), (2, 1, 2), torch.empty(8, 16, 32, device="meta"))
    cost = plan.cost()
    assert "S" not in cost.values and "B" in cost.values
    assert f"S is a number here: {cost.left_out['S']}" in str(cost) and why in cost.left_out["S"]
    with pytest.raises(PartirError, match=re.escape(why)):
        cost.value(cost.bytes(), S=32)
    with pytest.raises(PartirError, match=re.escape(f"L cannot stand for dim 1 of {plan.program.inputs[-1].name}")):
        plan.cost({"L": (plan.program.inputs[-1].name, 1)})
    assert cost.value(cost.bytes()) == plan.bytes()


def test_a_padded_size_is_no_symbol() -> None:
    plan = partir.plan(gpt(device="meta"), (2, 1, 1), torch.zeros(5, 8, dtype=torch.long, device="meta"))
    cost = plan.cost()
    assert "B" not in cost.values and "pad_dim makes a dim of 6 of it" in cost.left_out["B"]


@pytest.mark.parametrize(
    ("symbols", "message"),
    [
        ({"x": ("input", 0)}, "'x' is no name for a symbol"),
        ({"A": ("input", 0), "B": ("input", 0)}, "A and B stand for the same size"),
        ({"A": "input"}, r'give the input and the number of its dim: {"A": ("ids", 1)}'),
        ({"A": ("input", -5)}, "there is no dim -5 of an input 'input'; inputs are input [8, 16]"),
        ({"A": ("other", 0)}, "there is no dim 0 of an input 'other'; inputs are input [8, 16]"),
    ],
)
def test_symbols_that_mean_nothing_are_refused(symbols: Any, message: str) -> None:
    plan = partir.plan(nn.Linear(16, 8), (2, 1, 1), torch.empty(8, 16))
    with pytest.raises(PartirError, match=re.escape(message)):
        plan.cost(symbols)


@pytest.mark.parametrize("sizes", [{"x": 0}, {"x": -1}, {"x": "two"}, {"B": True}, {"Q": 2}])
def test_sizes_that_mean_nothing_are_refused(sizes: Any) -> None:
    cost = partir.plan(nn.Linear(16, 8), (2, 1, 1), torch.empty(8, 16)).cost()
    message = "no such symbol" if "Q" in sizes else "a size is a number, 1 or more"
    with pytest.raises(PartirError, match=message):
        cost.value(cost.bytes(), **sizes)
    with pytest.raises(PartirError, match=message):
        cost.peak_memory(sizes)


@pytest.mark.parametrize("word", [{"stage": "fwd"}, {"axis": "w"}, {"op": "gather"}])
def test_words_that_no_collective_has_are_refused(word: dict[str, str]) -> None:
    plan = partir.plan(nn.Linear(16, 8), (2, 1, 1), torch.empty(8, 16))
    ((name, value),) = word.items()
    for count in (plan.bytes, plan.cost().bytes):
        with pytest.raises(PartirError, match=f"{name}='{value}': there is no such {name}; choose from "):
            count(**word)
