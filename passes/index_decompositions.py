"""Ops on places written with aranges, comparisons and one lookup in one dim, so that every other dim may be split.

Each function has the signature of its op; places come from aranges, never from a baked table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Return x[indices] for integer indices: one lookup in the indexed dims, moved side by side and flattened to one."""
    order, first = _side_by_side(x, indices)
    dims = [dim for dim, at in enumerate(indices) if at is not None]
    flat = x.permute(order).flatten(first, first + len(dims) - 1)
    places, shape = _flat_places(x, [at for at in indices if at is not None], dims)
    return flat.index_select(first, places.flatten()).unflatten(first, shape)


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """Return x with values put, or added, where integer indices say; where one mask says, a value or as many as it has places."""
    given = [at for at in indices if at is not None]
    if any(at.dtype is torch.bool for at in given):
        return _put_where(x, indices, values, accumulate)
    order, first = _side_by_side(x, indices)
    dims = [dim for dim, at in enumerate(indices) if at is not None]
    moved = x.permute(order)
    flat = moved.flatten(first, first + len(dims) - 1)
    places, shape = _flat_places(x, given, dims)
    rest = [*flat.shape[:first], *shape, *flat.shape[first + 1 :]]
    spread = values.to(x.dtype).expand(rest)
    source = spread.flatten(first, first + len(shape) - 1) if shape else spread.unsqueeze(first)
    put = flat.index_add(first, places.flatten(), source) if accumulate else flat.index_copy(first, places.flatten(), source)
    back = [order.index(dim) for dim in range(x.dim())]
    return put.unflatten(first, moved.shape[first : first + len(dims)]).permute(back)


def _put_where(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool) -> Tensor:
    """A mask over the first dims takes one value; how many others it would take depends on data."""
    if len(indices) != 1 or indices[0] is None or values.numel() != 1:
        raise NotImplementedError("the number of places of a mask depends on data")
    mask = indices[0].reshape([*indices[0].shape, *[1] * (x.dim() - indices[0].dim())])
    value = values.to(x.dtype).reshape([])
    return torch.where(mask, x + value if accumulate else value, x)


def _side_by_side(x: Tensor, indices: Sequence[Tensor | None]) -> tuple[list[int], int]:
    """Return the order of dims that puts the indexed ones together, and where: in front, unless they are together already."""
    dims = [dim for dim, at in enumerate(indices) if at is not None]
    if any(at is not None and at.dtype is torch.bool for at in indices):
        raise NotImplementedError("the number of places of a mask depends on data")
    if dims == list(range(dims[0], dims[0] + len(dims))):
        return list(range(x.dim())), dims[0]
    return [*dims, *(dim for dim in range(x.dim()) if dim not in dims)], 0


def _flat_places(x: Tensor, given: Sequence[Tensor], dims: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Return the places in the flattened indexed dims, negative ones counted from the end, and their shape."""
    shape = torch.broadcast_shapes(*(at.shape for at in given))
    strides = [math.prod(x.shape[dim] for dim in dims[place + 1 :]) for place in range(len(dims))]
    terms = [torch.where(at < 0, at + x.shape[dim], at) * stride for at, dim, stride in zip(given, dims, strides, strict=True)]
    places = terms[0]
    for term in terms[1:]:
        places = places + term
    return places.expand(shape), list(shape)


def tril(x: Tensor, diagonal: int = 0) -> Tensor:
    """Return x [..., m, n] with zeros above a diagonal."""
    return x.masked_fill(_right_of(x) > diagonal, 0)


def triu(x: Tensor, diagonal: int = 0) -> Tensor:
    """Return x [..., m, n] with zeros below a diagonal."""
    return x.masked_fill(_right_of(x) < diagonal, 0)


def _right_of(x: Tensor) -> Tensor:
    """Return how far right of the main diagonal each entry stands, [m, n]."""
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape[-2:])
    return columns.unsqueeze(0) - rows.unsqueeze(1)


def unfold(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Return windows of `size` every `step` along a dim, as a new last dim."""
    if x.dim() == 0:
        x = x.unsqueeze(0)
    dim = dimension % x.dim()
    count = (x.shape[dim] - size) // step + 1
    starts = torch.arange(count, device=x.device) * step
    places = starts.unsqueeze(1) + torch.arange(size, device=x.device)
    return x.index_select(dim, places.flatten()).unflatten(dim, [count, size]).movedim(dim + 1, -1)


def bilinear(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a [..., i], b [..., j] and weight [o, i, j] combined to [..., o]."""
    out, left, right = weight.shape
    y = torch.matmul(a, weight.permute(1, 0, 2).reshape(left, out * right)).unflatten(-1, [out, right])
    y = (y * b.unsqueeze(-2)).sum(-1)
    return y if bias is None else y + bias
