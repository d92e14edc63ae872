"""The search behind `partir.suggest_mesh`: one trace, and a template for each class of meshes, compiled when a mesh asks for it.

A mesh with an axis of one rank is estimated from a class with more axes until its own is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from partir.cost.cost import cost_in_symbols, input_symbols
from partir.cost.step_seconds import Fleet
from partir.cost.template import Padded, Template, pad_symbols, parts_of, steps_of
from partir.errors import PartirError
from partir.hardware import Hardware
from partir.mesh import AXES, Mesh
from partir.options import Options
from partir.passes import pipeline
from partir.passes.choose_pads import choose_pads
from partir.passes.fold_layers import fold_layers, is_periodic
from partir.passes.trace import trace
from partir.records import collectives_of
from partir.rules.placement import placement
from partir.suggestions import Suggestion


@dataclass
class Search:
    """One trace, and the templates compiled from it so far."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: Options
    modes: Sequence[str]
    hardware: Hardware
    progress: Callable[[str], None] | None = None
    templates: list[Template] = field(default_factory=list[Template])

    def __post_init__(self) -> None:
        self._traced = trace(self.model, self.args, self.kwargs, self.options.compute_dtype)
        self._law = placement(self.options.placement)
        self._fleet = Fleet(self.hardware)
        self._fold(1)

    def _fold(self, period: int | None) -> None:
        """Leave out layers that repeat each other after a period, and forget what was compiled."""
        self.folded = fold_layers(self._traced, period)
        self._graph = pipeline.factorise(self.folded.traced)
        dims = [dim for node in self._graph.graph.nodes for result in node.meta.get("subdims", ()) for dim in result]
        self._sizes = {one.key: one.size for dim in dims for one in dim}
        self.templates.clear()
        self._failed = dict[Mesh, str]()
        self._known = dict[tuple[int, str, Mesh], Suggestion]()

    def run(self, meshes: Sequence[Mesh]) -> list[Suggestion]:
        """Return a suggestion for each mesh and mode; what cannot be compiled says why."""
        folded = None
        places: list[tuple[int, dict[str, int]] | None] = []
        while folded is not self.folded:  # a class that is not periodic folds the layers anew
            folded = self.folded
            places = [self._place(mesh) for mesh in meshes]
        classes: dict[int, list[tuple[Mesh, dict[str, int]]]] = {}
        found: list[Suggestion] = []
        for mesh, place in zip(meshes, places, strict=True):
            if place is None:
                found += [Suggestion(_tuple(mesh), mode, 0, 0.0, 0, self._failed[mesh]) for mode in self.modes]
            else:
                classes.setdefault(place[0], []).append((mesh, place[1]))
        for number, members in classes.items():
            for mode in self.modes:
                found += self._evaluated(number, mode, members)
        return found

    def _evaluated(self, number: int, mode: str, members: Sequence[tuple[Mesh, dict[str, int]]]) -> list[Suggestion]:
        """Return the suggestions of a template for some meshes; each is made once, for other classes do not change it."""
        new = [(mesh, values) for mesh, values in members if (number, mode, mesh) not in self._known]
        made = _evaluate(self.templates[number], mode, new, self._fleet) if new else []
        self._known.update({(number, mode, mesh): one for (mesh, _), one in zip(new, made, strict=True)})
        return [self._known[number, mode, mesh] for mesh, _ in members]

    def _place(self, mesh: Mesh) -> tuple[int, dict[str, int]] | None:
        """Return the template that stands for a mesh, its own class before others, and the values of its symbols; None: it fails."""
        if mesh in self._failed:
            return None
        found = self._template(mesh)
        if found is None:
            self.compile_class(mesh)
            found = self._template(mesh)
        return found

    def _template(self, mesh: Mesh) -> tuple[int, dict[str, int]] | None:
        padded = self._padded(mesh)
        own = [n for n, template in enumerate(self.templates) if template.mesh.split_axes() == mesh.split_axes()]
        wider = [n for n, template in enumerate(self.templates) if set(template.mesh.split_axes()) > set(mesh.split_axes())]
        for number in [*own, *wider]:
            sizes = self.templates[number].sizes(mesh, padded)
            if sizes is not None:
                return number, sizes
        return None

    def compile_class(self, mesh: Mesh) -> None:
        """Compile the class of a mesh: for the mesh of the same axes and the smallest sizes, or, if that is another class, for itself."""
        known = {template.mesh for template in self.templates}
        for like in dict.fromkeys((_smallest(mesh), mesh)):
            if like in known:
                continue
            try:
                self.templates.append(self._compile(like))
            except PartirError as error:
                self._failed[like] = str(error)
                continue
            if self.templates[-1].sizes(mesh, self._padded(mesh)) is not None:
                return
        self._failed.setdefault(mesh, "its program is of no known class")

    def _padded(self, mesh: Mesh) -> Padded:
        return {key: (self._sizes[key], size) for key, size in choose_pads(self._graph, mesh, self._law).items()}

    def _compile(self, mesh: Mesh) -> Template:
        if self.progress is not None:
            self.progress(f"compiling for {mesh}")
        low = pipeline.lower(self.folded.traced, mesh, self.options, factorised=self._graph)
        if not is_periodic(low.annotated, self.folded):
            self._fold(2 if self.folded.period == 1 else None)
            return self._compile(mesh)
        keys, values, names = pad_symbols(low)
        costs, steps = dict[str, Any](), dict[str, Any]()
        for mode, compiled in pipeline.derive_each(low, self.modes).items():
            of_inputs, input_values = input_symbols(compiled, None)
            known = {**of_inputs, **keys}
            collectives = collectives_of(compiled.program)
            costs[mode] = cost_in_symbols(compiled, collectives, known, {**input_values, **values}, self.folded.counts)
            steps[mode] = steps_of(compiled.program, costs[mode])
        return Template(mesh, self._padded(mesh), names, parts_of(low.graph, keys, mesh), costs, steps, self.folded.spans)


def _evaluate(template: Template, mode: str, members: Sequence[tuple[Mesh, dict[str, int]]], fleet: Fleet) -> list[Suggestion]:
    meshes, sizes = [mesh for mesh, _ in members], [values for _, values in members]
    received, held = template.bytes(mode, sizes), template.peak_memory(mode, sizes)
    seconds = template.seconds(mode, meshes, sizes, fleet)
    exact = [template.mesh.split_axes() == mesh.split_axes() for mesh in meshes]
    return [
        Suggestion(_tuple(mesh), mode, round(received[i]), float(seconds[i]), round(held[i]), exact=exact[i])
        for i, mesh in enumerate(meshes)
    ]


def _smallest(mesh: Mesh) -> Mesh:
    """Return the mesh of the same axes whose sizes are the smallest prime of each: on it most sizes divide."""
    primes = [next((p for p in range(2, size + 1) if size % p == 0), 1) for size in mesh.sizes]
    return Mesh(mesh.names, tuple(primes))


def _tuple(mesh: Mesh) -> tuple[int, ...]:
    sizes = tuple(mesh[axis] for axis in AXES)
    return sizes if sizes[0] > 1 else sizes[1:]
