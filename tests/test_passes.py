"""Each pass by what it makes of small modules (tests/golden, one file a pass), and what all passes keep.

A missing golden file fails; `pytest tests/test_passes.py --update-golden` writes them anew: read the difference.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from partir.graph import collective_name, is_collective
from partir.layout import dtype_name
from partir.passes.run_passes import copy_graph
from partir.passes.share_gathers import share_gathers
from partir.printer import graph_text
from tests.passes_run import PassRun, run_passes

GOLDEN = Path(__file__).parent / "golden"
MESH = (2, 2, 2)


class ChunkedQKV(nn.Module):
    """A fused linear whose output is chunked and viewed as heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(8, 2, 4, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(x)))


class TiedHead(nn.Module):
    """Embedding, tied head and cross entropy: lookups, a split vocabulary and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 16)

    def forward(self, ids: Tensor) -> Tensor:
        logits = F.linear(self.embedding(ids), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Layers(nn.Module):
    """Two items of a list, each with vectors to gather together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), MLP()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class SeparateQKV(nn.Module):
    """Three linears that read one tensor, which another has made."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16, bias=False)
        self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return self.q(x) * self.k(x) + self.v(x)


def hidden_states() -> Tensor:
    return torch.zeros(8, 2, 16)


class OddHead(nn.Module):
    """A table of 23 rows, read and multiplied, a batch of 3; logits and their loss leave."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 16)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(self.embedding(ids), self.embedding.weight)
        return F.cross_entropy(logits, ids), logits


MODULES: dict[str, tuple[type[nn.Module], Callable[[], Tensor]]] = {
    "chunked qkv": (ChunkedQKV, hidden_states),
    "layer norm": (Norm, hidden_states),
    "mlp": (MLP, hidden_states),
    "tied head": (TiedHead, lambda: torch.zeros(8, 2, dtype=torch.int64)),
    "layers": (Layers, hidden_states),
    "separate qkv": (SeparateQKV, hidden_states),
    "odd head": (OddHead, lambda: torch.zeros(3, dtype=torch.int64)),
}


@lru_cache
def runs(module: str) -> dict[str, PassRun]:
    make, example = MODULES[module]
    return run_passes(make(), (example(),), MESH, outputs="sharded")


def subdims_text(graph: GraphModule) -> str:
    """Return every value with the sub-dims of its dims, and every call's factors that no operand agrees on."""
    lines: list[str] = []
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
        shown = [f"{dtype_name(v.dtype)}[{', '.join(map(product, dims))}]" for v, dims in zip(values, node.meta["subdims"], strict=True)]
        broken = f"    broken {', '.join(sorted(node.meta['broken']))}" if node.meta.get("broken") else ""
        lines.append(f"%{node.name}: {'; '.join(shown)}{broken}")
    return "\n".join(lines) + "\n"


def product(subdims: Sequence[Any]) -> str:
    """Return a dim's sub-dims as text; `!` marks one that a chunk or select consumes."""
    sizes = [f"{sub.size}{'!' if sub.avoid else ''}" for sub in subdims]
    return f"({'*'.join(sizes)})" if len(sizes) > 1 else sizes[0] if sizes else "1"


def shared(module: str) -> tuple[str, str]:
    before = runs(module)["insert_collectives"].after
    return graph_text(before), graph_text(share_gathers(before))


def texts(name: str, module: str) -> tuple[str, str]:
    if name == "share_gathers":
        return shared(module)
    run = runs(module)[name]
    if name == "factorise_dims":
        return graph_text(run.before), subdims_text(run.after)
    return graph_text(run.before), graph_text(run.after)


GOLDENS = {
    "factorise_dims": ["chunked qkv", "tied head"],
    "pad_dims": ["odd head"],
    "leave_padded": ["odd head"],
    "annotate_layouts": ["mlp", "chunked qkv", "tied head"],
    "insert_collectives": ["mlp", "tied head"],
    "expand_recipes": ["layer norm", "tied head"],
    "localize_shapes": ["chunked qkv", "tied head"],
    "bucket_vectors": ["layers"],
    "share_gathers": ["separate qkv"],
    "name_values": ["layer norm"],
}


