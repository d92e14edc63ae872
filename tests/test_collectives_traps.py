"""The two ways to a right forward and a wrong gradient: each refused by type, and shown in numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from partir.collectives import apply
from partir.errors import TypeRuleError
from partir.layout import Layout
from partir.mesh import Mesh
from tests.rank_threads import run_ranks

ops: Any = torch.ops.partir
MESH = Mesh.parse((1, 1, 4))


def norm(x: Tensor, mean: Tensor, square: Tensor) -> Tensor:
    return (x - mean) * torch.rsqrt(square - mean * mean + 1e-5)


def rank_norm(x: Tensor, spread: bool) -> Tensor:
    """LayerNorm of `[rows, hidden]` with hidden split over z: its sums go P->I, and with `spread` on to R."""
    sums = torch.stack([x.sum(-1), (x * x).sum(-1)])
    sums = ops.all_reduce(sums, "z") / (x.shape[-1] * MESH["z"])
    mean, square = ops.spread(sums, "z") if spread else sums
    return norm(x, mean.unsqueeze(-1), square.unsqueeze(-1))


@pytest.mark.parametrize("spread", [True, False])
def test_layer_norm_sums_need_a_spread(spread: bool) -> None:
    torch.manual_seed(0)
    whole = torch.randn(6, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 16, dtype=torch.float64)
    expected = norm(whole, whole.mean(-1, keepdim=True), (whole * whole).mean(-1, keepdim=True))
    (gradient,) = torch.autograd.grad((expected * weight).sum(), whole)

    def rank_step(rank: int) -> tuple[Tensor, Tensor]:
        x = whole.detach().chunk(4, 1)[rank].clone().requires_grad_()
        y = rank_norm(x, spread)
        (grad,) = torch.autograd.grad(y, x, weight.chunk(4, 1)[rank])
        return y.detach(), grad

    steps = run_ranks(MESH, rank_step)
    torch.testing.assert_close(torch.cat([y for y, _ in steps], 1), expected.detach(), rtol=1e-12, atol=1e-12)
    error = (torch.cat([grad for _, grad in steps], 1) - gradient).abs().max() / gradient.abs().max()
    if spread:
        assert error < 1e-12
    else:
        assert error > 1e-2  # the forward is right, the gradient is not


def test_layer_norm_type_asks_for_the_spread() -> None:
    """What meets a split value must have type R: the sums have it only after the spread."""
    sums = Layout.parse("f64[2, 6] +z")
    reduced = apply("all_reduce", sums, MESH, axis="z")
    assert reduced.type("z") == "I"
    assert apply("spread", reduced, MESH, axis="z").type("z") == "R"
    with pytest.raises(TypeRuleError, match="spread along z needs a value that is the same"):
        apply("spread", sums, MESH, axis="z")


@pytest.mark.parametrize("gather, factor", [("all_gather_same", 1), ("all_gather", 4)])
def test_outputs_are_gathered_as_the_same(gather: str, factor: int) -> None:
    """Every rank differentiates the loss of the whole output: gathered as S->R its gradient counts n times."""
    torch.manual_seed(0)
    whole = torch.randn(8, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad((whole**2).sin().sum(), whole)

    def rank_step(rank: int) -> Tensor:
        x = whole.detach().chunk(4)[rank].clone().requires_grad_()
        output = getattr(ops, gather)(x**2, "z", 0)
        return torch.autograd.grad(output.sin().sum(), x)[0]

    torch.testing.assert_close(torch.cat(run_ranks(MESH, rank_step)), factor * gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gather, type", [("all_gather_same", "I"), ("all_gather", "R")])
def test_output_types_tell_the_gathers_apart(gather: str, type: str) -> None:
    """Outputs are I, S or N; settle makes an R value an output without moving anything."""
    result = apply(gather, Layout.parse("f64[8@z]"), MESH, axis="z", dim=0)
    assert result.type("z") == type
    if type == "R":
        assert apply("settle", result, MESH, axis="z").type("z") == "I"
