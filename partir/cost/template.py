"""A compiled program as a template of the meshes that lay it out in the same way: its cost evaluated for each of them.

A class of meshes: those on which every part of every layout of the template divides, and the same sub-dims are padded. The padded
sizes differ from mesh to mesh, so they are symbols here, beside the axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule, Node

from partir.cost.cost import MOMENTS, Cost
from partir.cost.lifetimes import blocks_of
from partir.cost.monomial import Monomial
from partir.cost.prices import Fleet, Prices, prices_of, sizes_at
from partir.cost.sizes import ProgramSizes
from partir.cost.step_seconds import Step, Steps, step_seconds
from partir.dims import Dim
from partir.layout import Layout
from partir.mesh import Mesh
from partir.overlap import Turn, as_run
from partir.pads import Pad
from partir.passes.same_program import other_forms, without
from partir.program import Program
from partir.records import Stage
from partir.subdims import Sizes, SubDim
from partir.work import is_work

if TYPE_CHECKING:
    from partir.passes.fold_layers import Folded
    from partir.passes.pipeline import Compiled, Lowered

SplitPart = tuple[Monomial, tuple[str, ...]]
"""A size, and the axes that split it."""

Padded = Mapping[int, tuple[int, int]]
"""Key of a sub-dim before padding -> its size and its padded size."""


@dataclass(frozen=True, eq=False)
class Template:
    """What one compilation says about a class of meshes.

    Args:
        low: what the programs were derived from.
        padded: the sub-dims that are padded.
        symbols: (size, padded size) -> the symbol of the padded size.
        parts: sizes that axes must divide.
        parameter_parts: those of each parameter and buffer, in the order of the costs' parameters.
        programs: by memory mode.
        sizes_of: by memory mode, the size of each value of the program in symbols.
        costs: by memory mode.
        folded: which layers stand for others.
    """

    low: Lowered
    padded: Padded
    symbols: Mapping[tuple[int, int], str]
    parts: frozenset[SplitPart]
    parameter_parts: tuple[tuple[SplitPart, ...], ...]
    programs: Mapping[str, Program]
    sizes_of: Mapping[str, ProgramSizes]
    costs: Mapping[str, Cost]
    folded: Folded
    _runs: dict[tuple[str, tuple[str, ...]], Run] = field(default_factory=dict[Any, "Run"])
    _forms: dict[tuple[str, ...], frozenset[str]] = field(default_factory=dict[Any, "frozenset[str]"])

    @property
    def mesh(self) -> Mesh:
        """The mesh that it was compiled for."""
        return self.low.mesh

    def other_forms(self, axes: tuple[str, ...]) -> frozenset[str]:
        """Return the calls that would run in another way where only ``axes`` have more than one rank."""
        if axes not in self._forms:
            self._forms[axes] = other_forms(self.low, axes)
        return self._forms[axes]

    def run(self, memory: str, axes: tuple[str, ...]) -> Run:
        """Return how the program runs on meshes on which only ``axes`` have more than one rank: the messages of others do not happen."""
        key = (memory, axes)
        if key not in self._runs:
            program = replace(self.programs[memory], mesh=without(self.mesh, axes))
            blocks = blocks_of(program, self.sizes_of[memory], self.folded.counts)
            cost = replace(self.costs[memory], blocks=blocks)
            layers = [one.layer for one in cost.work]
            self._runs[key] = Run(cost, {stage: Steps(steps, layers) for stage, steps in steps_of(program, cost).items()})
        return self._runs[key]

    def sizes(self, mesh: Mesh, padded: Padded) -> dict[str, int] | None:
        """Return the value of each symbol on a mesh, None where the mesh is of another class.

        Args:
            padded: what `choose_pads` pads there.
        """
        if set(padded) != set(self.padded):
            return None
        values: dict[str, int] = {axis: mesh[axis] for axis in self.mesh.names}
        for key, (size, wanted) in padded.items():
            name = self.symbols[(size, self.padded[key][1])]
            if values.setdefault(name, wanted) != wanted:
                return None
        for part, axes in self.parts:
            size = part.value(values)
            if not isinstance(size, int) or size % mesh.extent(axes):
                return None
        return values

    def relaxed(self, mesh: Mesh, padded: Padded) -> dict[str, int]:
        """Return the value of each symbol on a mesh of another class, as if every size divided there.

        Args:
            padded: what `choose_pads` pads there: the same sub-dims as here.
        """
        pads = {self.symbols[(size, wanted)]: padded[key][1] for key, (size, wanted) in self.padded.items()}
        return {**{axis: mesh[axis] for axis in self.mesh.names}, **pads}

    def replicated(self, memory: str, mesh: Mesh, sizes: Mapping[str, int]) -> int:
        """Return the bytes that parameters, gradients and AdamW's moments take more on a mesh than if every size divided there.

        An axis that does not divide what it splits leaves it whole. The compiler may find it another dim: this is the most.
        """
        more, sizes = 0, {**self.costs[memory].values, **sizes}
        for (held, trained), parts in zip(self.costs[memory].parameters, self.parameter_parts, strict=True):
            copies = math.prod(_copies(size.value(sizes), axes, mesh) for size, axes in parts)
            more += int(held.value(sizes) * (copies - 1)) * (2 + MOMENTS if trained else 1)
        return more

    def evaluate(self, memory: str, meshes: Sequence[Mesh], sizes: Sequence[Mapping[str, int]], fleet: Fleet) -> list[Figures]:
        """Return what a step costs on some meshes.

        Args:
            memory: the mode.
            meshes: whose axes of more than one rank the template has.
            sizes: the values of the symbols on each.
            fleet: of the hardware.
        """
        cost = self.costs[memory]
        prices = prices_of(cost, meshes, sizes_at(cost, sizes), fleet)
        of_axes: dict[tuple[str, ...], list[int]] = {}
        for number, mesh in enumerate(meshes):
            of_axes.setdefault(mesh.split_axes(), []).append(number)
        found: dict[int, Figures] = {}
        for axes, numbers in of_axes.items():
            found |= zip(numbers, self._figures(memory, axes, prices.of(numbers)), strict=True)
        return [found[number] for number in range(len(meshes))]

    def _figures(self, memory: str, axes: tuple[str, ...], prices: Prices) -> list[Figures]:
        """Return what a step costs on meshes on which the same axes have more than one rank."""
        run, other, spans = self.run(memory, axes), self.other_forms(axes), self.folded.spans
        seconds = step_seconds(run.steps, spans, prices)
        least = step_seconds(run.steps, spans, prices.without(run.cost, other)) if other else seconds
        held = run.cost.peak_of(prices.bytes_of)
        columns = zip(prices.received, seconds, least, held, strict=True)
        return [Figures(round(r), float(s), float(m), round(h), round(h)) for r, s, m, h in columns]


def _copies(size: Any, axes: tuple[str, ...], mesh: Mesh) -> int:
    """Return how many ranks hold each part of what axes split, where some do not divide it."""
    extent, copies = 1, 1
    for axis in axes:
        divides = size % (extent * mesh[axis]) == 0
        extent, copies = (extent * mesh[axis], copies) if divides else (extent, copies * mesh[axis])
    return copies


@dataclass(frozen=True)
class Figures:
    """What a step costs.

    Args:
        bytes: that one rank receives.
        seconds: that it takes.
        least_seconds: if the calls that run in another way on this mesh than in the template took none.
        memory: the most bytes that one rank holds.
        least_memory: those, if every size divided.
    """

    bytes: int
    seconds: float
    least_seconds: float
    memory: int
    least_memory: int


@dataclass(frozen=True, eq=False)
class Run:
    """How a program runs on some of its axes.

    Args:
        cost: its blocks are those of this run.
        steps: by stage, what a rank does in order.
    """

    cost: Cost
    steps: Mapping[Stage, Steps]


def pad_symbols(compiled: Compiled | Lowered) -> tuple[dict[int, str], dict[str, int], dict[tuple[int, int], str]]:
    """Return the symbols of a compilation's padded sizes: by the key of the padded sub-dim; their values; by (size, padded size)."""
    keys, values, names = dict[int, str](), dict[str, int](), dict[tuple[int, int], str]()
    for node in compiled.annotated.graph.nodes:
        for subdims, present in _padded_dims(node):
            for pad in present:
                name = names.setdefault((pad.size, pad.padded), f"n{pad.size}_{pad.padded}")
                values[name] = pad.padded
                keys |= {subdim.key: name for subdim in _padded_one(subdims, pad)}
    return keys, values, names


