"""Choose a mesh: every factorisation of a number of ranks over the axes, in each memory mode, ranked by time, bytes or memory.

found = partir.suggest_mesh(model, ranks=64, example_inputs=ids, memory="40GB", hardware="dgx-h100", by="time")
print(found)
model = partir.parallelize(model, mesh=found[0].mesh, memory=found[0].mode)

The model is traced once, and compiled with repeated layers left out for a mesh of all axes. Its symbolic cost is evaluated for every
mesh: along an axis of one rank its messages do not happen, and a size that does not divide is taken as if it did (but for parameters at
rest, which such an axis leaves whole). That is an estimate. It is exact where the model, laid out anew for the mesh, gives that very
program (`partir.passes.same_program`): this is proven for the best, and where it fails (a layer norm runs in another way when its hidden
dim is whole; a layout is chosen by sizes) the mesh gets a program of its own. Estimates that may be better than the best, if they are off
by a quarter, are looked at in the same way. For small models all are, for on odd sizes and few elements an estimate may be off by more.

Exact bytes are those of the plan. Seconds and memory may be off by a few percent: where layers were left out, for messages reach over more
layers than are kept; where one head or one row is left on a rank, for copies are views there; and by index arithmetic of small models.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from partir import rules as rule_files
from partir.errors import MeshError, PartirError
from partir.garbage import paused_collector
from partir.hardware import Hardware, load_hardware
from partir.mesh import AXES, Mesh
from partir.mesh_proofs import MARGIN
from partir.mesh_search import Estimate, Search
from partir.module import ParallelModule, original_class
from partir.options import Options, budget_of
from partir.passes.aot import shared_formulas
from partir.quantities import parse_bytes, spell_bytes
from partir.signature import positional
from partir.suggestions import Suggestion, Suggestions

KEYS = {"time": "seconds", "bytes": "bytes", "memory": "memory"}
MODES = ("low", "fast")
EFFORT = 35_000  # nodes of programs that are compiled to compute every mesh exactly, whatever `sure` asks for
MOST_RANKS = 1_000_000
MOST = 2**62  # bytes: where nothing says how much a rank may hold


def suggest_mesh(
    model: nn.Module,
    ranks: int,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    memory: str | int | None = None,
    hardware: str | Hardware = "dgx-h100",
    by: str = "time",
    sure: int | None = 5,
    axes: Sequence[str] = AXES,
    modes: Sequence[str] = MODES,
    outputs: str = "auto",
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    rules: str | Path | Iterable[str | Path] | None = None,
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
        sure: how many of the best are computed exactly; others may be estimates, which are compiled where they could be better than the
            best, if they are off by a quarter at most. None: all, which takes a moment for each, and is done for small models anyway.
        axes: that may have more than one rank; ``("x", "y", "z")`` leaves data out.
        modes: memory modes to try.
        outputs, compute_dtype, reduce_dtype, rules: as for `partir.parallelize`.
        progress: is told of each class that is compiled.

    Raises:
        PartirError: nothing fits (the message names what comes closest), or anything that compiling finds.
    """
    options = Options(outputs=outputs, compute_dtype=compute_dtype, reduce_dtype=reduce_dtype, rules=rule_files.read(rules))
    inputs = positional(example_inputs), dict(example_kwargs or {})
    profile = load_hardware(hardware)
    budget = profile.memory if memory is None else parse_bytes(memory)
    return _suggested(model, ranks, inputs, options, profile, budget, by, sure, axes, modes, progress)


def _suggested(
    model: nn.Module,
    ranks: int,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    options: Options,
    profile: Hardware,
    budget: float,
    by: str,
    sure: int | None = 5,
    axes: Sequence[str] = AXES,
    modes: Sequence[str] = MODES,
    progress: Callable[[str], None] | None = None,
) -> Suggestions:
    _check(ranks, by, axes, modes)
    plain = original_class(model) if isinstance(model, ParallelModule) else contextlib.nullcontext()
    meshes = sorted(factorisations(ranks, axes), key=lambda mesh: -len(mesh.split_axes()))
    with plain, paused_collector(), shared_formulas(), rule_files.using(options.rules):
        search = Search(model, *inputs, options, modes, profile, axes, progress)
        estimates = search.run(meshes)
        sure = None if search.effort(meshes) < EFFORT else sure
        while unsure := _unsure(estimates, budget, by, sure):
            mesh, is_wanted = unsure
            if is_wanted or not search.look_closer(mesh):
                search.make_sure(mesh)
            estimates = search.run(meshes)
    found = [one.suggestion for one in estimates]
    ranked = _fitting(found, budget, by)
    rejected = [_over(one, budget) for one in found if one.why or one.memory > budget]
    if not ranked:
        raise PartirError(_nothing_fits(ranks, budget, rejected))
    return Suggestions(tuple(ranked), tuple(rejected), by, len(search.templates))


