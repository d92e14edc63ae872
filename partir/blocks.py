"""Blocks: which part of a whole tensor a rank holds under a layout, cut out and put together again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partir.dims import Dim
from partir.errors import LayoutError
from partir.layout import Layout
from partir.mesh import Mesh


def shard(tensor: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """Return the block of ``tensor`` that ``rank`` holds, a view where the layout allows.

    Pending sums are held by the first rank along their axes; the others hold zeros. A rank
    that is not the owner of an owned layout holds an empty block.

    Raises:
        LayoutError: the tensor's shape is not the layout's.
    """
    if tuple(tensor.shape) != layout.shape:
        raise LayoutError(f"a tensor of shape {tuple(tensor.shape)} does not fit layout {layout}.")
    if not is_owner(layout, mesh, rank):
        return tensor.new_empty((0,) * max(tensor.dim(), 1))
    block = _narrow_parts(tensor, layout, mesh, rank).reshape(_local_before_flat(layout, mesh))
    for index, dim in enumerate(layout.dims):
        if dim.axes:
            size = dim.local_size(mesh)
            block = block.narrow(index, mesh.index(rank, dim.axes) * size, size)
    first = all(mesh.index(rank, (axis,)) == 0 for axis, kind in layout.pending if kind == "sum")
    return block if first else torch.zeros_like(block)


def gather(blocks: Sequence[torch.Tensor], layout: Layout, mesh: Mesh) -> torch.Tensor:
    """Return the whole tensor from every rank's block, pending sums added up.

    Args:
        blocks: one block a rank, in rank order.
    """
    whole = blocks[0].new_zeros(layout.shape)
    sums = tuple(axis for axis, kind in layout.pending if kind == "sum")
    maxima = tuple(axis for axis, kind in layout.pending if kind == "max")
    same = tuple(axis for axis in mesh.names if axis not in (*layout.split_axes, *sums, *maxima, *_owner_axes(layout)))
    for rank, block in enumerate(blocks):
        if mesh.index(rank, same) or not is_owner(layout, mesh, rank):
            continue
        first = mesh.index(rank, (*sums, *maxima)) == 0
        _place(whole, block, layout, mesh, rank, "set" if first else ("add" if sums else "max"))
    return whole


def is_owner(layout: Layout, mesh: Mesh, rank: int) -> bool:
    """Return whether a rank holds a block at all: false only off the diagonal of an owned layout."""
    if layout.owner is None:
        return True
    place = mesh.coordinate(rank)
    return place.get(layout.owner[0], 0) == place.get(layout.owner[1], 0)


def _owner_axes(layout: Layout) -> tuple[str, ...]:
    return layout.owner or ()


def _part_shape(layout: Layout) -> list[int]:
    return [part.size for dim in layout.dims for part in dim.parts]


def _narrow_parts(tensor: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    view, position = tensor.reshape(_part_shape(layout)), 0
    for dim in layout.dims:
        for part in dim.parts:
            if part.axes:
                size = Dim((part,)).local_size(mesh)
                view = view.narrow(position, mesh.index(rank, part.axes) * size, size)
            position += 1
    return view


def _local_before_flat(layout: Layout, mesh: Mesh) -> list[int]:
    return [Dim(dim.parts).local_size(mesh) if not dim.axes else _unflattened(dim, mesh) for dim in layout.dims]


def _unflattened(dim: Dim, mesh: Mesh) -> int:
    return dim.local_size(mesh) * mesh.extent(dim.axes)


def _place(whole: torch.Tensor, block: torch.Tensor, layout: Layout, mesh: Mesh, rank: int, how: str) -> None:
    if not any(dim.axes for dim in layout.dims):
        target = _narrow_parts(whole, layout, mesh, rank)
        _combine(target, block.reshape(target.shape), how)
        return
    index = torch.arange(whole.numel(), device=whole.device).view(layout.shape)
    where = shard(index, Layout("i64", layout.dims, owner=layout.owner), mesh, rank).reshape(-1)
    flat = whole.view(-1)
    values = flat[where]
    _combine(values, block.reshape(-1), how)
    flat[where] = values


def _combine(target: torch.Tensor, block: torch.Tensor, how: str) -> None:
    if how == "set":
        target.copy_(block)
    elif how == "add":
        target.add_(block)
    else:
        target.copy_(torch.maximum(target, block))
