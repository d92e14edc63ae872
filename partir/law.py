"""The 3-D law on one product: give each of its three indices an axis; the axis a matrix lacks is its direction.

Source: Bian et al. 2021 (arXiv 2105.14450), Algorithms 1-6, restated for any mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from partir.assignment import Assignment, Call, SubFactor, result_dims
from partir.layout import Layout
from partir.mesh import Mesh


def is_lawful(call: Call) -> bool:
    """Return whether a call is a product that the law places: a product with batch factors projects its operands instead."""
    return call.binding.product is not None


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
