"""Graphs of any shape have the outputs, gradients and buffers of one device; what has no graph is one clear error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partir
from partir.equivalence import relative_difference
from partir.errors import TraceError, source_line
from partir.module import parallelized
from partir.passes.trace import trace
from tests.graph_shapes import SHAPES, Graph, x

pytestmark = pytest.mark.filterwarnings("ignore")
MESHES = ((2, 2, 2), (1, 4, 1), (3, 1, 2))
NAMES = list(SHAPES)


def check(name: str, mesh: tuple[int, ...], training: bool = True) -> None:
    torch.manual_seed(0)
    model, args, kwargs = SHAPES[name]()
    model.train(training)
    with torch.set_grad_enabled(training):
        partir.verify(model, mesh, args, kwargs, tolerance=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_is_that_of_one_device(name: str) -> None:
    check(name, MESHES[NAMES.index(name) % len(MESHES)])


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_mesh(name: str, mesh: tuple[int, ...], training: bool) -> None:
    check(name, mesh, training)


def test_python_numbers_that_change_are_never_stale() -> None:
    def run(m: Any, x: Tensor, scale: float, names: list[str]) -> Tensor:
        return m.a(x) * scale * m.factor + len(names)

    model: Any = Graph(run, a=nn.Linear(12, 12)).double()
    model.factor = 2.0
    twin = partir.parallelize(copy.deepcopy(model), mesh=(2, 1, 2))
    given = x().double()
    for scale, factor in ((1.0, 2.0), (2.0, 2.0), (2, 2.0), (2.0, 3.0), (1.0, 2.0)):
        model.factor = twin.factor = factor
        assert torch.allclose(twin(given, scale, names=["a"] * int(scale)), model(given, scale, names=["a"] * int(scale)), atol=1e-12)


def test_a_buffer_that_forward_reads_and_writes_counts_on() -> None:
    torch.manual_seed(0)
    model = SHAPES["a buffer that counts"]()[0].double()
    twin = partir.parallelize(copy.deepcopy(model), mesh=(2, 2, 1))
    for _ in range(3):
        for module in (model, twin):
            module.zero_grad()
            module(x().double()).sum().backward()
        mine, theirs = (module.get_parameter("a.weight").grad for module in (twin, model))
        assert mine is not None and theirs is not None and torch.allclose(mine, theirs, atol=1e-12)
    assert float(twin.get_buffer("steps")) == 3.0
    assert torch.allclose(twin.get_buffer("seen"), model.get_buffer("seen"), atol=1e-14)


def test_verify_compares_buffers_and_gradients_of_inputs() -> None:
    model, args, _ = SHAPES["a buffer that counts"]()
    assert set(partir.verify(model, (2, 1, 2), args).buffers) == {"steps", "seen"}
    model, args, _ = SHAPES["gradients of inputs"]()
    assert "input 0" in partir.verify(model, (2, 1, 2), args).gradients


def test_differences_are_measured_beside_numbers_that_are_not_finite() -> None:
    expected = torch.tensor([torch.inf, torch.nan, -torch.inf, 2.0])
    assert relative_difference(torch.tensor([torch.inf, torch.nan, -torch.inf, 2.5]), expected) == 0.25
    assert relative_difference(torch.tensor([torch.inf, torch.nan, -torch.inf, torch.nan]), expected) == torch.inf
    assert relative_difference(torch.tensor([torch.inf, 1.0, -torch.inf, 2.0]), expected) == torch.inf


def test_a_write_through_a_detach_is_refused_and_one_into_a_copy_is_not() -> None:
    def through(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        h.detach().mul_(2.0)
        return h * h

    def beside(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        return h * h.detach().clone().mul_(2.0)

    with pytest.raises(TraceError, match="writes through a detach into a value that has a gradient"):
        partir.verify(Graph(through, a=nn.Linear(12, 12)), (2, 1, 2), x())
    partir.verify(Graph(beside, a=nn.Linear(12, 12)), (2, 1, 2), x())


def test_an_op_is_known_by_the_line_of_the_function_that_calls_it() -> None:
    def inner(m: Any, x: Tensor) -> Tensor:
        return m.a(x).relu()

    traced = trace(Graph(inner, a=nn.Linear(12, 12)), (x(),))
    relu = next(node for node in traced.graph_module.graph.nodes if node.name == "relu")
    assert source_line(relu.meta) == f"test_graphs.py:{inner.__code__.co_firstlineno + 1}"


class Scaled(torch.autograd.Function):
    """Elementwise, with a gradient that is not the true one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * ctx.saved_tensors[0] * 100 * ctx.factor, None


