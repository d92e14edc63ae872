"""What one rank of torch.distributed really holds in a step: the distributed runtime over groups that answer at once and send nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from partir.program import Program, Slot
from partir.runtime.distributed import DistributedProgram
from partir.runtime.failures import Failures
from partir.runtime.groups import Groups
from partir.runtime.torch_dtensor import dist, local_of, make_dtensor
from partir.runtime.transport import Transport

CPU = torch.device("cpu")


class _Never:
    """Failures of which there are none."""

    call = 1

    def wait(self, work: Any, text: str, **_: Any) -> None:
        work.wait()

    def report(self, text: str) -> None:
        raise AssertionError(text)

    def check(self) -> None:
        """Nobody has stopped."""

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        yield


@contextmanager
def world_of_one_rank(size: int) -> Iterator[None]:
    """Pretend that this process is rank 0 of ``size``; what is received is whatever memory held."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", "Set timeout is now only supported")
            yield
    finally:
        dist.destroy_process_group()


def step_bytes(program: Program) -> int:
    """Return the most bytes that live storages of rank 0 take in a forward and a backward, its parameters and buffers among them."""
    return _most_bytes(program, _backward)


def evaluation_bytes(program: Program) -> int:
    """Return the most bytes that live storages of rank 0 take in a call without gradients; see `step_bytes`."""
    with torch.no_grad():
        return _most_bytes(program, lambda program, outputs: None)


def _backward(program: Program, outputs: Sequence[Tensor]) -> None:
    loss = next(o for o, slot in zip(outputs, program.outputs) if slot.differentiable)
    local_of(loss).backward(torch.ones_like(local_of(loss)))


def _most_bytes(program: Program, then: Callable[[Program, Sequence[Tensor]], None]) -> int:
    with world_of_one_rank(program.mesh.size):
        groups = Groups(program.mesh, CPU)
        runs = DistributedProgram(program, groups, Transport(0, CPU, cast(Failures, _Never())))
        given = [_given(slot, runs, groups) for slot in program.inputs]
        tracker = MemTracker()
        tracker.track_external(*(local_of(t) for t, slot in zip(given, program.inputs) if slot.kind in ("parameter", "buffer")))
        with tracker:
            then(program, runs(*given))
        return max(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())


def _given(slot: Slot, runs: DistributedProgram, groups: Groups) -> Tensor:
    if slot.kind != "parameter":
        return torch.zeros(slot.shape, dtype=slot.dtype)
    spec = runs._spec(slot, groups)  # pyright: ignore[reportPrivateUsage]
    return make_dtensor(torch.zeros(slot.local_shape(runs.mesh), dtype=slot.dtype), spec).requires_grad_()
