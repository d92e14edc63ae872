"""What one rank computes in each node of a program, for any sizes: floating-point operations, and bytes read and written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from partir.collectives import split_axes
from partir.cost.monomial import Monomial
from partir.cost.sizes import ProgramSizes
from partir.errors import module_path
from partir.graph import is_collective, operands, tensor_of, tensors_of
from partir.records import axis_of, layer_of
from partir.work import is_work, node_bytes, node_flops

if TYPE_CHECKING:
    from partir.passes.pipeline import Compiled


@dataclass(frozen=True)
class Work:
    """One node.

    Args:
        stage, node: its name in the graph of its stage.
        flops: a multiplication and an addition are two.
        memory: bytes read and written; their sum counts.
        dtype: in which it computes.
        axes: of a collective that moves nothing (a slice): where all of them have one rank there is nothing to do.
        origin: the call of the annotated graph that it serves.
        layer: a list item's path, ``"blocks.0"``, or ``""``.
        count: how often it runs: more than once in a layer that stands for others.
    """

    stage: str
    node: str
    flops: Monomial
    memory: tuple[Monomial, ...]
    dtype: torch.dtype
    axes: tuple[str, ...] = ()
    origin: str = ""
    layer: str = ""
    count: int = 1

    def memory_value(self, sizes: Any) -> Any:
        """Return the bytes for these sizes."""
        return sum((part.value(sizes) for part in self.memory), 0)


def work_of(compiled: Compiled, sizes: ProgramSizes, counts: Mapping[str, int]) -> tuple[Work, ...]:
    """Return the work of each node that computes, in the order of the graphs; ``counts``: how many layers a layer stands for."""
    program = compiled.program
    shares = _shares(compiled.annotated.graph.nodes, sizes)
    graphs = (("forward", program.forward), ("backward", program.backward))
    return tuple(one for stage, module in graphs if module is not None for one in _stage(stage, module, shares, sizes, counts))


def _stage(
    stage: str, module: GraphModule, shares: Mapping[str, Monomial], sizes: ProgramSizes, counts: Mapping[str, int]
) -> Iterable[Work]:
    for node in module.graph.nodes:
        if not is_work(node):
            continue
        flops = 0 if is_collective(node) else node_flops(node)
        dtype = tensor_of(operands(node)[0]).dtype if flops and operands(node) else tensors_of(node)[0].dtype
        origin = str(node.meta.get("origin"))
        done = _in_symbols(flops, shares.get(origin), sizes)
        layer = layer_of(module_path(node.meta))
        axes = split_axes(axis_of(node)) if is_collective(node) else ()
        yield Work(stage, node.name, done, _memory(node, sizes), dtype, axes, origin, layer, counts.get(layer, 1))


def _in_symbols(flops: int, share: Monomial | None, sizes: ProgramSizes) -> Monomial:
    """Return FLOPs in the symbols of the op that a node serves: each of its products, forward or backward, has all its factors."""
    if share is None or not flops:
        return Monomial.of(flops)
    return share * (Fraction(flops) / Fraction(sizes.value(share)))


def _shares(nodes: Iterable[Node], sizes: ProgramSizes) -> dict[str, Monomial]:
    """Return for each annotated call the product of its factors' sizes on one rank."""
    found: dict[str, Monomial] = {}
    for node in nodes:
        if "assignment" not in node.meta:
            continue
        total = Monomial()
        for subdims in node.meta["factors"].values():
            for one in subdims:
                total = total * (Monomial.of(1, [sizes.symbols[one.key]]) if one.key in sizes.symbols else Monomial.of(one.size))
        axes = [axis for split in node.meta["assignment"].values() for axis in split if sizes.mesh[axis] > 1]
        found[node.name] = total.over(axes)
    return found


def _memory(node: Node, sizes: ProgramSizes) -> tuple[Monomial, ...]:
    """Return the bytes that a node reads and writes, as `partir.work.node_bytes` counts them."""
    parts = [*(sizes.bytes_of(read)[0] for read in operands(node)), *sizes.bytes_of(node)]
    counted, whole = node_bytes(node), sum(sizes.value(part) for part in parts)
    if counted == whole:
        return tuple(parts) if whole else ()
    return tuple(part * (Fraction(counted) / Fraction(whole)) for part in parts) if whole else ()
