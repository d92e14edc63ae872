"""The cheapest chain of collectives from one layout of a value to another.

    >>> mesh = Mesh.parse((2, 2, 2))
    >>> y, z = Layout.parse("f32[16@x.y, 64@z]"), Layout.parse("f32[16@x, 64@z] ~y")
    >>> print(*relayout(y, z, mesh).steps)
    all_gather(axis=y, dim=0) -> f32[16@x, 64@z] ~y

A shortest-path search (Dijkstra 1959) over layouts: the edges are the collectives, their weights the bytes that one
rank receives, forward and backward. Only moves toward the target are tried: an axis leaves
a dim while that dim's axes do not begin the target's, and enters where it is next in the target.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Any

from partir.errors import LayoutError
from partir.layout import DTYPES, Dim, Layout, Part
from partir.mesh import Mesh
from partir.subdims import axes_of


@dataclass(frozen=True)
class Step:
    """One collective: ``partir.<op>(value, **arguments)`` gives ``result``."""

    op: str
    arguments: tuple[tuple[str, Any], ...]
    result: Layout

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The collective's keyword arguments."""
        return dict(self.arguments)

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in self.arguments)
        return f"{self.op}({shown}) -> {self.result}"


@dataclass(frozen=True)
class Chain:
    """The steps from one layout to another and the bytes that one rank receives in them, forward and backward."""

    steps: tuple[Step, ...]
    forward_bytes: float
    backward_bytes: float

    @property
    def bytes(self) -> float:
        """Forward and backward together."""
        return self.forward_bytes + self.backward_bytes


@dataclass(frozen=True)
class _State:
    """A layout during the search: for each dim, for each sub-dim, its axes; and the type of every other axis."""

    dims: tuple[tuple[tuple[str, ...], ...], ...]
    types: tuple[tuple[str, str], ...]
    flat: tuple[tuple[str, ...], ...]


@lru_cache(maxsize=65536)
def relayout(source: Layout, target: Layout, mesh: Mesh) -> Chain:
    """Return the cheapest chain from ``source`` to ``target`` on ``mesh``.

    Raises:
        LayoutError: no chain leads there (different shapes, or a pending maximum as the target).
    """
    source, target = source.strip(mesh), target.strip(mesh)
    if source == target:
        return Chain((), 0, 0)
    if source.shape != target.shape:
        raise LayoutError(f"a value of layout {source} has another shape than layout {target}.")
    if source.owner and not target.owner:
        return _from_owner(source, target, mesh)
    sizes = _common_sizes(source, target, mesh)
    if sizes is None:
        return _through_whole_dims(source, target, mesh)
    return _search(source, target, sizes, mesh)


def _from_owner(source: Layout, target: Layout, mesh: Mesh) -> Chain:
    """The paper's broadcast from the diagonal (Algorithms 7-8): the hidden axis of the target decides along which axis."""
    assert source.owner is not None
    held, root = source.owner
    axis, other = (held, root) if root in target.split_axes and held not in target.split_axes else (root, held)
    dims = tuple(
        Dim(tuple(Part(p.size, tuple(other if a == held else a for a in p.axes)) for p in dim.parts), dim.axes) for dim in source.dims
    )
    varied = (*source.varied, axis) if source.grad else ()
    middle = replace(source, dims=dims, owner=None, varied=varied)
    step = Step("broadcast", (("axis", axis), ("root", other)), middle)
    received = _block_bytes(middle, mesh)
    rest = relayout(middle, target, mesh)
    backward = received * (mesh[axis] - 1) if source.grad else 0
    return Chain((step, *rest.steps), received + rest.forward_bytes, backward + rest.backward_bytes)


