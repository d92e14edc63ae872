"""The 3-D law on one product: give each of its three indices an axis; the axis a matrix lacks is its direction.

Source: Bian et al. 2021 (arXiv 2105.14450), Algorithms 1-6, restated for any mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from partir.assignment import Assignment, Call, SubFactor, project, result_dims
from partir.layout import Layout
from partir.mesh import Mesh
from partir.rules.placement import Axes, Placement


def is_lawful(call: Call) -> bool:
    """Return whether a call is a product that the law places: a product with batch factors projects its operands instead."""
    return call.binding.product is not None


def states_to_try(call: Call, placement: Placement, present: Sequence[Layout | None], mesh: Mesh) -> tuple[str, ...]:
    """Return the states in which a product may run, the preferred one first.

    A at rest f[m@x.y, k@z] runs in state y; its result, f[m@x.z, n@y], in state z. Re-laying it, where another state would
    move fewer bytes, is not tried: so a chain receives the bytes of the law, and a residual finds what it left. An A that no
    swapped axis splits is the first of its chain. Where A rests otherwise, or B (tied weights) as in another state, the
    cheapest state wins.
    """
    product = call.binding.product
    assert product is not None
    start = placement.lookup_start if call.binding.index else placement.start
    states = tuple(sorted(placement.states, key=lambda state: state != start))
    a, b = present[product.a], present[product.b]
    groups = {"m": product.m, "k": product.k, "n": product.n}
    if a is None or not _axes_that_swap(placement).intersection(a.strip(mesh).split_axes):
        fitting = states[:1]
    else:
        held = _split(project(call, product.a, a, mesh), mesh)
        fitting = [state for state in states if held == _split(_assign(call, groups, placement.at_rest(state, "a"), mesh), mesh)]
    if len(fitting) != 1 or (b is not None and not _is_laid_for(call, placement.states[fitting[0]], groups, b, mesh)):
        return states
    return (fitting[0],)


def first_split(call: Call, placement: Placement, mesh: Mesh) -> dict[SubFactor, tuple[str, ...]]:
    """Return how a call whose operands are all whole (a norm of a model's input) splits: as the A of the first product rests."""
    if len(call.binding.results[0]) < 2:
        return {}
    *rows, columns = call.binding.results[0]
    groups = {"m": [name for names in rows for name in names], "k": list(columns)}
    at_rest = placement.at_rest(placement.start, "a")
    return _assign(call, groups, {index: at_rest[index] for index in ("k", "m")}, mesh)


def _axes_that_swap(placement: Placement) -> set[str]:
    """Return the axes that an index has in one state and another index in another."""
    places = {(axis, index) for law in placement.states.values() for index, axes in law.items() for axis in axes}
    return {axis for axis, _ in places if len([place for place in places if place[0] == axis]) > 1}


def _is_laid_for(call: Call, law: Mapping[str, Axes], groups: Mapping[str, Iterable[str]], b: Layout, mesh: Mesh) -> bool:
    product = call.binding.product
    assert product is not None
    held = project(call, product.b, b, mesh)
    wanted = _split(_assign(call, groups, {index: law[index] for index in ("k", "n")}, mesh), mesh)
    return all(held.get(pair, ())[: len(axes)] == axes for pair, axes in wanted.items())


def _assign(
    call: Call, groups: Mapping[str, Iterable[str]], axes: Mapping[str, Axes], mesh: Mesh
) -> dict[SubFactor, tuple[str, ...]]:
    assignment: dict[SubFactor, tuple[str, ...]] = {}
    for index, wanted in axes.items():
        place_axes(call, groups[index], tuple(axis for axis in wanted if axis in mesh.names), assignment, mesh)
    return assignment


def _split(assignment: Assignment, mesh: Mesh) -> Assignment:
    """Leave out axes of one rank."""
    kept = {pair: tuple(axis for axis in axes if mesh[axis] > 1) for pair, axes in assignment.items()}
    return {pair: axes for pair, axes in kept.items() if axes}


def place_axes(
    call: Call, names: Iterable[str], axes: Sequence[str], assignment: dict[SubFactor, tuple[str, ...]], mesh: Mesh
) -> list[str]:
    """Give ``axes`` to the first sub-dims of the factors that they divide, editing ``assignment``; return those left over.

    An axis stays with the sub-dim of the axis before it where that divides. Sub-dims that a chunk takes apart come last.
    """
    pairs = [pair for pair in call.subfactors(names) if pair[0] not in call.unsplit]
    pairs.sort(key=lambda pair: call.subdim(pair).avoid)
    missed: list[str] = []
    for axis in axes:
        pair = _first_divisible(call, pairs, axis, assignment, mesh)
        if pair is not None:
            assignment[pair] = (*assignment.get(pair, ()), axis)
        elif mesh[axis] > 1:
            missed.append(axis)
    return missed


def _first_divisible(
    call: Call, pairs: Sequence[SubFactor], axis: str, assignment: Assignment, mesh: Mesh
) -> SubFactor | None:
    indexed = {factor for _, _, factor in call.binding.index}
    for pair in sorted(pairs, key=lambda pair: pair not in assignment):
        if pair[0] in indexed and pair[1] > 0:
            continue
        if call.subdim(pair).size % mesh.extent((*assignment.get(pair, ()), axis)) == 0:
            return pair
    return None


def scatter_rows(call: Call, assignment: Assignment, computed: Layout, index: int, mesh: Mesh) -> Layout:
    """Return the result's layout at rest: its direction, the axis of the summed index, innermost on its rows.

        C  computed f[m@x, n@y] +z   rest f[m@x.z, n@y]

    A direction that divides no row stays pending.
    """
    product = call.binding.product
    assert product is not None
    rows, summed = product.m, product.k
    scattered = {pair: axes for pair, axes in assignment.items() if pair[0] not in summed}
    placed: list[str] = []
    for axis in [axis for pair, axes in assignment.items() if pair[0] in summed for axis in axes]:
        before = dict(scattered)
        place_axes(call, rows, (axis,), scattered, mesh)
        if scattered != before:
            placed.append(axis)
    dims = result_dims(call, index, scattered)
    return replace(computed, dims=dims, pending=tuple(item for item in computed.pending if item[0] not in placed))
