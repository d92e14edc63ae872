"""Cost in symbols: the plan's own numbers, three_d.md's formulas, other meshes and batches, and what a rank really holds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import pytest
import sympy  # pyright: ignore[reportMissingTypeStubs]
import torch
from torch import Tensor, nn

import partir
from examples.models.gpt import GPT, Block, GPTConfig
from examples.models.llama import Llama, LlamaConfig
from partir.cost import Cost
from partir.cost.monomial import Monomial, symbol
from partir.cost.received import total
from partir.errors import PartirError
from partir.graph import collective_name, is_collective, operands
from tests.planned import MLP, mlp_plan, rows
from tests.rank_memory import step_bytes

MESHES = [(2, 2, 2), (2, 4, 1), (1, 4, 1), (2, 2, 2, 1)]
QUICK = [("gpt", (2, 2, 2), "low"), ("gpt", (1, 4, 1), "fast"), ("llama", (2, 2, 2, 1), "low"), ("hf_gpt2", (2, 4, 1), "fast")]
EVERY = [(name, mesh, memory) for name in ("gpt", "llama", "hf_gpt2") for mesh in MESHES for memory in ("low", "fast")]
CASES = [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in EVERY]
HIDDEN, LONGEST, VOCABULARY = 64, 32, 64


def model_of(name: str) -> nn.Module:
    """Return a model of one layer on meta; its tables of positions are longer than any sequence here."""
    with torch.device("meta"):
        if name == "gpt":
            return GPT(GPTConfig(VOCABULARY, LONGEST, num_layers=1, num_heads=8, hidden=HIDDEN))
        if name == "llama":
            return Llama(LlamaConfig(VOCABULARY, LONGEST, 1, num_heads=8, num_kv_heads=8, hidden=HIDDEN, mlp_hidden=96))
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"vocab_size": VOCABULARY, "n_positions": LONGEST, "n_embd": HIDDEN, "n_layer": 1, "n_head": 8}
        return cast(Any, GPT2LMHeadModel)(cast(Any, GPT2Config)(**sizes, bos_token_id=0, eos_token_id=0))


@functools.cache
def plan_of(name: str, mesh: tuple[int, ...], memory: str, batch: int = 16, sequence: int = 16) -> partir.Plan:
    tokens = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    names = ("input_ids", "labels") if name == "hf_gpt2" else ("ids", "labels")
    return partir.plan(model_of(name), mesh, (), dict.fromkeys(names, tokens), memory=memory)


def differing(plan: partir.Plan, cost: Cost, at: dict[str, int] | None = None) -> list[str]:
    """Return the groups of collectives whose bytes are not the plan's."""
    records = plan.collectives
    names = [_and_all(getattr(record, name) for record in records) for name in ("stage", "axis", "op")]
    kinds = list(itertools.product(*names))
    return [str(kind) for kind in kinds if cost.value(cost.bytes(*kind), **(at or {})) != plan.bytes(*kind)]


def _and_all(values: Iterable[str]) -> list[str | None]:
    return [None, *sorted(set(values))]


@pytest.mark.parametrize(("name", "mesh", "memory"), CASES)
def test_bytes_are_the_plans(name: str, mesh: tuple[int, ...], memory: str) -> None:
    plan = plan_of(name, mesh, memory)
    assert differing(plan, plan.cost()) == []
    assert plan.bytes() > 0


def test_bytes_are_what_a_running_step_receives() -> None:
    torch.manual_seed(0)
    plan = mlp_plan((2, 4, 2))
    model = partir.parallelize(MLP().double(), (2, 4, 2))
    with partir.record_communication() as log:
        model(rows()).sum().backward()
    cost = plan.cost()
    for stage in ("forward", "backward"):
        for axis in sorted({record.axis for record in plan.collectives}):
            assert cost.value(cost.bytes(stage, axis)) == log.bytes(rank=5, stage=stage, axis=axis)


def test_a_broken_monomial_is_noticed() -> None:
    plan = plan_of("gpt", (2, 2, 2), "low")
    cost = plan.cost()
    first = cost.received[0]
    wrong = replace(first, parts=(first.parts[0] * Fraction(3, 2), *first.parts[1:]))
    kind = str((first.record.stage, first.record.axis, first.record.op))
    assert kind in differing(plan, replace(cost, received=(wrong, *cost.received[1:])))
    swapped = replace(first, parts=(first.parts[0].times(["B"]) * Fraction(1, 16), *first.parts[1:]))  # right for this batch alone
    other = replace(cost, received=(swapped, *cost.received[1:]))
    assert differing(plan, other) == []
    assert differing(plan_of("gpt", (2, 4, 2), "low", 32, 8), other, {"y": 4, "B": 32, "S": 8}) != []


# --- the formulas of three_d.md ---

STATE_Y = {"pin": {"x": "f[b@x.y, s, h@z]"}, "outputs": "sharded"}  # as a layer finds it between two others