def _through_whole_dims(source: Layout, target: Layout, mesh: Mesh) -> Chain:
    """Blocks that share no sub-dims meet only in the whole dim."""
    dims = tuple(Dim((Part(dim.size),)) if axes is None else dim for dim, axes in zip(source.dims, _dim_pairs(source, target, mesh)))
    middle = _with_dims(source, target, dims)
    if middle == source or middle == target:
        raise LayoutError(f"no chain of collectives leads from {source} to {target}.")
    first, second = relayout(source, middle, mesh), relayout(middle, target, mesh)
    return Chain(
        first.steps + second.steps, first.forward_bytes + second.forward_bytes, first.backward_bytes + second.backward_bytes
    )


def _with_dims(source: Layout, target: Layout, dims: tuple[Dim, ...]) -> Layout:
    used = {axis for dim in dims for axis in dim.all_axes}
    freed = [axis for axis in source.split_axes if axis not in used]
    varied = [axis for axis in freed if target.type(axis) not in ("I",)] if source.grad else []
    return replace(source, dims=dims, varied=(*source.varied, *varied))


def _common_sizes(source: Layout, target: Layout, mesh: Mesh) -> tuple[tuple[int, ...], ...] | None:
    pairs = _dim_pairs(source, target, mesh)
    return None if any(pair is None for pair in pairs) else tuple(pair for pair in pairs if pair is not None)


def _dim_pairs(source: Layout, target: Layout, mesh: Mesh) -> list[tuple[int, ...] | None]:
    return [_refine(a, b, mesh) for a, b in zip(source.dims, target.dims)]


def _refine(a: Dim, b: Dim, mesh: Mesh) -> tuple[int, ...] | None:
    """Return sub-dim sizes that both dims' blocks follow."""
    sizes = _merge_sizes([part.size for part in a.parts], [part.size for part in b.parts])
    if sizes is None or axes_of(a, sizes, mesh) is None or axes_of(b, sizes, mesh) is None:
        return None
    return tuple(sizes)


