"""Sub-dims: the finest sizes into which views, chunks and heads ever cut a dim, found over the whole graph.

A dim is an ordered product of sub-dims. Two dims that an op ties together are refined until
both list the same sub-dims, with union-find over the pieces, so that a fused weight
is ``(3*heads*64)`` before an axis is chosen for it:

    >>> a, b = [Piece(2304)], [Piece(3), Piece(12), Piece(64)]
    >>> tie(a, b), [piece.size for piece in leaves(a)]
    (True, [3, 12, 64])
    >>> tie([Piece(6), Piece(4)], [Piece(4), Piece(6)])     # no common refinement
    False
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from partir.dims import Dim
from partir.mesh import Mesh

if TYPE_CHECKING:
    from partir.rules.binding import Binding


class Piece:
    """A sub-dim that may still be refined into ``pieces`` or be found equal to another (``same``)."""

    def __init__(self, size: int, avoid: bool = False) -> None:
        self.size = size
        self.avoid = avoid
        self.same: Piece | None = None
        self.pieces: list[Piece] = []


@dataclass(frozen=True)
class SubDim:
    """A final sub-dim; ``avoid``: a chunk or a select consumes it, so axes go elsewhere if they can.

    ``key``: the same for all sub-dims of a graph that ops tie together; -1 where nobody numbers them.
    """

    size: int
    avoid: bool = False
    key: int = field(default=-1, compare=False)


def find(piece: Piece) -> Piece:
    """Return the representative of a piece; the way there gets shorter, so that a residual stream of 96 layers is no long walk."""
    while piece.same is not None:
        piece.same = piece.same.same or piece.same
        piece = piece.same
    return piece


def leaves(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the final pieces, without those of size 1."""
    found: list[Piece] = []
    for piece in pieces:
        piece = find(piece)
        found.extend(leaves(piece.pieces) if piece.pieces else [piece] if piece.size > 1 else [])
    return found


def tie(left: Sequence[Piece], right: Sequence[Piece]) -> bool:
    """Refine two dims of equal size until they list the same pieces; False where none exist."""
    while True:
        pair = _first_difference(leaves(left), leaves(right))
        if pair is None:
            return True
        a, b = pair
        if a is None or b is None:
            return False
        if not _join(a, b):
            return False


def avoid(pieces: Sequence[Piece]) -> None:
    """Mark every final piece as one that an op consumes."""
    for piece in leaves(pieces):
        piece.avoid = True


def frozen(pieces: Sequence[Piece], keys: dict[int, int] | None = None) -> tuple[SubDim, ...]:
    """Return the final sub-dims of a dim; a dim of size 1 has none.

    Args:
        keys: numbers given to pieces so far, by identity; new ones are added.
    """
    found = leaves(pieces)
    if keys is None:
        return tuple(SubDim(piece.size, piece.avoid) for piece in found)
    return tuple(SubDim(piece.size, piece.avoid, keys.setdefault(id(piece), len(keys))) for piece in found)


def _first_difference(left: list[Piece], right: list[Piece]) -> tuple[Piece | None, Piece | None] | None:
    for a, b in zip(left, right):
        if a is not b:
            return a, b
    if len(left) == len(right):
        return None
    longer = left if len(left) > len(right) else right
    rest = longer[min(len(left), len(right))]
    return (rest, None) if longer is left else (None, rest)


def _join(a: Piece, b: Piece) -> bool:
    if a.size == b.size:
        a.same = b
        b.avoid = a.avoid or b.avoid
        return True
    large, small = (a, b) if a.size > b.size else (b, a)
    if large.size % small.size:
        return False
    large.pieces = [Piece(small.size, large.avoid), Piece(large.size // small.size, large.avoid)]
    return True


Sizes = tuple[tuple[SubDim, ...], ...]


def carry(binding: Binding, operands: Sequence[Sizes]) -> tuple[Sizes, ...]:
    """Return the sub-dims of each result's dims: those of an operand's dim of the same factors, else unnamed ones."""
    known = {factors: dim for dims, sizes in zip(binding.operands, operands) for factors, dim in zip(dims, sizes)}
    return tuple(tuple(known.get(factors) or _unnamed(binding, factors) for factors in dims) for dims in binding.results)


def _unnamed(binding: Binding, factors: Sequence[str]) -> tuple[SubDim, ...]:
    return tuple(SubDim(binding.sizes[factor]) for factor in factors if binding.sizes[factor] > 1)


def axes_of(dim: Dim, sizes: Sequence[int], mesh: Mesh) -> list[tuple[str, ...]] | None:
    """Return the axes that split each sub-dim of a dim, or None where the dim's blocks do not follow the sub-dims.

        >>> axes_of(Dim.parse("(3*768@y)"), [3, 12, 64], Mesh.parse((1, 4, 1)))
        [(), ('y',), ()]

    Axes that split the whole local dim (``dim.axes``) belong to no sub-dim: gather them first.
    """
    found: list[tuple[str, ...]] = []
    remaining = list(sizes)
    for part in dim.parts:
        taken = _take(remaining, part.size)
        if taken is None:
            return None
        axes = _spread_axes(part.axes, taken, mesh)
        if axes is None:
            return None
        found.extend(axes)
    return found + [()] * len(remaining)


def _take(remaining: list[int], size: int) -> list[int] | None:
    taken: list[int] = []
    product = 1
    while remaining and product < size:
        taken.append(remaining.pop(0))
        product *= taken[-1]
    return taken if product == size else None


def _spread_axes(axes: tuple[str, ...], sizes: list[int], mesh: Mesh) -> list[tuple[str, ...]] | None:
    """Give a part's axes to its sub-dims, major to minor; the next sub-dim is split only when the one before is used up."""
    result: list[tuple[str, ...]] = [() for _ in sizes]
    position, room = 0, sizes[0] if sizes else 1
    for axis in axes:
        extent = mesh[axis]
        while room == 1 and extent > 1 and position + 1 < len(sizes):
            position += 1
            room = sizes[position]
        if room % extent:
            return None
        if not result:
            return None if extent > 1 else result
        room //= extent
        result[position] += (axis,)
    return result
