"""Collectives as pure functions on the blocks of one group, in group order: all ranks in one process.

Sums run in group order and once for the whole group, so results are bitwise equal on all ranks. A
result that is the same on every rank is ONE tensor, listed once per rank: programs are functional.
The local formulas at the end take one rank's tensor, its index in the group and the group's size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partir.collectives import addressing
from partir.collectives.addressing import split_axes
from partir.mesh import Mesh


def _total(blocks: Sequence[Tensor]) -> Tensor:
    total = blocks[0].clone(memory_format=torch.contiguous_format)
    for block in blocks[1:]:
        total += block
    return total


def all_gather(blocks: Sequence[Tensor], dim: int, num_blocks: int = 1) -> list[Tensor]:
    """Join the blocks of a group along `dim`: `[.., n, ..] -> [.., size*n, ..]`.

    >>> all_gather([torch.tensor([1]), torch.tensor([2])], dim=0)[1]
    tensor([1, 2])
    """
    return [addressing.join(blocks, dim, num_blocks)] * len(blocks)


def reduce_scatter(blocks: Sequence[Tensor], dim: int, num_blocks: int = 1) -> list[Tensor]:
    """Add the blocks of a group and give each rank its chunk: `[.., size*n, ..] -> [.., n, ..]`.

    >>> reduce_scatter([torch.tensor([1, 2]), torch.tensor([10, 20])], dim=0)
    [tensor([11]), tensor([22])]
    """
    size = len(blocks)
    return [_total([addressing.take(block, dim, num_blocks, index, size) for block in blocks]) for index in range(size)]


def all_reduce(blocks: Sequence[Tensor], op: str = "sum") -> list[Tensor]:
    """Add the blocks of a group, or take their elementwise maximum.

    >>> all_reduce([torch.tensor([1, 5]), torch.tensor([3, 2])], op="max")[0]
    tensor([3, 5])
    """
    if op == "sum":
        return [_total(blocks)] * len(blocks)
    if op != "max":
        raise ValueError(f'all_reduce: op is "sum" or "max", got {op!r}')
    largest = blocks[0].clone(memory_format=torch.contiguous_format)
    for block in blocks[1:]:
        largest = torch.maximum(largest, block)
    return [largest] * len(blocks)


def all_to_all(blocks: Sequence[Tensor], src: int, dst: int, src_blocks: int = 1, dst_blocks: int = 1) -> list[Tensor]:
    """Gather dim `src` and split dim `dst`: `[n, size*m] -> [size*n, m]`.

    >>> all_to_all([torch.tensor([[1, 2]]), torch.tensor([[3, 4]])], src=0, dst=1)[1].tolist()
    [[2], [4]]
    """
    size = len(blocks)
    sent = [addressing.exchange_pieces(block, size, src, dst, src_blocks, dst_blocks) for block in blocks]
    return [
        addressing.exchange_join([pieces[index] for pieces in sent], src, dst, src_blocks, dst_blocks)
        for index in range(size)
    ]


def broadcast(blocks: Sequence[Tensor], root: int) -> list[Tensor]:
    """Give every rank the block of the group's rank `root`; only that block's values are read."""
    return [blocks[root].clone(memory_format=torch.contiguous_format)] * len(blocks)


def reduce_to(blocks: Sequence[Tensor], root: int) -> list[Tensor]:
    """Add the blocks of a group on its rank `root`; the others get `empty_block`."""
    total = _total(blocks)
    return [total if index == root else empty_block(total) for index in range(len(blocks))]


def all_gather_bucket(blocks: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Gather each tensor of a bucket on dim 0: `blocks[rank][tensor] -> results[rank][tensor]`."""
    gathered = [all_gather(list(ts), 0)[0] for ts in zip(*blocks, strict=True)]
    return [list(gathered) for _ in blocks]


def reduce_scatter_bucket(blocks: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Reduce-scatter each tensor of a bucket on dim 0: `blocks[rank][tensor] -> results[rank][tensor]`."""
    scattered = [reduce_scatter(list(ts), 0) for ts in zip(*blocks, strict=True)]
    return [list(ts) for ts in zip(*scattered, strict=True)]


def empty_block(t: Tensor) -> Tensor:
    """Make a non-owner's block: zeros of the shape of `t` over one element of storage."""
    return t.new_zeros(()).expand(t.shape)


def slice(t: Tensor, index: int, size: int, dim: int, num_blocks: int = 1) -> Tensor:
    """Take this rank's chunk of a tensor that is whole: `[.., size*n, ..] -> [.., n, ..]`."""
    return addressing.take(t, dim, num_blocks, index, size)


def zero_pad(t: Tensor, index: int, size: int, dim: int, num_blocks: int = 1) -> Tensor:
    """Put this rank's chunk in its place, zeros elsewhere: `[.., n, ..] -> [.., size*n, ..]`."""
    return addressing.put(t, dim, num_blocks, index, size)


def spread(t: Tensor, index: int, size: int) -> Tensor:
    """Copy: the gradient of the result is a pending sum."""
    return t.clone(memory_format=torch.contiguous_format)


def settle(t: Tensor, index: int, size: int) -> Tensor:
    """Copy: the gradient of the result is the same on all ranks."""
    return t.clone(memory_format=torch.contiguous_format)


def once(t: Tensor, index: int, size: int) -> Tensor:
    """Keep the value on the group's first rank, zeros on the others."""
    if index == 0:
        return t.clone(memory_format=torch.contiguous_format)
    return torch.zeros_like(t, memory_format=torch.contiguous_format)


def coordinate(index: int, device: torch.device | str = "cpu") -> Tensor:
    """Give a rank's index in its group as an int64 0-d tensor."""
    return torch.tensor(index, dtype=torch.int64, device=device)


COLLECTIVES: dict[str, Any] = {
    "all_gather": all_gather,
    "all_gather_same": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "reduce_to": reduce_to,
    "all_gather_bucket": all_gather_bucket,
    "reduce_scatter_bucket": reduce_scatter_bucket,
}
LOCAL: dict[str, Any] = {"slice": slice, "zero_pad": zero_pad, "spread": spread, "settle": settle, "once": once}


def run(name: str, operands: Sequence[Any], mesh: Mesh, /, axis: str, **args: Any) -> list[Any]:
    """Run a collective on every rank of a mesh at once.

    Args:
        name: of the collective, `coordinate` excepted.
        operands: one a rank, in rank order; for a bucket one list of tensors a rank.
        axis: as the op takes it, `"y"` or `"z.x"`.
        args: the op's other arguments, by name.

    >>> run("all_reduce", [torch.tensor(1), torch.tensor(2)], Mesh.parse((2, 1, 1)), "x")
    [tensor(3), tensor(3)]
    """
    axes = split_axes(axis)
    args.pop("varied", None)
    if "blocks" in args:
        args["num_blocks"] = args.pop("blocks")
    if name in LOCAL:
        size = mesh.extent(axes)
        return [LOCAL[name](block, mesh.index(rank, axes), size, **args) for rank, block in enumerate(operands)]
    results: list[Any] = [None] * len(operands)
    for group in mesh.groups(axes):
        # The group's root is the rank along it whose coordinate equals the group's own on axis `root`.
        root = {"root": mesh.index(group[0], (args["root"],))} if "root" in args else {}
        group_results = COLLECTIVES[name]([operands[rank] for rank in group], **{**args, **root})
        for rank, result in zip(group, group_results, strict=True):
            results[rank] = result
    return results
