"""Pieces: the boxes of a whole tensor that a rank's block is made of, each with its place in both.

A plain block is one box. A block of a fused parameter is several: of `(3*8@y)@x` a rank holds rows of up to three parts.

>>> mesh = Mesh.parse((2, 2, 1))
>>> for piece in pieces(Layout.parse("f32[(3*8@y)@x, 6]"), mesh, rank=1):
...     print(piece.starts, piece.sizes, "at row", piece.place[0].start)
(4, 0) (4, 6) at row 0
(12, 0) (2, 6) at row 4
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from partir.block_places import slices
from partir.blocks import is_owner
from partir.layout import Layout
from partir.mesh import Mesh

MOST_BYTES = 64 * 2**20
"""What one piece holds at most, so that no reader needs more than this beside its own block."""


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor.

    Args:
        starts: its first index in each dim of the whole tensor.
        sizes: its shape.
        place: where it lies in the block that holds it.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    place: tuple[slice, ...]


@dataclass(frozen=True)
class Block:
    """What one rank holds of a tensor, in the original order.

    Args:
        shape: of the whole tensor.
        tensor: this rank's block.
        pieces: of the block; none where this rank holds nothing.
    """

    shape: tuple[int, ...]
    tensor: Tensor
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> Block:
        """Return the block of a tensor that this process holds whole."""
        shape = tuple(tensor.shape)
        boxes = split_pieces([Piece((0,) * len(shape), shape, tuple(slice(0, n) for n in shape))], tensor.element_size())
        return cls(shape, tensor, tuple(boxes))

    @classmethod
    def of(cls, tensor: Tensor, layout: Layout, mesh: Mesh, rank: int) -> Block:
        """Return the block that `rank` holds under a layout."""
        return cls(layout.shape, tensor, tuple(split_pieces(pieces(layout, mesh, rank), tensor.element_size())))

    def view(self, piece: Piece) -> Tensor:
        """Return the part of the block that a piece is."""
        return self.tensor[piece.place]


def pieces(layout: Layout, mesh: Mesh, rank: int) -> list[Piece]:
    """Return the boxes that a rank holds of a tensor laid out by `layout`."""
    if not is_owner(layout.strip(mesh), mesh, rank):
        return []
    runs = [list(_placed(slices(dim, mesh, rank))) for dim in layout.dims]
    return [_box(chosen) for chosen in itertools.product(*runs)]


def split_pieces(boxes: Iterable[Piece], bytes_each: int, most: int | None = None) -> Iterator[Piece]:
    """Cut boxes until none holds more than `most` bytes, the first dims first.

    Args:
        bytes_each: bytes of an element.
        most: by default `MOST_BYTES`.
    """
    most = MOST_BYTES if most is None else most
    for box in boxes:
        if math.prod(box.sizes) * bytes_each <= most:
            yield box
            continue
        dim = next(index for index, size in enumerate(box.sizes) if size > 1)
        step = max(1, most // (bytes_each * math.prod(box.sizes[dim + 1 :])))
        cuts = [_cut(box, dim, start, min(step, box.sizes[dim] - start)) for start in range(0, box.sizes[dim], step)]
        yield from split_pieces(cuts, bytes_each, most)


def _placed(runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Give each run (start, stop) its place in the block: (start, size, place)."""
    place = 0
    for start, stop in runs:
        yield start, stop - start, place
        place += stop - start


def _box(runs: Sequence[tuple[int, int, int]]) -> Piece:
    starts = tuple(start for start, _, _ in runs)
    return Piece(starts, tuple(size for _, size, _ in runs), tuple(slice(place, place + size) for _, size, place in runs))


def _cut(box: Piece, dim: int, start: int, size: int) -> Piece:
    def changed(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim + 1 :])

    first = box.place[dim].start + start
    place = (*box.place[:dim], slice(first, first + size), *box.place[dim + 1 :])
    return Piece(changed(box.starts, box.starts[dim] + start), changed(box.sizes, size), place)
