"""Where the blocks of a tensor live: for each rank (i,j,l) the slice of each dim that it holds.

>>> mesh = Mesh.parse((2, 2, 1))
>>> print(*blocks_text(Layout.parse("f32[8@x.y, 6@z]"), mesh), sep="\\n")
(i,j,l)  dim 0  dim 1
(0,0,0)  0:2    0:6
(0,1,0)  2:4    0:6
(1,0,0)  4:6    0:6
(1,1,0)  6:8    0:6
>>> print(*dim_formula(Dim.parse("(3*8@y)@x"), mesh), sep="\\n")
24 as 3 x 8: 8[j*4 : +4]; of these 12, flat: [i*6 : +6]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partir.blocks import is_owner, shard
from partir.dims import Dim, Part
from partir.folding import columns
from partir.layout import BLOCK_LETTERS, Layout
from partir.mesh import Mesh

MOST_RANKS = 16
MOST_SLICES = 3


def blocks_text(layout: Layout, mesh: Mesh) -> list[str]:
    """Return a table of the blocks, a row a rank; of a larger mesh the first ranks and the formula.

    Args:
        layout: at rest; a rank that holds no block (off a diagonal) gets a row that says so.
    """
    header = [f"({','.join(BLOCK_LETTERS[name] for name in mesh.names)})", *(f"dim {index}" for index in range(len(layout.dims)))]
    rows = [_row(layout, mesh, rank) for rank in range(min(mesh.size, MOST_RANKS))]
    lines = columns([header, *rows])
    if mesh.size <= MOST_RANKS:
        return lines
    formula = [f"dim {index}: {line}" for index, dim in enumerate(layout.dims) for line in dim_formula(dim, mesh)]
    return [*lines, f"... and {mesh.size - MOST_RANKS} more; rank {header[0]} holds", *formula]


def _row(layout: Layout, mesh: Mesh, rank: int) -> list[str]:
    place = f"({','.join(map(str, mesh.coordinate(rank).values()))})"
    if not is_owner(layout, mesh, rank):
        return [place, "nothing"]
    if not layout.dims:
        return [place, "its one element"]
    return [place, *(slices_text(dim, mesh, rank) for dim in layout.dims)]


def slices_text(dim: Dim, mesh: Mesh, rank: int) -> str:
    """Return the global indices of a dim that a rank holds, ``0:24`` or ``0:8, 24:32``; at most three slices are named."""
    held = slices(dim, mesh, rank)
    shown = ", ".join(f"{start}:{stop}" for start, stop in held[:MOST_SLICES])
    return shown + (f", ... ({len(held)} slices)" if len(held) > MOST_SLICES else "")


def slices(dim: Dim, mesh: Mesh, rank: int) -> list[tuple[int, int]]:
    """Return the global indices of a dim that a rank holds as runs ``(start, stop)``."""
    held = shard(torch.arange(dim.size), Layout("i64", (dim,)), mesh, rank)
    if not len(held):
        return [(0, 0)]
    breaks = ((held[1:] - held[:-1]) != 1).nonzero().flatten() + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in torch.tensor_split(held, breaks)]


def dim_formula(dim: Dim, mesh: Mesh) -> list[str]:
    """Return the slices of a dim as a formula in a rank's place: one line."""
    if len(dim.parts) == 1:
        return [_slice(dim.parts[0], mesh) or f"0:{dim.size}"]
    sizes = " x ".join(str(part.size) for part in dim.parts)
    parts = ", ".join(f"{part.size}{text}" for part in dim.parts if (text := _slice(part, mesh)))
    flat = Dim(dim.parts).local_size(mesh)
    rest = _slice(Part(flat, dim.axes), mesh)
    return [f"{dim.size} as {sizes}" + (f": {parts}" if parts else "") + (f"; of these {flat}, flat: {rest}" if rest else "")]


def _slice(part: Part, mesh: Mesh) -> str:
    axes = [axis for axis in part.axes if mesh[axis] > 1]
    size = part.size // mesh.extent(axes)
    return f"[{_index(axes, mesh)}*{size} : +{size}]" if axes else ""


def _index(axes: Sequence[str], mesh: Mesh) -> str:
    """Return a rank's row-major place along axes, ``(i*2 + j)``."""
    text = BLOCK_LETTERS[axes[0]]
    for axis in axes[1:]:
        text = f"({text}*{mesh[axis]} + {BLOCK_LETTERS[axis]})"
    return text
