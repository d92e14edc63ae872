"""Ops on places and on matrices written as other ops, so that every dim that they leave alone may be split.

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
    """A mask over the first dims puts the same values at each place; how many others it would take depends on data."""
    mask = indices[0] if len(indices) == 1 else None
    if mask is None or (values.numel() != 1 and values.dim() > x.dim() - mask.dim()):
        raise NotImplementedError("the number of places of a mask depends on data")
    mask = mask.reshape([*mask.shape, *[1] * (x.dim() - mask.dim())])
    value = (values.reshape([]) if values.numel() == 1 else values).to(x.dtype)
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


def index_fill(x: Tensor, dim: int, at: Tensor, value: Tensor | float) -> Tensor:
    """Return x with a value in the slices of a dim that `at` lists, each once however often it is listed."""
    if x.dim() == 0:
        return index_fill(x.unsqueeze(0), 0, at, value).squeeze(0)
    size = x.shape[dim]
    places = torch.where(at < 0, at + size, at).flatten()
    listed = (torch.arange(size, device=x.device).unsqueeze(1) == places).any(1)
    mask = listed.view([-1 if place == dim % x.dim() else 1 for place in range(x.dim())])
    return torch.where(mask, value.to(x.dtype), x) if isinstance(value, Tensor) else x.masked_fill(mask, value)


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


def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return the softmax, 0 in rows that are all -inf."""
    wide = x if dtype is None else x.to(dtype)
    empty = (wide == -math.inf).all(dim, keepdim=True)
    return torch.softmax(wide.masked_fill(empty, 0.0), dim).masked_fill(empty, 0.0)


def matrix_power(x: Tensor, n: int) -> Tensor:
    """Return x [..., m, m] to an integer power, by squaring."""
    if n == 0:
        return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand(x.shape).clone()
    square, power, result = (torch.linalg.inv(x) if n < 0 else x), abs(n), None
    while power:
        if power % 2:
            result = square if result is None else torch.matmul(result, square)
        power //= 2
        square = torch.matmul(square, square) if power else square
    return square.clone() if result is None else result.clone()


def tensorinv(x: Tensor, ind: int = 2) -> Tensor:
    """Return the inverse of x as a map from its last dims to its first `ind`."""
    size = math.prod(x.shape[:ind])
    return torch.linalg.inv(x.reshape([size, size])).reshape([*x.shape[ind:], *x.shape[:ind]])


def tensorsolve(a: Tensor, b: Tensor, dims: Sequence[int] | None = None) -> Tensor:
    """Return x with tensordot(a, x, x.dim()) == b; `dims` of a are moved to its end first."""
    if dims is not None:
        moved = [dim % a.dim() for dim in dims]
        a = a.permute([*(dim for dim in range(a.dim()) if dim not in moved), *moved])
    rest = a.shape[b.dim() :]
    return torch.linalg.solve(a.reshape([b.numel(), math.prod(rest)]), b.reshape([b.numel()])).reshape(rest)


def bilinear(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a [..., i], b [..., j] and weight [o, i, j] combined to [..., o]."""
    out, left, right = weight.shape
    y = torch.matmul(a, weight.permute(1, 0, 2).reshape(left, out * right)).unflatten(-1, [out, right])
    y = (y * b.unsqueeze(-2)).sum(-1)
    return y if bias is None else y + bias
