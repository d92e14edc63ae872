"""Functions on one rank's tensors that lowered graphs call: lookups in a split dim, and the index of each element.

They are made of aten ops and `partir.coordinate`, so AOTAutograd traces through them and derives their
backward, and one graph serves all ranks. The current mesh (`partir.mesh.use_mesh`) gives the sizes.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from partir.collectives import split_axes
from partir.dims import Dim
from partir.errors import OutOfRangeError
from partir.layout import Layout
from partir.mesh import Mesh, current_mesh
from partir.pads import Pad, natural_index, natural_size, zero_pads

PadNumbers = tuple[tuple[tuple[int, int, int], ...], ...]


@torch.library.custom_op("partir_local::check_index", mutates_args=())
def check_index(index: Tensor, size: int) -> Tensor:
    """Return a copy of `index`, having checked `0 <= index < size`.

    On CPU a bad index is an OutOfRangeError. Elsewhere the device asserts, as aten's own lookups do, so
    that nothing waits for the device.
    """
    if index.numel() == 0:
        return index.clone()
    if index.device.type == "cpu":
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= size:
            bad = low if low < 0 else high
            raise OutOfRangeError(f"index {bad} is out of range: a dim of size {size} has indices 0 to {size - 1}.")
    else:
        cast(Any, torch)._assert_async(
            ((index >= 0) & (index < size)).all(), f"index is out of range of a dim of size {size}"
        )
    return index.clone()


def _check_index_fake(index: Tensor, size: int) -> Tensor:
    return index.clone()


cast(Any, check_index).register_fake(_check_index_fake)


def coordinate(axes: tuple[str, ...], device: torch.device) -> Tensor | int:
    """Return this rank's place in its group over `axes`, as an int64 tensor; 0 in a group of one."""
    if current_mesh().extent(axes) == 1:
        return 0
    ops: Any = torch.ops.partir
    return ops.coordinate(".".join(axes), device)


def _held_rows(index: Tensor, axes: str, local: int, size: int) -> tuple[Tensor, Tensor]:
    """Return each index as a row of this rank's part (0 if it is not there), and whether it is there."""
    row = check_index(index, size) - coordinate(split_axes(axes), index.device) * local
    held = (row >= 0) & (row < local)
    return torch.where(held, row, 0), held


def masked_embedding(weight: Tensor, ids: Tensor, axes: str, size: int, padding_idx: int = -1) -> Tensor:
    """Look up rows of a table whose vocabulary is split over `axes`: a pending sum over them.

    Args:
        weight: this rank's rows `[v_local, h]`, block number coordinate(axes).
        ids: `[*]`, global ids, whole along `axes`.
        axes: the axes that split the vocabulary, major to minor: `"y"` or `"y.x"`.
        size: number of rows of the whole table; other ids are an IndexError.
        padding_idx: the global id whose row gets no gradient; -1 for none.

    Returns:
        `[*, h]`: the row where this rank holds it, zeros elsewhere.
    """
    row, held = _held_rows(ids, axes, weight.shape[0], size)
    found = torch.nn.functional.embedding(row, weight)
    if padding_idx >= 0:
        found = torch.where((ids == padding_idx).unsqueeze(-1), found.detach(), found)
    return found.masked_fill(~held.unsqueeze(-1), 0)


def masked_gather(x: Tensor, dim: int, index: Tensor, axes: str, size: int) -> Tensor:
    """`torch.gather` on a dim split over `axes`: a pending sum over them, shaped as `index`.

    Args:
        x: this rank's block; `dim` holds `size / group` of the whole dim's elements.
        index: global indices, whole along `axes`; outside `0..size-1` an IndexError.
    """
    row, held = _held_rows(index, axes, x.shape[dim], size)
    return torch.gather(x, dim, row).masked_fill(~held, 0)


def masked_index_select(x: Tensor, dim: int, index: Tensor, axes: str, size: int) -> Tensor:
    """`torch.index_select` on a dim split over `axes`: a pending sum over them.

    Args:
        x: this rank's block; `dim` holds `size / group` of the whole dim's elements.
        index: global indices `[n]`, whole along `axes`; outside `0..size-1` an IndexError.
    """
    row, held = _held_rows(index, axes, x.shape[dim], size)
    shape = [1] * x.dim()
    shape[dim] = -1
    return torch.index_select(x, dim, row).masked_fill(~held.view(shape), 0)


def masked_index(x: Tensor, ids: Tensor, axes: str, size: int) -> Tensor:
    """`x[ids]` where dim 0 is split over `axes`: a pending sum over them, `[*ids.shape, *x.shape[1:]]`.

    Args:
        x: this rank's block; dim 0 holds `size / group` of the whole dim's elements.
        ids: global indices of any shape, whole along `axes`; negative ones count from the end, outside `-size..size-1` an IndexError.
    """
    from_start = torch.where((ids < 0) & (ids >= -size), ids + size, ids).flatten()
    return masked_index_select(x, 0, from_start, axes, size).reshape([*ids.shape, *x.shape[1:]])


def mask_pads(x: Tensor, dim: int, pad: tuple[int, int, int], layout_text: str) -> Tensor:
    """Return this rank's block of `x` with zeros in a pad.

    Args:
        dim: the padded one.
        pad: (block, size, padded) of `pads.Pad`.
        layout_text: layout of `x`.
    """
    index = _dim_index(Layout.parse(layout_text).dims[dim], current_mesh(), x.device)
    return zero_pads(x, dim, index, (Pad(*pad),))


def global_index(layout: Layout, device: torch.device, pads: PadNumbers = ()) -> Tensor:
    """Return the row-major index in the whole tensor of each element that this rank holds.

    Args:
        pads: for each dim the (block, size, padded) of its pads; a copy has the index of its original.

    Returns:
        int64 of the layout's local shape.
    """
    mesh = current_mesh()
    listed = [tuple(Pad(*numbers) for numbers in dim) for dim in pads] or [()] * len(layout.dims)
    shape = [natural_size(dim.size, dim_pads) for dim, dim_pads in zip(layout.dims, listed)]
    index = torch.zeros((), dtype=torch.int64, device=device)
    for position, dim in enumerate(layout.dims):
        stride = math.prod(shape[position + 1 :])
        place = natural_index(_dim_index(dim, mesh, device), listed[position]) * stride
        index = index + place.view([-1] + [1] * (len(shape) - position - 1))
    return index


def _dim_index(dim: Dim, mesh: Mesh, device: torch.device) -> Tensor:
    local = dim.local_size(mesh)
    left = torch.arange(local, device=device)
    if dim.axes:
        left = left + coordinate(dim.axes, device) * local
    index, stride = torch.zeros_like(left), 1
    for part in reversed(dim.parts):
        size = part.size // mesh.extent(part.axes)
        place, left = left % size, left // size
        if part.axes:
            place = place + coordinate(part.axes, device) * size
        index, stride = index + place * stride, stride * part.size
    return index


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, rows: str, pads: PadNumbers, scale: float | None, groups: bool
) -> Tensor:
    """Return causal attention of this rank's rows: row i of the whole query sees columns 0 to i.

    Args:
        query: `[*, L_local, E]`.
        key, value: `[*, S, E]`, `[*, S, V]`, whole in S.
        rows: layout of the query's rows, `"f32[16@z]"`; pads: theirs.
        groups: whether several query heads share a key head.
    """
    index = global_index(Layout.parse(rows), query.device, pads)
    visible = torch.arange(key.shape[-2], device=query.device) <= index.unsqueeze(-1)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, visible, scale=scale, enable_gqa=groups)