def _check(ranks: int, by: str, axes: Sequence[str], modes: Sequence[str]) -> None:
    for name, values, legal in (("by", (by,), KEYS), ("axes", axes, AXES), ("modes", modes, MODES)):
        for value in values:
            if value not in legal:
                raise PartirError(f"suggest_mesh: {name} has {value!r}; choose from {', '.join(map(repr, legal))}.")
    if not 1 <= ranks <= MOST_RANKS:
        raise PartirError(f"suggest_mesh(ranks={ranks}): a mesh has at least one rank, and {MOST_RANKS:,} are the most that are tried.")


def automatic_mesh(model: nn.Module, example_inputs: Any, example_kwargs: Mapping[str, Any] | None, options: Options) -> Mesh:
    """Return the mesh of this world's ranks that receives the fewest bytes, of those that fit into the device's memory.

    Args:
        options: of the compilation; where memory is a mode, it is kept.

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
    asked = budget_of(options.memory)
    ranks, modes = dist.get_world_size(), (options.memory,) if asked is None else MODES
    memory = memory if asked is None else min(memory, asked)
    inputs = positional(example_inputs), dict(example_kwargs or {})
    found = _suggested(model, ranks, inputs, options, load_hardware("dgx-h100"), memory, "bytes", modes=modes)
    return Mesh.parse(found[0].mesh)


def _fitting(found: Sequence[Suggestion], budget: float, by: str) -> list[Suggestion]:
    return sorted((one for one in found if not one.why and one.memory <= budget), key=lambda one: _order(one, by))


def _unsure(estimates: Sequence[Estimate], budget: float, by: str, sure: int | None) -> tuple[Mesh, bool] | None:
    """Return the mesh of an estimate that matters, and whether it is among the best; else it is perhaps the best, or so near to the
    budget that it may fit or not.
    """
    open_ones = {one.suggestion: one for one in estimates if not one.suggestion.exact and not one.suggestion.why}
    ranked = _fitting([one.suggestion for one in estimates], budget, by)
    last = getattr(ranked[:sure][-1], KEYS[by]) if ranked and sure is not None else math.inf
    wanted = [one for one in ranked[:sure] if one in open_ones]
    perhaps = [one for one in ranked if one in open_ones and _least(open_ones[one], by) < getattr(ranked[0], KEYS[by])]
    near = [one for one, estimate in open_ones.items() if _is_near(estimate, budget) and _least(estimate, by) < last]
    found = next(iter([*wanted, *perhaps, *near]), None)
    return (Mesh.parse(found.mesh), found in wanted) if found else None


def _is_near(estimate: Estimate, budget: float) -> bool:
    """Return whether what an estimate may be off decides if it fits."""
    return estimate.least_memory < budget < estimate.suggestion.memory * (1 + MARGIN)


def _least(estimate: Estimate, by: str) -> float:
    """Return the least that an estimate may stand for."""
    return getattr(estimate, f"least_{KEYS[by]}")


def _order(one: Suggestion, by: str) -> tuple[Any, ...]:
    return getattr(one, KEYS[by]), one.bytes, one.memory, one.mesh


def _over(one: Suggestion, budget: float) -> Suggestion:
    if one.why:
        return one
    why = f"needs {spell_bytes(one.memory)} a rank, {spell_bytes(one.memory - budget)} more than {spell_bytes(budget)}"
    return replace(one, why=why)


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
    ['(x=1, y=4, z=1)', '(x=2, y=2, z=1)', '(x=4, y=1, z=1)']
    """
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for sizes in itertools.product(*(divisors if axis in axes else [1] for axis in AXES)):
        product = 1
        for size in sizes:
            product *= size
        if product == ranks:
            yield Mesh.parse(sizes if sizes[0] > 1 else sizes[1:])