def golden_text(name: str) -> str:
    parts = [f"{name} on the mesh (x=2, y=2, z=2)\n"]
    for module in GOLDENS[name]:
        before, after = texts(name, module)
        parts.append(f"\n=== {module}: before\n{before}\n=== {module}: after\n{after}")
    return "".join(parts)


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name: str, request: pytest.FixtureRequest) -> None:
    path, actual = GOLDEN / f"{name}.txt", golden_text(name)
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(actual, encoding="ascii")
    assert path.exists(), f"{path} is missing; write it with --update-golden and read it"
    assert actual == path.read_text(encoding="ascii")


def test_every_golden_file_has_a_pass() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*")) == sorted(GOLDENS)


PASSES = [
    "decompose_ops",
    "factorise_dims",
    "pad_dims",
    "annotate_layouts",
    "leave_padded",
    "insert_collectives",
    "expand_recipes",
    "localize_shapes",
    "bucket_vectors",
    "name_values",
]


def test_these_are_the_pipelines_passes_in_order() -> None:
    assert list(runs("layers")) == PASSES
    assert set(GOLDENS) - {"share_gathers"} <= set(PASSES)


def snapshot(graph: GraphModule) -> list[str]:
    """Return everything of a graph that a pass could change: nodes, arguments and what their meta says."""
    facts = ["layout", "operands", "computed", "assignment", "subdims", "factors", "broken", "state", "direction"]
    facts += ["origin", "reason", "pads"]
    lines: list[str] = []
    for node in graph.graph.nodes:
        known = {key: str(node.meta[key]) for key in facts if key in node.meta}
        lines.append(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {sorted(node.meta)} {known}")
    return lines


@pytest.mark.parametrize("module", ["layers", "tied head", "odd head"])
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_leaves_its_input_alone(name: str, module: str) -> None:
    run = runs(module)[name]
    before, after = snapshot(run.before), snapshot(run.after)
    again = run.again(run.before)
    assert snapshot(run.before) == before
    assert snapshot(again) == after, "two runs differ"


CLAIMED = [
    name for name in PASSES if "Idempotent" in (importlib.import_module(f"partir.passes.{name}").__doc__ or "")
]


def test_passes_that_claim_to_be_idempotent() -> None:
    assert {"factorise_dims", "expand_recipes", "bucket_vectors", "name_values"} <= set(CLAIMED)


@pytest.mark.parametrize("module", ["layers", "tied head", "chunked qkv", "odd head"])
@pytest.mark.parametrize("name", CLAIMED)
def test_a_pass_that_claims_it_is_idempotent(name: str, module: str) -> None:
    run = runs(module)[name]
    assert graph_text(run.again(run.after)) == graph_text(run.after)


def test_share_gathers_is_idempotent_and_pure() -> None:
    graph = runs("separate qkv")["localize_shapes"].after
    before, once = snapshot(graph), share_gathers(graph)
    assert snapshot(graph) == before
    assert graph_text(share_gathers(once)) == graph_text(once)


def gathers(graph: GraphModule, axis: str) -> int:
    calls = [node for node in graph.graph.nodes if is_collective(node) and collective_name(node).startswith("all_gather")]
    return sum((node.kwargs.get("axis") or node.args[1]) == axis for node in calls)


def test_one_gather_for_three_readers() -> None:
    """q, k and v read one gathered tensor; the weights of the four linears are gathered each."""
    graph = runs("separate qkv")["localize_shapes"].after
    shared = share_gathers(graph)
    assert (gathers(graph, "z"), gathers(shared, "z")) == (3, 1)
    assert (gathers(graph, "x"), gathers(shared, "x")) == (4, 4)


def test_one_gather_for_all_the_vectors_of_a_layer() -> None:
    graph = runs("layers")["bucket_vectors"].after
    buckets = [node for node in graph.graph.nodes if is_collective(node) and collective_name(node) == "all_gather_bucket"]
    assert [len(node.args[0]) for node in buckets] == [4, 4]
    assert [node.meta["reason"] for node in buckets] == ["vectors of layers.0", "vectors of layers.1"]
    matrices = [node for node in graph.graph.nodes if is_collective(node) and collective_name(node) == "all_gather"]
    assert all(len(node.meta["val"].shape) > 1 for node in matrices)


def test_copies_have_their_own_meta() -> None:
    graph = runs("mlp")["insert_collectives"].after
    copy = copy_graph(graph)
    for node in copy.graph.nodes:
        node.meta["layout"] = None
    assert all(node.meta.get("layout") is not None for node in graph.graph.nodes if node.op != "output")
