"""The moves of a relayout: from one layout of a value, the collectives that lead toward another, and their bytes.

An axis leaves a dim while that dim's axes do not begin the target's, and enters where it is next in the target.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from partir.dims import Dim, Part
from partir.layout import DTYPES, Layout
from partir.mesh import Mesh
from partir.subdims import axes_of


@dataclass(frozen=True)
class State:
    """A layout during the search: for each dim, for each sub-dim, its axes; and the type of every other axis."""

    dims: tuple[tuple[tuple[str, ...], ...], ...]
    types: tuple[tuple[str, str], ...]
    flat: tuple[tuple[str, ...], ...]


def state_of(layout: Layout, sizes: tuple[tuple[int, ...], ...], mesh: Mesh) -> State:
    """Return a layout as a state; ``sizes``: sub-dim sizes that its blocks follow."""
    dims = tuple(tuple(axes_of(dim, inner, mesh) or []) for dim, inner in zip(layout.dims, sizes))
    types = tuple((axis, layout.type(axis)) for axis in mesh.split_axes())
    return State(dims, types, tuple(dim.axes for dim in layout.dims))


def layout_of(state: State, like: Layout, sizes: tuple[tuple[int, ...], ...]) -> Layout:
    """Return the layout that a state means, of the dtype and gradient of ``like``."""
    dims = tuple(
        Dim(tuple(Part(n, axes) for n, axes in zip(inner, dim)), flat) for inner, dim, flat in zip(sizes, state.dims, state.flat)
    )
    reductions = {"P": "sum", "M": "max"}
    pending = tuple((axis, reductions[kind]) for axis, kind in state.types if kind in reductions)
    varied = tuple(axis for axis, kind in state.types if kind == "R")
    return Layout(like.dtype, dims, pending, varied, like.grad, None)


Move = tuple[str, dict[str, Any], State, float, float]


def moves(state: State, goal: State, here: Layout, sizes: tuple[tuple[int, ...], ...], mesh: Mesh) -> Iterator[Move]:
    """Yield collective, arguments, the state after it and the bytes that one rank receives, forward and backward."""
    held = block_bytes(here, mesh)
    grad = 1.0 if here.grad else 0.0
    wanted = dict(goal.types)
    for axis, kind in state.types:
        n = mesh[axis]
        if kind == "S":
            yield from _gathers(state, goal, axis, held, grad, n, sizes, mesh)
            continue
        for op, to, fwd, bwd in _type_changes(kind, held, n, grad):
            if to == "P" and not _is_gathered(state, goal):
                continue
            if to == wanted[axis] or to in ("I", "N", "R"):
                yield op[0], {"axis": axis, **op[1]}, _retype(state, axis, to), fwd, bwd * grad
        for dim, part in _entries(state, goal, axis):
            arguments = {"axis": axis, "dim": dim, **_blocks("blocks", state, dim, part, sizes, mesh)}
            after = _retype(_insert(state, dim, part, axis), axis, "S")
            if _local(state, dim, part, sizes, mesh) % n:
                continue
            if kind == "P":
                yield "reduce_scatter", arguments, after, held * (n - 1) / n, grad * held * (n - 1) / n
            elif kind in ("I", "N"):
                yield "slice", arguments, after, 0, grad * held / n * (n - 1)
            elif kind == "R":
                yield "slice", {**arguments, "varied": True}, after, 0, 0


def _type_changes(kind: str, held: float, n: int, grad: float) -> list[tuple[tuple[str, dict[str, Any]], str, float, float]]:
    ring = 2 * held * (n - 1) / n
    if kind == "P":
        return [(("all_reduce", {}), "I" if grad else "N", ring, 0)]
    if kind == "M":
        return [(("all_reduce", {"op": "max"}), "N", ring, 0)]
    if kind == "I":
        return [(("spread", {}), "R", 0, ring), (("once", {"varied": False}), "P", 0, 0)]
    if kind == "R":
        return [(("settle", {}), "I", 0, 0), (("once", {}), "P", 0, 0)]
    return [(("once", {"varied": False}), "P", 0, 0)]


def _gathers(
    state: State, goal: State, axis: str, held: float, grad: float, n: int, sizes: tuple[tuple[int, ...], ...], mesh: Mesh
) -> Iterator[Move]:
    place = _place_of(state, axis)
    if place is None:
        return
    dim, part = place
    innermost = state.flat[dim][-1] if part is None else state.dims[dim][part][-1]
    if innermost != axis or _is_wanted(state, goal, dim, part):
        return
    if part is not None and state.flat[dim]:
        return
    arguments = {"axis": axis, "dim": dim, **_blocks("blocks", state, dim, part, sizes, mesh)}
    without = _remove(state, dim, part)
    moved = held * (n - 1)
    yield "all_gather", arguments, _retype(without, axis, "R" if grad else "N"), moved, grad * moved
    if grad:
        yield "all_gather_same", arguments, _retype(without, axis, "I"), moved, 0
    if dict(goal.types)[axis] == "P":
        yield "zero_pad", arguments, _retype(without, axis, "P"), 0, 0
    if part is None:
        return
    for to_dim, to_part in _entries(without, goal, axis):
        if to_dim == dim or to_part is None or _local(without, to_dim, to_part, sizes, mesh) % n:
            continue
        both = {"axis": axis, "src": dim, "dst": to_dim, **_blocks("src_blocks", state, dim, part, sizes, mesh)}
        both |= _blocks("dst_blocks", without, to_dim, to_part, sizes, mesh)
        exchanged = held * (n - 1) / n
        yield "all_to_all", both, _insert(without, to_dim, to_part, axis), exchanged, grad * exchanged


def _place_of(state: State, axis: str) -> tuple[int, int | None] | None:
    for dim, (parts, flat) in enumerate(zip(state.dims, state.flat)):
        if axis in flat:
            return dim, None
        for part, axes in enumerate(parts):
            if axis in axes:
                return dim, part
    return None


def _is_gathered(state: State, goal: State) -> bool:
    """Return whether no axis is left to gather. Sums are made pending last: a gather then reads what is at rest."""
    inner = all(_begins(have, want) for parts, wanted in zip(state.dims, goal.dims) for have, want in zip(parts, wanted))
    return inner and all(not flat or _is_wanted(state, goal, dim, None) for dim, flat in enumerate(state.flat))


def _is_wanted(state: State, goal: State, dim: int, part: int | None) -> bool:
    if part is None:
        return _begins(state.flat[dim], goal.flat[dim]) and state.dims[dim] == goal.dims[dim]
    return _begins(state.dims[dim][part], goal.dims[dim][part])


def _begins(axes: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    return wanted[: len(axes)] == axes


def _entries(state: State, goal: State, axis: str) -> Iterator[tuple[int, int | None]]:
    """Yield the sub-dims where ``axis`` is the next axis of the goal; None for the whole local dim, once its sub-dims are the goal's."""
    for dim, parts in enumerate(state.dims):
        for part, axes in enumerate(parts):
            if _is_next(axis, axes, goal.dims[dim][part]) and not state.flat[dim]:
                yield dim, part
        if parts == goal.dims[dim] and _is_next(axis, state.flat[dim], goal.flat[dim]):
            yield dim, None