class Layers(nn.Module):
    """Bias-free layers without an embedding or a head."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        config = GPTConfig(num_heads=8, hidden=hidden, bias=False)
        self.blocks = nn.ModuleList(Block(config) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@functools.cache
def matrices_of_a_layer(memory: str) -> sympy.Expr:
    """Return the bytes of an interior layer's gathers and scatters; its norms' all-reduces and vectors are no part of the formula."""
    with torch.device("meta"):
        model, example = Layers(), torch.empty(16, 16, HIDDEN)
    cost = partir.plan(model, (2, 2, 2), example, memory=memory, **STATE_Y).cost()
    return total(one for one in cost.received if one.record.layer == "blocks.1" and one.record.op in ("all_gather", "reduce_scatter"))


def law_of_a_layer(memory: str, tokens: Any, hidden: int) -> Any:
    """Return three_d.md's elements of one layer in one step."""
    x, y, z = (cast(Any, symbol(name)) for name in "xyz")
    weights = 12 * hidden**2 * (x - 1)
    elements = 2 * (tokens * hidden * (4 * (y - 1) + 12 * (z - 1)) + weights)
    if memory == "low":
        elements += tokens * hidden * (2 * (y - 1) + 5 * (z - 1)) + weights
    return elements / (x * y * z)


@pytest.mark.parametrize("memory", ["fast", "low"])
def test_a_layer_is_the_formula(memory: str) -> None:
    tokens = cast(Any, symbol("B")) * symbol("S")
    found: Any = matrices_of_a_layer(memory)
    assert sympy.simplify(found - 4 * law_of_a_layer(memory, tokens, HIDDEN)) == 0
    assert sympy.simplify(found - 4 * law_of_a_layer(memory, tokens, 2 * HIDDEN)) != 0


BEST = {
    ("fast", 1): {(2, 8, 4), (4, 8, 2)},
    ("fast", 4): {(8, 4, 2)},
    ("fast", 16): {(16, 4, 1)},
    ("low", 1): {(2, 8, 4)},
    ("low", 4): {(8, 4, 2)},
    ("low", 16): {(16, 4, 1)},
}
MORE_ON_THE_CUBE = {("fast", 1): 11, ("fast", 4): 27, ("fast", 16): 116, ("low", 1): 17, ("low", 4): 18, ("low", 16): 94}


