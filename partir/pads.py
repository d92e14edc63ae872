"""Pads: a sub-dim that no axis divides is computed with copies of its last part behind it.

    50257 tokens on y=4    ->  50260, and every rank holds 12565
    (3*6*5) on y=4         ->  (3*8*5): in each third two more heads, copies of the sixth

Copies, not zeros: whatever an op does to real elements is fine for their copies too, so that no pad ever turns into an infinity
or a NaN. A pad never reaches a result: sums mask it (and so its cotangent is exactly zero), maxima do not see copies, and
ops that need a dim whole get it without its pad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

PAD_RULES = frozenset({"partir_local.pad_dim.default", "partir_local.unpad_dim.default"})


@dataclass(frozen=True)
class Pad:
    """A padded sub-dim of a dim.

    Args:
        block: how many elements lie behind it in the dim, `(3*8*5)` has 5 behind its 8.
        size: without the pad.
        padded: with it.
    """

    block: int
    size: int
    padded: int

    def __str__(self) -> str:
        return f"{self.size} padded to {self.padded}"


Pads = tuple[Pad, ...]


def natural_size(size: int, pads: Iterable[Pad]) -> int:
    """Return the size of a dim without its pads."""
    for pad in pads:
        size = size // pad.padded * pad.size
    return size


def natural_index(index: Tensor, pads: Pads) -> Tensor:
    """Return where each element of a padded dim stands in the dim without pads; a copy stands where its original does.

    >>> natural_index(torch.arange(8), (Pad(2, 3, 4),)).tolist()
    [0, 1, 2, 3, 4, 5, 4, 5]
    """
    scale_size, scale_padded = 1, 1
    for pad in sorted(pads, key=lambda pad: pad.block):
        block = pad.block * scale_size // scale_padded
        low, place, high = index % block, index // block % pad.padded, index // (block * pad.padded)
        index = (high * pad.size + place.clamp(max=pad.size - 1)) * block + low
        scale_size, scale_padded = scale_size * pad.size, scale_padded * pad.padded
    return index


def is_real(index: Tensor, pads: Pads) -> Tensor:
    """Return which elements of a padded dim are no copies."""
    real = torch.ones_like(index, dtype=torch.bool)
    for pad in pads:
        real = real & (index // pad.block % pad.padded < pad.size)
    return real


def pad_dim(x: Tensor, dim: int, padded: int) -> Tensor:
    """Return `x` with copies of its last part along `dim`, until that has `padded` elements."""
    size = x.shape[dim]
    copies = [1] * x.dim()
    copies[dim] = padded - size
    return torch.cat([x, x.narrow(dim, size - 1, 1).repeat(copies)], dim)


def unpad_dim(x: Tensor, dim: int, size: int) -> Tensor:
    """Return the first `size` parts of `x` along `dim`."""
    return torch.ops.aten.slice.Tensor(x, dim, 0, size)


def mask_pads(x: Tensor, dim: int, block: int, size: int, padded: int) -> Tensor:
    """Return `x`, whole along `dim`, with zeros in a pad; on blocks it is `local_ops.mask_pads`."""
    return zero_pads(x, dim, torch.arange(x.shape[dim], device=x.device), (Pad(block, size, padded),))


def zero_pads(x: Tensor, dim: int, index: Tensor, pads: Pads) -> Tensor:
    """Return `x` with zeros where its elements along `dim`, which stand at `index` in the padded dim, are copies."""
    shape = [1] * x.dim()
    shape[dim] = -1
    return x.masked_fill(~is_real(index, pads).view(shape), 0)


def cut(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the leading part of `x`: a whole tensor without the pads behind its dims."""
    for dim, size in enumerate(shape):
        x = x.narrow(dim, 0, size) if x.shape[dim] != size else x
    return x


def extend(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `x` with zeros behind its dims up to `shape`: the cotangent of `cut`."""
    if tuple(x.shape) == tuple(shape):
        return x
    widths = [width for size, wanted in zip(reversed(x.shape), reversed(shape)) for width in (0, wanted - size)]
    return torch.nn.functional.pad(x, widths)


_LIBRARY = cast(Any, torch.library).Library("partir_local", "FRAGMENT")
_OPS: dict[str, Callable[..., Tensor]] = {
    "pad_dim(Tensor x, int dim, int padded) -> Tensor": pad_dim,
    "unpad_dim(Tensor x, int dim, int size) -> Tensor": unpad_dim,
    "mask_pads(Tensor x, int dim, int block, int size, int padded) -> Tensor": mask_pads,
}
for _schema, _function in _OPS.items():
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.partition("(")[0], _function, "CompositeImplicitAutograd")
