"""Choose a mesh: every factorisation of a number of ranks over the axes, in each memory mode, ranked by time, bytes or memory.

found = partir.suggest_mesh(model, ranks=64, example_inputs=ids, memory="40GB", hardware="dgx-h100", by="time")
print(found)
model = partir.parallelize(model, mesh=found[0].mesh, memory=found[0].mode)

The model is traced once. Meshes on which it is laid out in the same way are one class: one of them is compiled, repeated layers left
out, and its symbolic cost is evaluated for all. Another size that does not divide, or an axis of one rank, makes another class.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import nn

from partir.cost.cost import cost_in_symbols, input_symbols
from partir.cost.template import Padded, Template, pad_symbols, parts_of, steps_of
from partir.errors import MeshError, PartirError
from partir.hardware import Hardware, load_hardware
from partir.mesh import AXES, Mesh
from partir.module import ParallelModule, original_class
from partir.options import Options
from partir.passes import pipeline
from partir.passes.fold_layers import fold_layers
from partir.passes.trace import trace
from partir.quantities import parse_bytes, spell_bytes
from partir.records import collectives_of

KEYS = {"time": "seconds", "bytes": "bytes", "memory": "memory"}
MODES = ("low", "fast")
MOST = 2**62  # bytes: where nothing says how much a rank may hold


@dataclass(frozen=True)
class Suggestion:
    """One mesh in one memory mode.

    Args:
        mesh: ``(x, y, z)``, or ``(data, x, y, z)`` where data has more than one rank.
        mode: ``memory=`` of `parallelize`.
        bytes: that one rank receives in a step.
        seconds: of a step, predicted.
        memory: bytes that one rank holds at most, with AdamW.
        why: what speaks against it; ``""`` for one that is ranked.
    """

    mesh: tuple[int, ...]
    mode: str
    bytes: int
    seconds: float
    memory: int
    why: str = ""


@dataclass(frozen=True)
class Suggestions(Sequence[Suggestion]):
    """Meshes, best first.

    Args:
        ranked: those that fit.
        rejected: those that do not, and why.
        by: what they are ranked by.
        compiled: how many classes of meshes were compiled.
    """

    ranked: tuple[Suggestion, ...]
    rejected: tuple[Suggestion, ...]
    by: str
    compiled: int = 0

    @overload
    def __getitem__(self, index: int) -> Suggestion: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Suggestion, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.ranked[index]

    def __len__(self) -> int:
        return len(self.ranked)

    def __str__(self) -> str:
        return self.text()

    def text(self, top: int = 20) -> str:
        """Return the best as a table, and the first that were rejected."""
        rows = [("mesh", "memory=", "seconds", "received", "held"), *(_cells(one) for one in self.ranked[:top])]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
        more = [f"{len(self.ranked) - top} more"] if len(self.ranked) > top else []
        refused = [f"rejected {one.mesh} {one.mode}: {one.why}" for one in self.rejected[:5]]
        refused += [f"{len(self.rejected) - 5} more rejected"] if len(self.rejected) > 5 else []
        return "\n".join([f"best by {self.by}", *lines, *more, *refused]) + "\n"


def _cells(one: Suggestion) -> tuple[str, ...]:
    return str(one.mesh), one.mode, f"{one.seconds:.4g}", spell_bytes(one.bytes), spell_bytes(one.memory)


def suggest_mesh(
    model: nn.Module,
    ranks: int,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    memory: str | int | None = None,
    hardware: str | Hardware = "dgx-h100",
    by: str = "time",
    axes: Sequence[str] = AXES,
    modes: Sequence[str] = MODES,
    outputs: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> Suggestions:
    """Return every mesh of a number of ranks, ranked, and those that do not fit.

    Args:
        model: any module, on the meta device too; it is not changed. Its present training and grad mode is the one evaluated.
        ranks: how many there are.
        example_inputs, example_kwargs: as for `partir.plan`.
        memory: the most that one rank may hold, ``"40GB"`` or a number of bytes; by default the hardware's.
        hardware: a profile, its name or its path.
        by: "time", "bytes" or "memory".
        axes: that may have more than one rank; ``("x", "y", "z")`` leaves data out.
        modes: memory modes to try.
        outputs: as for `partir.parallelize`.
        progress: is told of each class that is compiled.

    Raises:
        PartirError: nothing fits (the message names what comes closest), or anything that compiling finds.
    """
    if by not in KEYS:
        raise PartirError(f"suggest_mesh(by={by!r}): choose from {', '.join(map(repr, KEYS))}.")
    unknown = [axis for axis in axes if axis not in AXES] + [mode for mode in modes if mode not in MODES]
    if unknown or ranks < 1:
        raise PartirError(f"suggest_mesh: ranks={ranks}, axes={tuple(axes)}, modes={tuple(modes)}: {unknown or 'ranks'} is not legal.")
    profile = load_hardware(hardware)
    budget = profile.memory if memory is None else parse_bytes(memory)
    with original_class(model) if isinstance(model, ParallelModule) else contextlib.nullcontext():
        search = Search(model, _arguments(example_inputs), dict(example_kwargs or {}), Options(outputs=outputs), modes, progress)
        found = search.run(list(factorisations(ranks, axes)), profile)
    ranked = sorted((one for one in found if not one.why and one.memory <= budget), key=lambda one: _order(one, by))
    rejected = [_over(one, budget) for one in found if one.why or one.memory > budget]
    if not ranked:
        raise PartirError(_nothing_fits(ranks, budget, rejected))
    return Suggestions(tuple(ranked), tuple(rejected), by, len(search.templates))


def automatic_mesh(model: nn.Module, example_inputs: Any, example_kwargs: Mapping[str, Any] | None, options: Options) -> Mesh:
    """Return the mesh of this world's ranks that receives the fewest bytes, of those that fit into the device's memory.

    Args:
        options: whose memory mode and outputs are kept.

    Raises:
        MeshError: torch.distributed is not initialised, or there is no example to trace.
        PartirError: nothing fits.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise MeshError(
            'mesh="auto" divides the ranks of torch.distributed, which is not initialised. '
            "For another number of ranks: partir.suggest_mesh(model, ranks=64, example_inputs=...)[0].mesh."
        )
    if example_inputs is None and not example_kwargs:
        raise MeshError('mesh="auto" needs example_inputs: what moves depends on their sizes.')
    cuda = dist.get_backend() == "nccl"
    memory = int(cast(Any, torch.cuda).get_device_properties(torch.cuda.current_device()).total_memory) if cuda else MOST
    ranks, modes = dist.get_world_size(), (options.memory,)
    found = suggest_mesh(
        model, ranks, example_inputs, example_kwargs, memory=memory, by="bytes", modes=modes, outputs=options.outputs
    )
    return Mesh.parse(found[0].mesh)


