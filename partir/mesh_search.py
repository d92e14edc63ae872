"""The search behind `partir.suggest_mesh`: one trace, and a template for each class of meshes, compiled when a mesh asks for it.

Until its own class is compiled a mesh is estimated: one with an axis of one rank from a class with more axes, one on which other sizes
divide as if they all did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.fx import GraphModule

from partir.cost.cost import Cost, cost_in_symbols, sizes_of
from partir.cost.prices import Fleet
from partir.cost.sizes import ProgramSizes
from partir.cost.symbols import input_symbols
from partir.cost.template import Figures, Padded, Template, pad_symbols, parameter_parts_of, parts_of
from partir.errors import PartirError
from partir.hardware import Hardware
from partir.mesh import AXES, Mesh
from partir.mesh_proofs import Proofs
from partir.options import Options
from partir.passes import pipeline
from partir.passes.choose_pads import choose_pads
from partir.passes.fold_layers import fold_layers, is_periodic
from partir.passes.pipeline import Lowered
from partir.passes.trace import trace
from partir.precision import without_autocast
from partir.program import Program
from partir.records import collectives_of
from partir.rules.placement import placement
from partir.suggestions import Suggestion

SMALL = 300
"""Nodes of a trace of which no layers are left out: what that saves is not worth what it may be off."""

Place = tuple[int, dict[str, int]]
"""The number of a template, and the values of its symbols."""


@dataclass(frozen=True)
class Estimate:
    """A suggestion, and how far it may be off.

    Args:
        suggestion: exact, or evaluated on a program that is not proven to be the mesh's own.
        least_bytes, least_seconds, least_memory: what it may be at least.
    """

    suggestion: Suggestion
    least_bytes: float
    least_seconds: float
    least_memory: float


@dataclass
class Search:
    """One trace, and the templates compiled from it so far.

    Args:
        model, args, kwargs: what is traced.
        options: of the compiler.
        modes: memory modes.
        hardware: profile.
        axes: that may have more than one rank.
        progress: is told of each class that is compiled.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: Options
    modes: Sequence[str]
    hardware: Hardware
    axes: Sequence[str] = AXES
    progress: Callable[[str], None] | None = None
    templates: list[Template] = field(default_factory=list[Template])

    def __post_init__(self) -> None:
        self._traced = trace(self.model, self.args, self.kwargs, self.options.compute_dtype)
        self._law = placement(self.options.placement)
        self._fleet = Fleet(self.hardware)
        self._fold(1 if len(self._traced.graph_module.graph.nodes) > SMALL else None)

    def _fold(self, period: int | None) -> None:
        """Leave out layers that repeat each other after a period, and forget what was compiled."""
        self.folded = fold_layers(self._traced, period)
        with without_autocast():
            self._graph = pipeline.factorise(self.folded.traced)
        dims = [dim for node in self._graph.graph.nodes for result in node.meta.get("subdims", ()) for dim in result]
        self._sizes = {one.key: one.size for dim in dims for one in dim}
        self.templates.clear()
        self._failed = dict[Mesh, str]()
        self._pads = dict[Mesh, Padded]()
        self._known = dict[tuple[int, str, Mesh], Figures]()
        self._values = dict[tuple[int, Mesh], "dict[str, int] | None"]()
        self._proofs = Proofs(self._lay_out)

    def run(self, meshes: Sequence[Mesh]) -> list[Estimate]:
        """Return a suggestion for each mesh and mode; what cannot be compiled says why."""
        folded = None
        places: list[Place | None] = []
        while folded is not self.folded:  # a class that is not periodic folds the layers anew
            folded = self.folded
            places = [self._place(mesh) for mesh in meshes]
        of_templates: dict[int, list[tuple[Mesh, Place]]] = {}
        found: list[Estimate] = []
        for mesh, place in zip(meshes, places, strict=True):
            if place is None:
                found += [Estimate(Suggestion(_tuple(mesh), mode, 0, 0.0, 0, self._failed[mesh]), 0, 0.0, 0) for mode in self.modes]
            else:
                of_templates.setdefault(place[0], []).append((mesh, place))
        for number, members in of_templates.items():
            for mode in self.modes:
                found += self._evaluated(number, mode, members)
        return found

    def _evaluated(self, number: int, mode: str, members: Sequence[tuple[Mesh, Place]]) -> list[Estimate]:
        """Return the suggestions of a template for some meshes; each is made once, for other classes do not change it."""
        new = [(mesh, place[1]) for mesh, place in members if (number, mode, mesh) not in self._known]
        if new:
            template = self.templates[number]
            made = template.evaluate(mode, [mesh for mesh, _ in new], [values for _, values in new], self._fleet)
            for (mesh, values), one in zip(new, made, strict=True):
                more = 0 if self._sizes_on(number, mesh) else template.replicated(mode, mesh, values)
                self._known[number, mode, mesh] = replace(one, memory=one.memory + more, least_memory=one.memory)
        return [self._estimate(number, mode, mesh) for mesh, _ in members]

    def _estimate(self, number: int, mode: str, mesh: Mesh) -> Estimate:
        one, exact = self._known[number, mode, mesh], bool(self._proofs.is_own(number, mesh))
        suggestion = Suggestion(_tuple(mesh), mode, one.bytes, one.seconds, one.memory, exact=exact)
        if exact:
            return Estimate(suggestion, one.bytes, one.seconds, one.memory)
        template = self.templates[number]
        margin, of_memory = self._proofs.margins(number, template, mesh, self._sizes_on(number, mesh) is not None)
        return Estimate(suggestion, one.bytes * (1 - margin), one.least_seconds * (1 - margin), one.least_memory * (1 - of_memory))

    def effort(self, meshes: Sequence[Mesh]) -> int:
        """Return about how many nodes of programs it takes to compile for each set of axes and pads of some meshes."""
        classes = {(mesh.split_axes(), frozenset(self._padded(mesh))) for mesh in meshes}
        programs = [program for template in self.templates[:1] for program in template.programs.values()]
        graphs = [graph for program in programs for graph in (program.forward, program.backward) if graph is not None]
        return len(classes) * sum(len(graph.graph.nodes) for graph in graphs)

    def look_closer(self, mesh: Mesh) -> bool:
        """Lay a mesh out anew; return whether that is new, and some program is the mesh's own or laid out like it."""
        known = self._proofs.has_seen(mesh)
        return not known and (self._prove(mesh) or any(self._proofs.is_alike(number, mesh) for number, _ in self._matching(mesh)))

    def make_sure(self, mesh: Mesh) -> None:
        """Prove that a program which is there is a mesh's own, or compile one that is."""
        if self._prove(mesh):
            return
        for like in self._likes(mesh):
            if self._compiles(like, mesh) and self._prove(mesh):
                return
        self._failed.setdefault(mesh, "its program is of no known class")

    def _likes(self, mesh: Mesh) -> list[Mesh]:
        """Return meshes whose program may be that of a mesh, and of others: first with all axes more that change no op's form."""
        template = next((self.templates[number] for number, _ in self._matching(mesh)), None)
        free, smallest = self._free_axes(mesh, template), _smallest(mesh)
        likes = [_with(smallest, axes) for axes in (free, *([one for one in free if one != axis] for axis in free), [])]
        known = [one.mesh for one in self.templates]
        new = [one for one in dict.fromkeys(likes) if one not in known and _tuple(one) != _tuple(mesh)]
        return [*(one for one in new if set(self._padded(one)) == set(self._padded(mesh))), mesh]

    def _prove(self, mesh: Mesh) -> bool:
        return any(self._proofs.prove(number, self.templates[number], mesh) for number, _ in self._matching(mesh))

    def _lay_out(self, mesh: Mesh) -> GraphModule:
        with without_autocast():
            return pipeline.lay_out(self.folded.traced, mesh, self.options, self._graph)

    def _place(self, mesh: Mesh) -> Place | None:
        """Return the template that stands for a mesh, that of the fewest axes before others; None: it fails."""
        found = None
        while mesh not in self._failed and found is None:
            found = self._template(mesh) or self._relaxed(mesh)
            if found is None:
                self._compile_class(mesh)
        return found

    def _template(self, mesh: Mesh) -> Place | None:
        """Return the template of a mesh's class: one that is proven to be its own before one that may be, and no other."""
        found = [(self._proofs.is_own(place[0], mesh), place) for place in self._matching(mesh)]
        return min((one for one in found if one[0] is not False), key=lambda one: not one[0], default=(None, None))[1]

    def _matching(self, mesh: Mesh) -> list[Place]:
        """Return the templates on which the same sizes divide and are padded, those of the fewest axes first."""
        places = [(number, self._sizes_on(number, mesh)) for number in self._wider(mesh)]
        return [(number, sizes) for number, sizes in places if sizes is not None]

    def _sizes_on(self, number: int, mesh: Mesh) -> dict[str, int] | None:
        if (number, mesh) not in self._values:
            self._values[number, mesh] = self.templates[number].sizes(mesh, self._padded(mesh))
        return self._values[number, mesh]

    def _relaxed(self, mesh: Mesh) -> Place | None:
        """Return the template that stands for a mesh as if all sizes divided: the one of fewest axes that pads the same dims."""
        padded = self._padded(mesh)
        numbers = [number for number in self._wider(mesh) if set(self.templates[number].padded) == set(padded)]
        return (numbers[0], self.templates[numbers[0]].relaxed(mesh, padded)) if numbers else None

    def _wider(self, mesh: Mesh) -> list[int]:
        """Return the numbers of the templates of all axes of a mesh, those of the fewest more first."""
        axes = set(mesh.split_axes())
        wider = [n for n, template in enumerate(self.templates) if set(template.mesh.split_axes()) >= axes]
        return sorted(wider, key=lambda n: len(self.templates[n].mesh.split_axes()))

    def _compile_class(self, mesh: Mesh) -> None:
        """Compile for all axes where that serves the mesh too, or for its own; of the smallest sizes, on which most sizes divide.

        Where a program of the smallest sizes is there and another class, the mesh's own sizes are what makes the difference. The first is
        for all axes and the smallest sizes, for most meshes are estimated from it.
        """
        if not self.templates and self._compiles(_with(_smallest(mesh), self.axes)):
            return
        axes, padded = set(mesh.split_axes()), set(self._padded(mesh))
        divided = [one for one in self.templates if set(one.mesh.split_axes()) >= axes and set(one.padded) == padded]
        sizes = [mesh] if divided else [_smallest(mesh), mesh]
        self._compile_first([each for like in sizes for each in (_with(like, self.axes), like)], mesh)

    def _compile_first(self, likes: Sequence[Mesh], mesh: Mesh) -> None:
        """Compile for the first of some meshes that serves another."""
        for like in dict.fromkeys(likes):
            known = {template.mesh for template in self.templates}
            if like in known or set(self._padded(like)) != set(self._padded(mesh)):
                continue
            if self._compiles(like) and self._sizes_on(len(self.templates) - 1, mesh) is not None:
                return
        self._failed.setdefault(mesh, "its program is of no known class")

    def _compiles(self, mesh: Mesh, serving: Mesh | None = None) -> bool:
        """Compile for a mesh, if that is the program of another; where it fails, note why; return whether it was compiled."""
        try:
            with without_autocast():
                low = self._lower(mesh)
                if serving is not None and not self._proofs.is_program_of(low, self._padded(mesh), serving):
                    return False
                self.templates.append(self._compile(low))
        except PartirError as error:
            self._failed[mesh] = str(error)
        return mesh not in self._failed

    def _free_axes(self, mesh: Mesh, template: Template | None) -> list[str]:
        """Return the axes that a mesh lacks; of those of a template, the ones that change no op's form."""
        axes = mesh.split_axes()
        for axis in self.axes:
            if axis not in axes and (template is None or template.other_forms(axes) == template.other_forms((*axes, axis))):
                axes = (*axes, axis)
        return [axis for axis in axes if mesh[axis] == 1]

    def _padded(self, mesh: Mesh) -> Padded:
        if mesh not in self._pads:
            pads = choose_pads(self._graph, mesh, self._law)
            self._pads[mesh] = {key: (self._sizes[key], size) for key, size in pads.items()}
        return self._pads[mesh]

    def _lower(self, mesh: Mesh) -> Lowered:
        low = pipeline.lower(self.folded.traced, mesh, self.options, factorised=self._graph)
        if not is_periodic(low.annotated, self.folded):
            self._fold(2 if self.folded.period == 1 else None)
            return self._lower(mesh)
        return low

    def _compile(self, low: Lowered) -> Template:
        if self.progress is not None:
            self.progress(f"compiling for {low.mesh}")
        keys, values, names = pad_symbols(low)
        programs, sizes, costs = dict[str, Program](), dict[str, ProgramSizes](), dict[str, Cost]()
        for mode, compiled in pipeline.derive_each(low, self.modes).items():
            inputs = input_symbols(compiled, None)
            known = {**inputs.values, **values}
            programs[mode], sizes[mode] = compiled.program, sizes_of(compiled, {**inputs.keys, **keys}, known)
            costs[mode] = cost_in_symbols(compiled, collectives_of(compiled.program), sizes[mode], known, self.folded.counts)
        parts = parts_of(low.graph, keys, low.mesh), parameter_parts_of(low, keys)
        return Template(low, self._padded(low.mesh), names, *parts, programs, sizes, costs, self.folded)


def _smallest(mesh: Mesh) -> Mesh:
    """Return the mesh of the same axes whose sizes are the smallest prime of each: on it most sizes divide."""
    primes = [next((p for p in range(2, size + 1) if size % p == 0), 1) for size in mesh.sizes]
    return Mesh(mesh.names, tuple(primes))


def _with(mesh: Mesh, axes: Sequence[str]) -> Mesh:
    """Return a mesh with at least two ranks along some axes."""
    return Mesh(AXES, tuple(max(mesh[axis], 2 if axis in axes else 1) for axis in AXES))


def _tuple(mesh: Mesh) -> tuple[int, ...]:
    sizes = tuple(mesh[axis] for axis in AXES)
    return sizes if sizes[0] > 1 else sizes[1:]