def _is_next(axis: str, axes: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    return _begins(axes, wanted) and len(wanted) > len(axes) and wanted[len(axes)] == axis


def _blocks(
    name: str, state: State, dim: int, part: int | None, sizes: tuple[tuple[int, ...], ...], mesh: Mesh
) -> dict[str, int]:
    """Address a part inside its dim: the local size of what stands before it, left out where that is 1."""
    before = 1 if part is None else math.prod(_local(state, dim, p, sizes, mesh) for p in range(part))
    return {} if before == 1 else {name: before}


def _local(state: State, dim: int, part: int | None, sizes: tuple[tuple[int, ...], ...], mesh: Mesh) -> int:
    if part is None:
        whole = math.prod(_local(state, dim, p, sizes, mesh) for p in range(len(sizes[dim])))
        return whole // mesh.extent(state.flat[dim])
    return sizes[dim][part] // mesh.extent(state.dims[dim][part])


def _retype(state: State, axis: str, kind: str) -> State:
    return replace(state, types=tuple((name, kind if name == axis else old) for name, old in state.types))


def _remove(state: State, dim: int, part: int | None) -> State:
    if part is None:
        flat = tuple(axes[:-1] if d == dim else axes for d, axes in enumerate(state.flat))
        return replace(state, flat=flat)
    return _edit(state, dim, part, state.dims[dim][part][:-1])


def _insert(state: State, dim: int, part: int | None, axis: str) -> State:
    if part is None:
        return replace(state, flat=tuple((*axes, axis) if d == dim else axes for d, axes in enumerate(state.flat)))
    return _edit(state, dim, part, (*state.dims[dim][part], axis))


def _edit(state: State, dim: int, part: int, axes: tuple[str, ...]) -> State:
    parts = tuple(axes if p == part else old for p, old in enumerate(state.dims[dim]))
    return replace(state, dims=tuple(parts if d == dim else old for d, old in enumerate(state.dims)))


def block_bytes(layout: Layout, mesh: Mesh) -> float:
    """Return the bytes of one rank's block."""
    return math.prod(layout.local_shape(mesh)) * DTYPES[layout.dtype].itemsize