def _order(one: Suggestion, by: str) -> tuple[Any, ...]:
    return getattr(one, KEYS[by]), one.bytes, one.memory, one.mesh


def _over(one: Suggestion, budget: float) -> Suggestion:
    if one.why:
        return one
    why = f"needs {spell_bytes(one.memory)} a rank, {spell_bytes(one.memory - budget)} more than {spell_bytes(budget)}"
    return Suggestion(one.mesh, one.mode, one.bytes, one.seconds, one.memory, why)


def _nothing_fits(ranks: int, budget: float, rejected: Sequence[Suggestion]) -> str:
    least = min((one for one in rejected if one.memory), key=lambda one: one.memory, default=None)
    if least is None:
        return f"no mesh of {ranks} ranks can run this model: {rejected[0].why if rejected else 'there is none'}"
    return (
        f"no mesh of {ranks} ranks fits into {spell_bytes(budget)} a rank: the closest is mesh={least.mesh}, "
        f'memory="{least.mode}" with {spell_bytes(least.memory)}. Give more memory or more ranks.'
    )


def factorisations(ranks: int, axes: Sequence[str]) -> Iterator[Mesh]:
    """Yield every mesh of a number of ranks; axes that are not given have one rank.

    >>> [str(mesh) for mesh in factorisations(4, ("x", "y"))]
    ['(1,4,1)', '(2,2,1)', '(4,1,1)']
    """
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for sizes in itertools.product(*(divisors if axis in axes else [1] for axis in AXES)):
        product = 1
        for size in sizes:
            product *= size
        if product == ranks:
            yield Mesh.parse(sizes if sizes[0] > 1 else sizes[1:])


