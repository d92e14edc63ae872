"""Measure ways to do a collective on gloo: the table of runtime/transport.py.

    python benchmarks/gloo_collectives.py
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor

NUM_RANKS = 8
SIZES = (64, 4096, 65536, 2**20, 2**22)
dist: Any = cast(Any, torch.distributed)


def gather(t: Tensor, group: Any) -> None:
    dist.all_gather_into_tensor(t.new_empty(group.size() * t.numel()), t, group=group)


def gather_by_exchange(t: Tensor, group: Any) -> None:
    dist.all_to_all_single(t.new_empty(group.size() * t.numel()), t.expand(group.size(), -1).reshape(-1), group=group)


def gather_by_messages(t: Tensor, group: Any) -> None:
    size, me = group.size(), group.rank()
    rows = t.new_empty((size, t.numel()))
    works = [group.recv([rows[(me - n) % size]], (me - n) % size, 0) for n in range(1, size)]
    works += [group.send([t], (me + n) % size, 0) for n in range(1, size)]
    rows[me] = t
    for work in works:
        work.wait()


def scatter(t: Tensor, group: Any) -> None:
    dist.reduce_scatter_tensor(t.clone(), t.repeat(group.size()), group=group)


def scatter_by_exchange(t: Tensor, group: Any) -> Tensor:
    rows = t.new_empty((group.size(), t.numel()))
    dist.all_to_all_single(rows.view(-1), t.repeat(group.size()), group=group)
    return rows.sum(0)


def reduce(t: Tensor, group: Any) -> None:
    dist.all_reduce(t.clone(), group=group)


def reduce_by_chunks(t: Tensor, group: Any) -> None:
    gather_by_exchange(scatter_by_exchange(t[: t.numel() // group.size()], group), group)


WAYS: list[Callable[[Tensor, Any], Any]] = [
    gather,
    gather_by_exchange,
    gather_by_messages,
    scatter,
    scatter_by_exchange,
    reduce,
    reduce_by_chunks,
]


def milliseconds(way: Callable[[], Any], repeats: int) -> float:
    """Return the mean time of one call, all ranks together."""
    way()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        way()
    dist.barrier()
    return (time.perf_counter() - start) / repeats * 1e3


def measure(rank: int) -> None:
    """Print one row for each group size and message size."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611")
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    for size in (2, 4, 8):
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, NUM_RANKS, size)]
        for num_bytes in SIZES:
            t = torch.randn(num_bytes // 4)
            times = [milliseconds(partial(way, t, groups[rank // size]), 10 if num_bytes <= 65536 else 4) for way in WAYS]
            if rank == 0:
                shown = "  ".join(f"{way.__name__} {value:.1f}" for way, value in zip(WAYS, times))
                print(f"group {size}, {num_bytes} bytes, ms: {shown}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    cast(Any, torch.multiprocessing).spawn(measure, nprocs=NUM_RANKS)