def _merge_sizes(left: list[int], right: list[int]) -> list[int] | None:
    """Return the common refinement of two factorisations of one size, major first; None where there is none."""
    left, right = list(left), list(right)
    merged: list[int] = []
    while left and right:
        a, b = left.pop(0), right.pop(0)
        small, large = min(a, b), max(a, b)
        if large % small:
            return None
        merged.append(small)
        if large > small:
            (left if a > b else right).insert(0, large // small)
    return merged


def _search(source: Layout, target: Layout, sizes: tuple[tuple[int, ...], ...], mesh: Mesh) -> Chain:
    start, goal = _state(source, sizes, mesh), _state(target, sizes, mesh)
    order = count()
    queue: list[tuple[float, int, int, _State, tuple[Step, ...], float, float]] = [(0, 0, next(order), start, (), 0, 0)]
    done: set[_State] = set()
    while queue:
        _, length, _, state, steps, forward, backward = heapq.heappop(queue)
        if state == goal:
            return Chain(steps, forward, backward)
        if state in done:
            continue
        done.add(state)
        here = _layout(state, source, sizes)
        for op, arguments, after, fwd, bwd in _moves(state, goal, here, sizes, mesh):
            step = Step(op, tuple(arguments.items()), _layout(after, source, sizes))
            total = (forward + fwd, backward + bwd)
            heapq.heappush(queue, (sum(total), length + 1, next(order), after, (*steps, step), *total))
    raise LayoutError(f"no chain of collectives leads from {source} to {target}.")


def _state(layout: Layout, sizes: tuple[tuple[int, ...], ...], mesh: Mesh) -> _State:
    dims = tuple(tuple(axes_of(dim, inner, mesh) or []) for dim, inner in zip(layout.dims, sizes))
    types = tuple((axis, layout.type(axis)) for axis in mesh.split_axes())
    return _State(dims, types, tuple(dim.axes for dim in layout.dims))


def _layout(state: _State, like: Layout, sizes: tuple[tuple[int, ...], ...]) -> Layout:
    dims = tuple(
        Dim(tuple(Part(n, axes) for n, axes in zip(inner, dim)), flat) for inner, dim, flat in zip(sizes, state.dims, state.flat)
    )
    reductions = {"P": "sum", "M": "max"}
    pending = tuple((axis, reductions[kind]) for axis, kind in state.types if kind in reductions)
    varied = tuple(axis for axis, kind in state.types if kind == "R")
    return Layout(like.dtype, dims, pending, varied, like.grad, None)


Move = tuple[str, dict[str, Any], _State, float, float]


def _moves(state: _State, goal: _State, here: Layout, sizes: tuple[tuple[int, ...], ...], mesh: Mesh) -> Iterator[Move]:
    held = _block_bytes(here, mesh)
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
    state: _State, goal: _State, axis: str, held: float, grad: float, n: int, sizes: tuple[tuple[int, ...], ...], mesh: Mesh
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


def _place_of(state: _State, axis: str) -> tuple[int, int | None] | None:
    for dim, (parts, flat) in enumerate(zip(state.dims, state.flat)):
        if axis in flat:
            return dim, None
        for part, axes in enumerate(parts):
            if axis in axes:
                return dim, part
    return None


def _is_gathered(state: _State, goal: _State) -> bool:
    """Return whether no axis is left to gather. Sums are made pending last: a gather then reads what is at rest."""
    inner = all(_begins(have, want) for parts, wanted in zip(state.dims, goal.dims) for have, want in zip(parts, wanted))
    return inner and all(not flat or _is_wanted(state, goal, dim, None) for dim, flat in enumerate(state.flat))


def _is_wanted(state: _State, goal: _State, dim: int, part: int | None) -> bool:
    if part is None:
        return _begins(state.flat[dim], goal.flat[dim]) and state.dims[dim] == goal.dims[dim]
    return _begins(state.dims[dim][part], goal.dims[dim][part])


def _begins(axes: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    return wanted[: len(axes)] == axes


def _entries(state: _State, goal: _State, axis: str) -> Iterator[tuple[int, int | None]]:
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
    name: str, state: _State, dim: int, part: int | None, sizes: tuple[tuple[int, ...], ...], mesh: Mesh
) -> dict[str, int]:
    """Address a part inside its dim: the local size of what stands before it, left out where that is 1."""
    before = 1 if part is None else math.prod(_local(state, dim, p, sizes, mesh) for p in range(part))
    return {} if before == 1 else {name: before}


def _local(state: _State, dim: int, part: int | None, sizes: tuple[tuple[int, ...], ...], mesh: Mesh) -> int:
    if part is None:
        whole = math.prod(_local(state, dim, p, sizes, mesh) for p in range(len(sizes[dim])))
        return whole // mesh.extent(state.flat[dim])
    return sizes[dim][part] // mesh.extent(state.dims[dim][part])


def _retype(state: _State, axis: str, kind: str) -> _State:
    return replace(state, types=tuple((name, kind if name == axis else old) for name, old in state.types))


def _remove(state: _State, dim: int, part: int | None) -> _State:
    if part is None:
        flat = tuple(axes[:-1] if d == dim else axes for d, axes in enumerate(state.flat))
        return replace(state, flat=flat)
    return _edit(state, dim, part, state.dims[dim][part][:-1])


def _insert(state: _State, dim: int, part: int | None, axis: str) -> _State:
    if part is None:
        return replace(state, flat=tuple((*axes, axis) if d == dim else axes for d, axes in enumerate(state.flat)))
    return _edit(state, dim, part, (*state.dims[dim][part], axis))


def _edit(state: _State, dim: int, part: int, axes: tuple[str, ...]) -> _State:
    parts = tuple(axes if p == part else old for p, old in enumerate(state.dims[dim]))
    return replace(state, dims=tuple(parts if d == dim else old for d, old in enumerate(state.dims)))


def _block_bytes(layout: Layout, mesh: Mesh) -> float:
    return math.prod(layout.local_shape(mesh)) * DTYPES[layout.dtype].itemsize
