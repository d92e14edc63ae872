"""What one rank does in a step: bytes received and memory held, measured the same way for every system."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

COSTS: dict[str, Callable[[int, int], float]] = {
    "all_gather": lambda num_bytes, ranks: (ranks - 1) * num_bytes,
    "reduce_scatter": lambda num_bytes, ranks: (ranks - 1) * num_bytes / ranks,
    "all_reduce": lambda num_bytes, ranks: 2 * (ranks - 1) * num_bytes / ranks,
    "all_to_all": lambda num_bytes, ranks: (ranks - 1) * num_bytes / ranks,
    "broadcast": lambda num_bytes, ranks: num_bytes,
    "receive": lambda num_bytes, ranks: num_bytes,
}
"""Bytes that a rank receives in a ring, given the bytes that it passes in and the number of ranks."""

COLLECTIVES: dict[str, tuple[str, int]] = {
    "c10d._allgather_base_": ("all_gather", 1),
    "c10d.allgather_": ("all_gather", 1),
    "c10d.allgather_into_tensor_coalesced_": ("all_gather", 1),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d.reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d.allreduce_": ("all_reduce", 0),
    "c10d.allreduce_coalesced_": ("all_reduce", 0),
    "c10d.alltoall_base_": ("all_to_all", 1),
    "c10d.broadcast_": ("broadcast", 0),
    "c10d.recv_": ("receive", 0),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional.all_gather_into_tensor_out": ("all_gather", 0),
    "_c10d_functional.all_gather_into_tensor_coalesced": ("all_gather", 0),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional.reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "_c10d_functional.reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional.all_reduce": ("all_reduce", 0),
    "_c10d_functional.all_reduce_": ("all_reduce", 0),
    "_c10d_functional.all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional.all_to_all_single": ("all_to_all", 0),
    "_c10d_functional.broadcast": ("broadcast", 0),
    "_dtensor.shard_dim_alltoall": ("all_to_all", 0),
}
"""Operation -> its kind, and which argument holds what the rank passes in."""

SILENT = {"c10d.barrier", "c10d.check_for_nan", "c10d.send"}
SILENT |= {f"_c10d_functional.{name}" for name in ("wait_tensor", "_wrap_tensor_autograd")}
SILENT |= {"_dtensor.mesh_get_process_group"}


def tensor_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(tensor_bytes(item) for item in value)


def group_size(args: tuple[Any, ...]) -> int:
    """Find the process group among an operation's arguments: boxed, plain, or (the last string) by name."""
    names: list[Any] = [arg for arg in args if isinstance(arg, str)]
    for arg in args:
        if isinstance(arg, dist.ProcessGroup):
            return arg.size()
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg):
            return dist.ProcessGroup.unbox(arg).size()
    return _resolve_process_group(names[-1]).size()


class CountBytes(TorchDispatchMode):
    """Count the bytes that this rank's collectives receive; an unknown one is an error, never zero."""

    def __init__(self) -> None:
        super().__init__()
        self.received = 0.0
        self.num_collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor goes first; the collectives it calls come back here
        name = str(getattr(func, "overloadpacket", func))
        if name in COLLECTIVES:
            kind, position = COLLECTIVES[name]
            self.received += COSTS[kind](tensor_bytes(args[position]), group_size(args))
            self.num_collectives += 1
        elif name.startswith(("c10d.", "_c10d_functional.", "_dtensor.")) and name not in SILENT:
            raise NotImplementedError(f"the bytes of {name} are not known to this benchmark")
        return func(*args, **(kwargs or {}))


MEASURED = "measured step"


def peak_bytes(prepare: Callable[[], Callable[[], object]]) -> int:
    """Return the most bytes of torch's CPU allocator alive during the step that `prepare` makes ready.

    Counted are the tensors that `prepare` and the step allocate themselves, whether Python or C++ holds them:
    parameters, gradients, optimizer state, buckets, saved and temporary values. Not RSS.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step = prepare()
        gc.collect()
        with record_function(MEASURED):
            step()
    return _peak(trace)


def _peak(trace: profile) -> int:
    profiler = trace.profiler
    assert profiler is not None and profiler.kineto_results is not None
    events: list[Any] = profiler.kineto_results.events()
    (start,) = (event.start_ns() for event in events if event.name() == MEASURED)
    alive = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        alive += event.nbytes()
        if event.start_ns() >= start:
            peak = max(peak, alive)
    return peak
