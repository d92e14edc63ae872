"""Which slice of a dim each place along its axes holds, in closed form: what the cube of a page shows.

    >>> from partir.mesh import Mesh
    >>> mesh = Mesh.parse((2, 2, 1))
    >>> slices(Dim.parse("16@x.y"), mesh)
    ['0:4', '4:8', '8:12', '12:16']
    >>> slices(Dim.parse("(3*8@y)@x"), mesh)[0]    # three parts, each split over y; the first half of what that leaves
    '0:4, 8:10'
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from partir.dims import Dim
from partir.layout import Layout
from partir.mesh import Mesh

LISTED = 3  # runs of a slice that its text shows


def layout_record(layout: Layout, mesh: Mesh) -> dict[str, object]:
    """Return what a page needs to draw a layout: each dim's axes, and its slice at each place along them, row-major."""
    stripped = layout.strip(mesh)
    return {
        "text": str(layout),
        "block": layout.block,
        "direction": layout.direction or "",
        "dims": [{"text": str(dim), "axes": list(dim.all_axes), "slices": slices(dim, mesh)} for dim in stripped.dims],
        "pending": [list(item) for item in stripped.pending],
        "varied": list(stripped.varied),
        "owner": list(stripped.owner or ()),
    }


def slices(dim: Dim, mesh: Mesh) -> list[str]:
    """Return the slice of a dim at each place along its axes, row-major, as Python writes slices: runs of whole indices."""
    spans = [range(mesh[axis]) for axis in dim.all_axes]
    return [_text(dim, mesh, dict(zip(dim.all_axes, place))) for place in itertools.product(*spans)]


def _text(dim: Dim, mesh: Mesh, place: dict[str, int]) -> str:
    found, number = runs(dim, mesh, place, LISTED)
    more = f" ... {number} runs" if number > LISTED else ""
    return ", ".join(f"{start}:{stop}" for start, stop in found) + more


def runs(dim: Dim, mesh: Mesh, place: dict[str, int], most: int) -> tuple[list[tuple[int, int]], int]:
    """Return the first runs of indices of a block, at most ``most``, and how many there are; an empty block is ``0:0``.

    A block takes a range of each sub-dim; what that leaves, flat, is split once more over the dim's own axes.
    """
    sizes = [part.size for part in dim.parts]
    widths = [part.size // mesh.extent(part.axes) for part in dim.parts]
    starts = [width * _index(part.axes, mesh, place) for part, width in zip(dim.parts, widths)]
    length = math.prod(widths) // mesh.extent(dim.axes)
    begin = length * _index(dim.axes, mesh, place)
    if not length:
        return [(0, 0)], 1
    end, chunk = begin + length, widths[-1]  # the last sub-dim is what runs on
    found: list[tuple[int, int]] = []
    at = begin
    while at < end and len(found) < most:
        stop = min(end, (at // chunk + 1) * chunk)
        first = _ravel([start + part for start, part in zip(starts, _unravel(at, widths))], sizes)
        found.append((first, first + stop - at))
        at = stop
    return found, -(-end // chunk) - begin // chunk


def _index(axes: Sequence[str], mesh: Mesh, place: dict[str, int]) -> int:
    number = 0
    for axis in axes:
        number = number * mesh[axis] + place[axis]
    return number


def _unravel(position: int, sizes: Sequence[int]) -> list[int]:
    digits: list[int] = []
    for size in reversed(sizes):
        position, digit = divmod(position, size)
        digits.append(digit)
    return digits[::-1]


def _ravel(digits: Sequence[int], sizes: Sequence[int]) -> int:
    position = 0
    for digit, size in zip(digits, sizes):
        position = position * size + digit
    return position
