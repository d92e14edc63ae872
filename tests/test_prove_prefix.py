"""What may be padded on the right, and what may not: small modules, accepted with equal numbers or refused by the name of the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partir.errors import PaddingError
from partir.options import Options
from partir.passes.prove_lengths import Proved, prove_lengths
from partir.passes.trace import flatten_inputs

BATCH, LENGTH, HIDDEN = 2, 16, 8


class Function(nn.Module):
    """A function of `[B, S, H]` with a table of positions, a mask and a few layers at hand."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.position = nn.Parameter(torch.randn(LENGTH, HIDDEN))
        self.register_buffer("lower", torch.ones(LENGTH, LENGTH).tril())
        self.register_buffer("beyond", torch.ones(LENGTH, LENGTH).tril(1))
        self.linear, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)
        self.batch_norm, self.convolution = nn.BatchNorm1d(HIDDEN), nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1)
        self.attention = nn.MultiheadAttention(HIDDEN, 2, batch_first=True)
        self.recurrent = nn.GRU(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def by_hand(scores: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask == 0, float("-inf")).softmax(-1) @ x


def steps(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


def sdpa(x: Tensor, **mask: Any) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, **mask)


EXACT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "layers": lambda m, x: m.norm(m.linear(x).relu()) + x,
    "flat rows": lambda m, x: m.linear(x.flatten(0, 1)).view(BATCH, -1, HIDDEN),
    "positions": lambda m, x: x + m.position[: x.shape[1]],
    "counted positions": lambda m, x: x + F.embedding(steps(x), m.position) + steps(x)[:, None].sin(),
    "causal attention": lambda m, x: sdpa(x, is_causal=True),
    "attention by a mask": lambda m, x: sdpa(x, attn_mask=torch.ones(x.shape[1], x.shape[1]).tril().bool()),
    "attention by -inf": lambda m, x: sdpa(x, attn_mask=torch.full((x.shape[1],) * 2, -torch.inf).triu(1)),
    "attention by a mask of data": lambda m, x: sdpa(x, attn_mask=(steps(x) <= steps(x)[:, None]) & (x[..., :1].mT > -9)),
    "attention by a window": lambda m, x: sdpa(
        x, attn_mask=torch.where((steps(x) <= steps(x)[:, None]) & (steps(x) > steps(x)[:, None] - 4), 0.0, -torch.inf)
    ),
    "attention by hand": lambda m, x: by_hand(x @ x.mT, x, m.lower[: x.shape[1], : x.shape[1]]),
    "a module with a mask": lambda m, x: m.attention(x, x, x, attn_mask=x.new_full((x.shape[1],) * 2, -torch.inf).triu(1))[0],
    "cumulative": lambda m, x: x.cumsum(1),
    "the first position": lambda m, x: x - x[:, :1] + x.select(1, 0)[:, None],
    "known places": lambda m, x: x[torch.arange(BATCH)[:, None], steps(x)[None] // 2],
    "a table of forward": lambda m, x: x * torch.tensor([[n / 2] for n in range(x.shape[1])]),
    "a mask of a list": lambda m, x: sdpa(x, attn_mask=torch.tensor([[i >= j for j in range(x.shape[1])] for i in range(x.shape[1])])),
    "batch norm": lambda m, x: m.batch_norm(x.mT).mT,
}
NOT: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "mean": (lambda m, x: x - x.mean(1, keepdim=True), "mean"),
    "the last position": (lambda m, x: x[:, -1], "select"),
    "all attention": (lambda m, x: sdpa(x), "scaled_dot_product_attention"),
    "a mask of ones": (lambda m, x: sdpa(x, attn_mask=torch.ones(x.shape[1], x.shape[1]).bool()), "scaled_dot_product_attention"),
    "one place ahead": (lambda m, x: by_hand(x @ x.mT, x, m.beyond[: x.shape[1], : x.shape[1]]), "softmax"),
    "softmax over places": (lambda m, x: x.softmax(1), "softmax"),
    "products over places": (lambda m, x: (x @ x.mT) @ x, "matmul"),
    "flipped": (lambda m, x: x.flip(1), "flip"),
    "shifted": (lambda m, x: F.pad(x, (0, 0, 0, 1))[:, 1:], "pad"),
    "rolled": (lambda m, x: x.roll(1, 1), "roll"),
    "from the end": (lambda m, x: x + steps(x).flip(0)[:, None], "flip: what it computes for a position changes with the length"),
    "divided by the length": (lambda m, x: x / x.shape[1], "in place of aten.div.Tensor"),
    "filled with the length": (lambda m, x: x + torch.full((1,), float(x.shape[1])), "in place of aten.full.default"),
    "a threshold": (lambda m, x: x * 2 if x.shape[1] > 8 else x * 3, "in place of aten.mul.Tensor"),
    "convolution": (lambda m, x: m.convolution(x.mT).mT, "conv1d"),
    "recurrent": (lambda m, x: m.recurrent(x)[0], ""),
    "dropout": (lambda m, x: F.dropout(x, 0.5), "dropout: draws random numbers"),
    "rows of all sequences": (lambda m, x: x.flatten(0, 1), "positions are mixed with something else"),
    "causal over all": (lambda m, x: sdpa(x.flatten(0, 1)[None], is_causal=True)[0].view(x.shape), "scaled_dot_product_attention"),
    "sums over all": (lambda m, x: x.flatten(0, 1).cumsum(0).view(x.shape), "cumsum"),
    "places ahead": (lambda m, x: x[torch.arange(BATCH)[:, None], (steps(x)[None] + 1).clamp(max=x.shape[1] - 1)], ""),
    "the loudest place": (lambda m, x: x.amax(1, keepdim=True) + x, "amax"),
    "sorted": (lambda m, x: x.sort(1)[0], "sort"),
    "one more place": (lambda m, x: torch.cat([x[:, :1], x], 1), "cat"),
    "a constant of the length": (lambda m, x: x * torch.tensor(1.0 / x.shape[1]), "the values of this constant of forward change"),
    "the length as a tensor": (lambda m, x: x + torch.as_tensor(x.shape[1]), "the values of this constant of forward change"),
    "a table from the end": (lambda m, x: x * torch.tensor([[n] for n in range(x.shape[1])[::-1]]), "the values of this constant"),
    "every other place": (lambda m, x: x[:, ::2].repeat_interleave(2, 1)[:, : x.shape[1]], ""),
}