class Projected(torch.autograd.Function):
    """A product and a sum whose numbers depend on a size: on a part of x it would be another function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, w)
        return x @ w / x.shape[0], x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_sum: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        return gradient @ w.t() * 3 + of_sum, x.flatten(0, 1).t() @ gradient.flatten(0, 1)


class Averaged(torch.autograd.Function):
    """Elementwise ops, but one of their numbers is a size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x / x.shape[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * 5


FUNCTIONS = {
    "elementwise": lambda m, x: m.a(Scaled.apply(m.a(x), 2.0)) + Scaled.apply(x, 3.0),
    "of two tensors": lambda m, x: Projected.apply(m.a(x), m.w),
    "that reads a size": lambda m, x: Averaged.apply(m.a(x)),
}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_autograd_function_keeps_its_own_backward(name: str, mesh: tuple[int, ...]) -> None:
    model = Graph(FUNCTIONS[name], a=nn.Linear(12, 12), w=nn.Parameter(torch.randn(12, 7)))
    partir.verify(model, mesh, x())


def test_only_an_elementwise_autograd_function_is_split() -> None:
    found: dict[str, list[str]] = {}
    for name, function in FUNCTIONS.items():
        model = partir.parallelize(Graph(function, a=nn.Linear(12, 12), w=nn.Parameter(torch.randn(12, 8))), mesh=(2, 2, 2))
        model(x(8, 4, 12))
        lines = parallelized(model).programs()[0].texts["annotated"].splitlines()
        found[name] = [line for line in lines if "partir_function" in line]
    assert "8@x" in found["elementwise"][0] and len(found["elementwise"]) == 2
    assert "@" not in found["of two tensors"][0] + found["that reads a size"][0]


class Block(nn.Module):
    """An attention block with one projection for q, k and v, or three."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.projections = nn.ModuleList([nn.Linear(48, 144)] if fused else [nn.Linear(48, 48) for _ in range(3)])
        self.out = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [batch, sequence, 48] after the block."""
        h = self.norm(x)
        parts = [part for projection in self.projections for part in projection(h).split(48, dim=-1)]
        q, k, v = (part.unflatten(-1, (12, 4)).transpose(1, 2) for part in parts)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("mesh", [*MESHES, (2, 2, 4)], ids=str)
def test_a_fused_projection_receives_the_bytes_of_three(mesh: tuple[int, ...]) -> None:
    received: list[int] = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = partir.parallelize(Block(fused), mesh=mesh)
        with partir.record_communication() as log:
            model(torch.randn(12, 8, 48)).sum().backward()
        received.append(log.bytes())
    assert received[0] == received[1] > 0


def experts(m: Any, x: Tensor) -> Tensor:
    """Every expert of every token, weighted by the gate."""
    hidden = torch.einsum("bsh,ehf->bsef", m.norm(x), m.up)
    made = torch.einsum("bsef,efh->bseh", F.gelu(hidden), m.down)
    return (made * m.gate(x).softmax(-1)[..., None]).sum(2).square().mean()


@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 2, 4), (2, 4, 1)], ids=str)
def test_rows_stay_split_where_what_is_summed_over_is_gathered(mesh: tuple[int, ...]) -> None:
    """A batched product moves fewer bytes with its summed dim whole: its rows are where they were, no rank computes them all."""
    torch.manual_seed(0)
    weights = {"up": nn.Parameter(torch.randn(4, 16, 32)), "down": nn.Parameter(torch.randn(4, 32, 16))}
    model, rows = Graph(experts, norm=nn.LayerNorm(16), gate=nn.Linear(16, 4), **weights), x(16, 8, 16)
    plan, alone = partir.plan(model, mesh, rows, memory="fast"), partir.plan(model, (1, 1, 1), rows, memory="fast")
    work = [one.cost().value(one.cost().flops()) for one in (plan, alone)]
    assert work[0] <= work[1] / (mesh[0] * mesh[1])
    assert all("fewest bytes move with nothing split along z" in note for note in plan.notes), plan.notes
    partir.verify(model, mesh, rows, tolerance=1e-9)