def _padded_dims(node: Node) -> Iterator[tuple[Sequence[SubDim], Sequence[Pad]]]:
    """Yield the sub-dims and the pads of the dims of a node's results, and of its factors: one that is summed over is in no result."""
    for dims, pads in zip(node.meta.get("subdims", ()), node.meta.get("result_pads", ())):
        yield from zip(dims, pads)
    for factor, present in node.meta.get("pads", {}).items():
        yield node.meta["factors"][factor], present


def _padded_one(subdims: Sequence[SubDim], pad: Pad) -> list[SubDim]:
    """Return the sub-dim of a dim that a pad belongs to: the one with the pad's block behind it."""
    behind = 1
    for subdim in reversed(subdims):
        if behind == pad.block and subdim.size == pad.padded:
            return [subdim]
        behind *= subdim.size
    return []


def parts_of(lowered: GraphModule, symbols: Mapping[int, str], mesh: Mesh) -> frozenset[SplitPart]:
    """Return every size that a layout of a lowered graph splits, with the axes that must divide it."""
    return frozenset(part for node in lowered.graph.nodes for part in _parts_of_node(node, symbols, mesh))


def parameter_parts_of(low: Lowered, symbols: Mapping[int, str]) -> tuple[tuple[SplitPart, ...], ...]:
    """Return those of each parameter and buffer, in order."""
    slots = zip(low.graph.graph.find_nodes(op="placeholder"), low.inputs, strict=True)
    return tuple(tuple(_parts_of_node(node, symbols, low.mesh)) for node, slot in slots if slot.kind in ("parameter", "buffer"))


