"""Address one part of a product dim: a dim of local size `blocks * n` is viewed as `[blocks, n]`.

A collective acts on the `n` level, so a part inside a product dim is gathered or scattered without
permuting anything else. Every function returns new, contiguous memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def split_axes(axis: str) -> tuple[str, ...]:
    """Split the text of a group's axes, major to minor.

    >>> split_axes("z.x")
    ('z', 'x')
    """
    return tuple(axis.split("."))


def _levels(t: Tensor, dim: int, *sizes: int) -> Tensor:
    """View one dim as several; splitting a dim never copies."""
    return t.view(*t.shape[:dim], *sizes, *t.shape[dim + 1 :])


def take(t: Tensor, dim: int, blocks: int, index: int, size: int) -> Tensor:
    """Copy chunk `index` of `size`: `[.., blocks*size*n, ..] -> [.., blocks*n, ..]`.

    >>> take(torch.arange(8), dim=0, blocks=2, index=1, size=2)
    tensor([2, 3, 6, 7])
    """
    dim = dim % t.dim()
    whole = _levels(t, dim, blocks, size, t.shape[dim] // (blocks * size))
    return whole.select(dim + 1, index).flatten(dim, dim + 1).clone(memory_format=torch.contiguous_format)


def put(t: Tensor, dim: int, blocks: int, index: int, size: int) -> Tensor:
    """Place `t` as chunk `index` of `size`, zeros elsewhere: the adjoint of `take`.

    >>> put(torch.tensor([2, 3, 6, 7]), dim=0, blocks=2, index=1, size=2)
    tensor([0, 0, 2, 3, 0, 0, 6, 7])
    """
    dim = dim % t.dim()
    shape = list(t.shape)
    shape[dim] *= size
    whole = t.new_zeros(shape)
    length = t.shape[dim] // blocks
    _levels(whole, dim, blocks, size, length).select(dim + 1, index).copy_(_levels(t, dim, blocks, length))
    return whole


def join(parts: Sequence[Tensor], dim: int, blocks: int) -> Tensor:
    """Join the chunks of all ranks: `size` times `[.., blocks*n, ..] -> [.., blocks*size*n, ..]`.

    >>> join([torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])], dim=0, blocks=2)
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    if blocks == 1:
        return torch.cat(list(parts), dim).contiguous()
    dim = dim % parts[0].dim()
    length = parts[0].shape[dim] // blocks
    return torch.cat([_levels(part, dim, blocks, length) for part in parts], dim + 1).flatten(dim, dim + 1).contiguous()


def exchange_blocks(size: int, same_dim: bool, src_blocks: int, dst_blocks: int) -> tuple[int, int] | None:
    """Return the block counts `(cut, join)` of an all-to-all's two local halves, or None if its ends overlap.

    `dst_blocks` counts the dim as it is once `src` is gathered, `src_blocks` as it is before `dst` is split.
    Within one dim the part that comes first counts among the blocks of the other.

    >>> exchange_blocks(2, True, src_blocks=1, dst_blocks=4), exchange_blocks(2, True, src_blocks=1, dst_blocks=1)
    ((2, 1), None)
    """
    if not same_dim or size == 1:
        return dst_blocks, src_blocks
    if dst_blocks % (src_blocks * size) == 0:
        return dst_blocks // size, src_blocks
    if src_blocks % (dst_blocks * size) == 0:
        return dst_blocks, src_blocks // size
    return None


def exchange_pieces(t: Tensor, size: int, src: int, dst: int, src_blocks: int, dst_blocks: int) -> list[Tensor]:
    """Cut what an all-to-all sends: piece `i` goes to the group's rank `i`."""
    counts = exchange_blocks(size, src % t.dim() == dst % t.dim(), src_blocks, dst_blocks)
    assert counts is not None, f"all_to_all within dim {src}: {src_blocks=} and {dst_blocks=} overlap"
    return [take(t, dst, counts[0], index, size) for index in range(size)]


def exchange_join(pieces: Sequence[Tensor], src: int, dst: int, src_blocks: int, dst_blocks: int) -> Tensor:
    """Join what an all-to-all received, in group order: the other half of `exchange_pieces`."""
    ndim = pieces[0].dim()
    counts = exchange_blocks(len(pieces), src % ndim == dst % ndim, src_blocks, dst_blocks)
    assert counts is not None, f"all_to_all within dim {src}: {src_blocks=} and {dst_blocks=} overlap"
    return join(pieces, src, counts[1])


def pack(ts: Sequence[Tensor], rows: int) -> Tensor:
    """Lay several tensors out as one message of `rows` equal rows, flat: `[rows * sum of numel / rows]`."""
    return torch.cat([t.reshape(rows, t.numel() // rows) for t in ts], 1).flatten()


def unpack(flat: Tensor, shapes: Sequence[Sequence[int]], rows: int) -> list[Tensor]:
    """Undo `pack`: cut `rows` rows into one tensor per shape."""
    lengths = [torch.Size(shape).numel() // rows for shape in shapes]
    columns = torch.split(flat.reshape(rows, sum(lengths)), lengths, 1)
    return [
        c.reshape(tuple(shape)).clone(memory_format=torch.contiguous_format)
        for c, shape in zip(columns, shapes, strict=True)
    ]