def module_of(function: Callable[[Any, Tensor], Tensor]) -> Function:
    torch.manual_seed(0)
    return Function(function).double().eval()


def prove(module: nn.Module, *inputs: Tensor, length: int = LENGTH) -> Proved:
    leaves, structure = flatten_inputs(inputs, {})
    with torch.no_grad():
        return prove_lengths(module, leaves, structure, dict.fromkeys(range(len(leaves)), 1), length, Options())


@pytest.mark.parametrize("name", EXACT)
def test_what_may_be_padded_has_equal_numbers(name: str) -> None:
    module = module_of(EXACT[name])
    x = torch.randn(BATCH, LENGTH, HIDDEN, dtype=torch.float64)
    proved = prove(module, x)
    assert proved.outputs == ((1,),)
    for length in (1, 2, 3, 6, 15):
        if proved.includes(length):
            padded, exact = module(x)[:, :length], module(x[:, :length])
            assert float((padded - exact).detach().abs().max()) < 1e-12, length
    assert proved.includes(3) and proved.includes(15)


@pytest.mark.parametrize("name", NOT)
def test_what_may_not_is_refused(name: str) -> None:
    function, message = NOT[name]
    with pytest.raises(PaddingError) as error:
        prove(module_of(function), torch.randn(BATCH, LENGTH, HIDDEN, dtype=torch.float64))
    assert message in str(error.value), error.value


def test_a_line_is_named() -> None:
    with pytest.raises(PaddingError, match=r"test_prove_prefix.py:\d+: mean: its result at a position may depend on later positions"):
        prove(module_of(NOT["mean"][0]), torch.randn(BATCH, LENGTH, HIDDEN, dtype=torch.float64))


def test_a_short_length_of_another_forward_is_not_included() -> None:
    proved = prove(module_of(lambda m, x: x * 2 if x.shape[1] > 1 else x * 3), torch.randn(BATCH, LENGTH, HIDDEN))
    assert proved.includes(2) and not proved.includes(1)


def test_a_changed_buffer_ends_the_proof() -> None:
    module = module_of(EXACT["attention by hand"])
    proved = prove(module, torch.randn(BATCH, LENGTH, HIDDEN, dtype=torch.float64))
    assert proved.holds()
    module.get_buffer("lower").fill_(1)
    assert not proved.holds()
    with pytest.raises(PaddingError, match="softmax"):
        prove(module, torch.randn(BATCH, LENGTH, HIDDEN, dtype=torch.float64))


def test_a_length_that_cannot_be_told_from_other_sizes() -> None:
    module = nn.Linear(2 * 3 * 5 * 7 * 11 * 13, 1)
    with pytest.raises(PaddingError, match="every prime below 16 divides another size"):
        prove(module, torch.randn(BATCH, LENGTH, 30030))