def _parts_of_node(node: Node, symbols: Mapping[int, str], mesh: Mesh) -> Iterator[SplitPart]:
    layout, sizes = node.meta.get("layout"), node.meta.get("subdims", ())
    layouts = (layout,) if isinstance(layout, Layout) else tuple(layout or ())
    for number, one in enumerate(layouts):
        yield from _split_parts(one, sizes[number] if number < len(sizes) else None, symbols, mesh)


def _split_parts(layout: Layout, sizes: Sizes | None, symbols: Mapping[int, str], mesh: Mesh) -> list[SplitPart]:
    found: list[SplitPart] = []
    for number, dim in enumerate(layout.dims):
        subdims = list(sizes[number]) if sizes is not None and number < len(sizes) else []
        local = Monomial()
        for part in dim.parts:
            size = _in_symbols(part.size, subdims, symbols)
            if part.axes:
                found.append((size, part.axes))
            local = local * size.over(axis for axis in part.axes if mesh[axis] > 1)
        found += _whole_dim(dim, local)
    return found


def _whole_dim(dim: Dim, local: Monomial) -> list[SplitPart]:
    return [(local, dim.axes)] if dim.axes else []


def _in_symbols(size: int, subdims: list[SubDim], symbols: Mapping[int, str]) -> Monomial:
    """Return a part's size, taking the sub-dims that make it up from the front of ``subdims``."""
    taken, total = 1, Monomial()
    while subdims and taken < size:
        subdim = subdims.pop(0)
        taken *= subdim.size
        total = total * (Monomial.of(1, [symbols[subdim.key]]) if subdim.key in symbols else Monomial.of(subdim.size))
    return total if taken == size else Monomial.of(size)


def steps_of(program: Program, cost: Cost) -> dict[Stage, list[Step]]:
    """Return what a rank does in the order in which the runtime does it."""
    received = {(one.record.stage, one.record.node): number for number, one in enumerate(cost.received)}
    work = {(one.stage, one.node): number for number, one in enumerate(cost.work)}
    stages: list[tuple[Stage, GraphModule | None]] = [("forward", program.forward), ("backward", program.backward)]
    found: dict[Stage, list[Step]] = {}
    for stage, module in stages:
        if module is not None:
            steps = [_step(stage, turn, received, work) for turn in as_run(module, program.mesh)]
            found[stage] = [step for step in steps if step is not None]
    return found


def _step(stage: Stage, turn: Turn, received: Mapping[tuple[str, str], int], work: Mapping[tuple[str, str], int]) -> Step | None:
    node = turn.node
    if turn.kind == "wait":
        return "wait", node.name, 0
    if turn.kind == "start":
        return "start", node.name, received[(stage, node.name)]
    return ("compute", node.name, work[(stage, node.name)]) if is_work(node) else None