@pytest.mark.parametrize(("memory", "ratio"), BEST)
def test_the_best_mesh_of_64_ranks(memory: str, ratio: int) -> None:
    """Every (x, y, z) of 64 ranks, T = ratio * h: those of least bytes, and how much more the cube moves."""
    expression: Any = matrices_of_a_layer(memory).subs({symbol("B"): ratio, symbol("S"): HIDDEN})
    sizes = [2**n for n in range(7)]
    meshes = [(x, y, 64 // (x * y)) for x in sizes for y in sizes if x * y <= 64]
    moved = {mesh: expression.subs(dict(zip(map(symbol, "xyz"), mesh))) for mesh in meshes}
    least = min(moved.values())
    assert {mesh for mesh in meshes if moved[mesh] == least} == BEST[memory, ratio]
    assert round(100 * (moved[4, 4, 4] / least - 1)) == MORE_ON_THE_CUBE[memory, ratio]


# --- other sizes ---

OTHER = [((2, 2, 4), 16, 16), ((2, 4, 2), 32, 8)]
SLOW_OTHER = [("gpt", "fast"), ("llama", "low"), ("llama", "fast"), ("hf_gpt2", "low"), ("hf_gpt2", "fast")]


@pytest.mark.parametrize(("name", "memory"), [("gpt", "low"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_OTHER)])
def test_one_cost_holds_for_other_meshes_and_batches(name: str, memory: str) -> None:
    cost = plan_of(name, (2, 2, 2), memory).cost()
    for mesh, batch, sequence in OTHER:
        plan = plan_of(name, mesh, memory, batch, sequence)
        own, at = plan.cost(), {**dict(zip("xyz", mesh)), "B": batch, "S": sequence}
        assert differing(plan, cost, at) == []
        assert cost.peak_memory(at) == own.peak_memory()
        assert cost.value(cost.flops(), **at) == own.value(own.flops())


def test_symbols_of_ones_own() -> None:
    plan = plan_of("gpt", (2, 2, 2), "low")
    cost = plan.cost({"batch": ("ids", 0)})
    assert cost.values == {"x": 2, "y": 2, "z": 2, "batch": 16}
    assert differing(plan, cost) == []
    with pytest.raises(PartirError, match=r"symbol N: there is no dim 2 of an input 'ids'; inputs are ids \[16, 16\], labels \[16, 16\]"):
        plan.cost({"N": ("ids", 2)})
    with pytest.raises(PartirError, match=r"cost.value\(w=...\): no such symbol; this plan's are x=2, y=2, z=2, batch=16"):
        cost.value(cost.bytes(), w=3)


def test_it_prints_readable_expressions() -> None:
    text = str(plan_of("gpt", (2, 2, 2), "low").cost())
    assert text.startswith("one rank, one step, with x=2, y=2, z=2, B=16, S=16\n")
    assert "(z - 1)/(x*y*z)" in text
    for kind in ("parameters", "gradients", "optimizer", "saved activations", "temporaries", "outputs"):
        assert f"\n  {kind} " in text


# --- memory ---


def test_kinds_of_memory() -> None:
    """Parameters are the program's blocks, AdamW holds two more, and the kinds add up to the peak."""
    plan = plan_of("gpt", (2, 2, 2), "low")
    cost = plan.cost()
    held = {kind: cost.value(expression) for kind, expression in cost.memory.items()}
    slots = [slot for slot in plan.program.inputs if slot.kind in ("parameter", "buffer")]
    parameters = sum(torch.Size(slot.local_shape(plan.mesh)).numel() * slot.dtype.itemsize for slot in slots)
    assert held["parameters"] == parameters
    assert held["optimizer"] == 2 * parameters
    assert sum(held.values()) == cost.peak_memory()
    at_end = sum(block.bytes.value(cost.values) for block in cost.blocks if block.kind == "gradients")
    assert at_end == parameters
    assert held["temporaries"] > 0 < held["saved activations"]


QUICK_MEMORY = [("gpt", (2, 2, 2), "low"), ("gpt", (8, 1, 1), "low"), ("llama", (1, 4, 1), "fast"), ("hf_gpt2", (1, 1, 8), "low")]
MEMORY = list(itertools.product(("gpt", "llama", "hf_gpt2"), [*MESHES, (8, 1, 1), (1, 1, 8)], ("low", "fast")))


@pytest.mark.parametrize(
    ("name", "mesh", "memory"), [case if case in QUICK_MEMORY else pytest.param(*case, marks=pytest.mark.slow) for case in MEMORY]
)
def test_the_peak_is_what_a_rank_holds(name: str, mesh: tuple[int, ...], memory: str) -> None:
    """Within 10% of the live storages of one rank of the distributed runtime: messages under way, copies and all."""
    plan = plan_of(name, mesh, memory)
    cost = plan.cost()
    predicted = sum(cost.value(held) for kind, held in cost.memory.items() if kind != "optimizer")
    assert predicted == pytest.approx(step_bytes(plan.program), rel=0.1)


def test_monomials() -> None:
    rows_of_a_rank = Monomial.of(6, ["B", "S"], ["x"])
    assert str(rows_of_a_rank * rows_of_a_rank.over(["x"])) == "36*B**2*S**2/x**3"
    assert rows_of_a_rank / rows_of_a_rank == Monomial()
    assert rows_of_a_rank.times(["x"]).value({"B": 2, "S": 3}) == 36
    assert rows_of_a_rank.value({"B": 1, "S": 1, "x": 4}) == Fraction(3, 2)
    assert (rows_of_a_rank * rows_of_a_rank).is_square() and not rows_of_a_rank.is_square()


class Front(nn.Module):
    """Begins with an op whose backward leaves out the gradient of its input, which takes none."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.head = first, nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(x)).square().mean()


@pytest.mark.parametrize("first", [nn.Conv1d(4, 6, 3, padding=1), nn.LayerNorm(16), nn.BatchNorm1d(4)], ids=lambda m: type(m).__name__)
def test_a_gradient_that_nobody_wants_costs_nothing(first: nn.Module, tmp_path: Path) -> None:
    model, x = Front(first), torch.randn(8, 4, 16)
    plan = partir.plan(model, (2, 1, 1), x)
    assert plan.cost().peak_memory() > 0 and plan.time("dgx-a100").seconds > 0
    plan.timeline(tmp_path / "trace.json", "dgx-a100")
    assert len(partir.suggest_mesh(model, 2, x, sure=1)) > 1


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize("mesh", [(2, 1, 2), (2, 2, 2)])
def test_a_bias_that_every_step_reads_is_gathered_once(layer: Any, mesh: tuple[int, ...]) -> None:
    """A recurrent layer reads its vectors at every step: they are in the message once, and their gradients are added before they leave."""
    model, x = layer(8, 8).double(), torch.randn(4, 4, 8, dtype=torch.float64)
    plan = partir.plan(model, mesh, x)
    for node in plan.program.forward.graph.nodes:
        if is_collective(node) and collective_name(node) == "all_gather_bucket":
            assert len(operands(node)) == len(set(operands(node))) == 2
    longer = partir.plan(model, mesh, torch.randn(8, 4, 8, dtype=torch.float64))
    vectors = [sum(c.bytes for c in one.collectives if "vectors" in c.reason) for one in (plan, longer)]
    assert vectors[0] == vectors[1] > 0
    cost = plan.cost()
    assert cost.value(cost.bytes()) == plan.bytes() and cost.peak_memory() > 0
    partir.verify(model, mesh, x)