@dataclass
class Search:
    """One trace, and the templates compiled from it so far."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: Options
    modes: Sequence[str]
    progress: Callable[[str], None] | None = None
    templates: list[Template] = field(default_factory=list[Template])

    def __post_init__(self) -> None:
        self.folded = fold_layers(trace(self.model, self.args, self.kwargs))
        self.errors: dict[str, str] = {}

    def run(self, meshes: Sequence[Mesh], hardware: Hardware) -> list[Suggestion]:
        """Return a suggestion for each mesh and mode; what cannot be compiled says why."""
        classes: dict[int, list[tuple[Mesh, dict[str, int]]]] = {}
        found: list[Suggestion] = []
        for mesh in meshes:
            try:
                number, sizes = self._class_of(mesh)
            except PartirError as error:
                found += [Suggestion(_tuple(mesh), mode, 0, 0.0, 0, str(error)) for mode in self.modes]
                continue
            classes.setdefault(number, []).append((mesh, sizes))
        for number, members in classes.items():
            for mode in self.modes:
                found += _evaluate(self.templates[number], mode, members, hardware)
        return found

    def _class_of(self, mesh: Mesh) -> tuple[int, dict[str, int]]:
        padded = self._padded(mesh)
        for number, template in enumerate(self.templates):
            sizes = template.sizes(mesh, padded) if _pattern(template.mesh) == _pattern(mesh) else None
            if sizes is not None:
                return number, sizes
        for like in (_smallest(mesh), mesh):
            if like != mesh and any(template.mesh == like for template in self.templates):
                continue
            self.templates.append(self._compile(like))
            sizes = self.templates[-1].sizes(mesh, padded)
            if sizes is not None:
                return len(self.templates) - 1, sizes
        raise PartirError(f"mesh {mesh}: its own program does not fit it; please report this.")

    def _padded(self, mesh: Mesh) -> Padded:
        graph, padded, _ = pipeline.factorise(self.folded.traced, mesh, self.options)
        sizes = {one.key: one.size for node in graph.graph.nodes for dims in node.meta.get("subdims", ()) for dim in dims for one in dim}
        return {key: (sizes[key], size) for key, size in padded.items()}

    def _compile(self, mesh: Mesh) -> Template:
        if self.progress is not None:
            self.progress(f"compiling for {mesh}")
        low = pipeline.lower(self.folded.traced, mesh, self.options)
        keys, values, names = pad_symbols(low)
        costs, steps = dict[str, Any](), dict[str, Any]()
        for mode, compiled in pipeline.derive_each(low, self.modes).items():
            of_inputs, input_values = input_symbols(compiled, None)
            known = {**of_inputs, **keys}
            collectives = collectives_of(compiled.program)
            costs[mode] = cost_in_symbols(compiled, collectives, known, {**input_values, **values}, self.folded.counts)
            steps[mode] = steps_of(compiled.program, costs[mode])
        return Template(mesh, self._padded(mesh), names, parts_of(low.graph, keys, mesh), costs, steps)


def _evaluate(template: Template, mode: str, members: Sequence[tuple[Mesh, dict[str, int]]], hardware: Hardware) -> list[Suggestion]:
    sizes = [values for _, values in members]
    received, held = template.bytes(mode, sizes), template.peak_memory(mode, sizes)
    return [
        Suggestion(_tuple(mesh), mode, round(received[i]), template.seconds(mode, mesh, values, hardware), round(held[i]))
        for i, (mesh, values) in enumerate(members)
    ]


def _smallest(mesh: Mesh) -> Mesh:
    """Return the mesh of the same axes whose sizes are the smallest prime of each: on it most sizes divide."""
    primes = [next((p for p in range(2, size + 1) if size % p == 0), 1) for size in mesh.sizes]
    return Mesh(mesh.names, tuple(primes))


def _pattern(mesh: Mesh) -> tuple[str, ...]:
    return mesh.split_axes()


def _tuple(mesh: Mesh) -> tuple[int, ...]:
    sizes = tuple(mesh[axis] for axis in AXES)
    return sizes if sizes[0] > 1 else sizes[1:]


def _arguments(example_inputs: Any) -> tuple[Any, ...]:
    if isinstance(example_inputs, (tuple, list)):
        return tuple(cast("tuple[Any, ...]", example_inputs))
    return () if example_inputs is None else (example_inputs,)
