"""The cheapest chain of collectives from one layout of a value to another.

    >>> mesh = Mesh.parse((2, 2, 2))
    >>> y, z = Layout.parse("f32[16@x.y, 64@z]"), Layout.parse("f32[16@x, 64@z] ~y")
    >>> print(*relayout(y, z, mesh).steps)
    all_gather(axis=y, dim=0) -> f32[16@x, 64@z] ~y

A shortest-path search (Dijkstra 1959) over layouts: the edges are the collectives, their weights the bytes that one
rank receives, forward and backward. Only moves toward the target are tried (moves.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Any

from partir.dims import Dim, Part
from partir.errors import LayoutError
from partir.layout import Layout
from partir.mesh import Mesh
from partir.moves import State, block_bytes, layout_of, moves, state_of
from partir.subdims import axes_of

JOINED = frozenset({"all_reduce", "spread", "settle"})


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
    received = block_bytes(middle, mesh)
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
    if left == right:
        return list(left)
    left, right = list(left), list(right)
    merged: list[int] = []
    while left and right:
        a, b = left.pop(0), right.pop(0)
        small, large = min(a, b), max(a, b)
        if not small or large % small:
            return None
        merged.append(small)
        if large > small:
            (left if a > b else right).insert(0, large // small)
    return merged


def _search(source: Layout, target: Layout, sizes: tuple[tuple[int, ...], ...], mesh: Mesh) -> Chain:
    start, goal = state_of(source, sizes, mesh), state_of(target, sizes, mesh)
    order = count()
    queue: list[tuple[float, int, int, State, _Path | None, float, float]] = [(0, 0, next(order), start, None, 0, 0)]
    done: set[State] = set()
    while queue:
        _, length, _, state, path, forward, backward = heapq.heappop(queue)
        if state == goal:
            return _merged(Chain(_steps(path, source, sizes), forward, backward), mesh)
        if state in done:
            continue
        done.add(state)
        for op, arguments, after, fwd, bwd in moves(state, goal, layout_of(state, source, sizes), sizes, mesh):
            total = (forward + fwd, backward + bwd)
            heapq.heappush(queue, (sum(total), length + 1, next(order), after, _Path(op, arguments, after, path), *total))
    raise LayoutError(f"no chain of collectives leads from {source} to {target}.")


@dataclass(frozen=True, eq=False, slots=True)
class _Path:
    """How the search came to a state: by a collective from where ``before`` ends."""

    op: str
    arguments: Mapping[str, Any]
    state: State
    before: _Path | None


def _steps(path: _Path | None, source: Layout, sizes: tuple[tuple[int, ...], ...]) -> tuple[Step, ...]:
    if path is None:
        return ()
    step = Step(path.op, tuple(path.arguments.items()), layout_of(path.state, source, sizes))
    return (*_steps(path.before, source, sizes), step)


def _merged(chain: Chain, mesh: Mesh) -> Chain:
    """Join neighbours that say the same along two axes: one all-reduce over both is one message, and fewer bytes."""
    steps: list[Step] = []
    forward, backward = chain.forward_bytes, chain.backward_bytes
    for step in chain.steps:
        last = steps[-1] if steps else None
        if last is None or last.op != step.op or step.op not in JOINED or _but_axis(last) != _but_axis(step):
            steps.append(step)
            continue
        axes = f"{last.kwargs['axis']}.{step.kwargs['axis']}"
        saved = _ring(last, mesh) + _ring(step, mesh) - _ring(_along(step, axes), mesh)
        forward -= saved if step.op == "all_reduce" else 0
        backward -= saved if step.op == "spread" and step.result.grad else 0
        steps[-1] = _along(step, axes)
    return Chain(tuple(steps), forward, backward)


def _but_axis(step: Step) -> tuple[tuple[str, Any], ...]:
    return tuple(item for item in step.arguments if item[0] != "axis")


def _along(step: Step, axes: str) -> Step:
    return replace(step, arguments=(("axis", axes), *_but_axis(step)))


def _ring(step: Step, mesh: Mesh) -> float:
    size = mesh.extent(step.kwargs["axis"].split("."))
    return 2 * block_bytes(step.result, mesh) * (size - 1) / size
