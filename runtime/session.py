"""What one rank keeps for all its programs: groups, transport, agreement, parameters."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from partir.errors import MeshError
from partir.layout import Layout
from partir.mesh import Mesh
from partir.non_finite import Held
from partir.program import Program
from partir.random_numbers import as_int64
from partir.runtime.agree import Agreed, Agreement, content_hash
from partir.runtime.distributed import DistributedProgram
from partir.runtime.failures import Failures
from partir.runtime.groups import Groups
from partir.runtime.parameters import Parameters
from partir.runtime.torch_dtensor import dist, local_of
from partir.runtime.transport import Transport


def is_distributed(mesh: Mesh) -> bool:
    """Return whether this process is one rank of the mesh (True), or runs all of them (False).

    Raises:
        MeshError: the world size is neither 1 nor the mesh's.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return False
    world = dist.get_world_size()
    if world not in (1, mesh.size):
        raise MeshError(
            f"world size {world} does not fit mesh {mesh} of {mesh.size} ranks: start {mesh.size} processes, or one to simulate."
        )
    return world == mesh.size


def device_of(model: nn.Module) -> torch.device:
    """Return the device that this rank runs on: `cuda:LOCAL_RANK` under nccl, else where the model is."""
    if torch.cuda.is_available() and "nccl" in str(dist.get_backend_config()):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    tensor: Tensor | None = next(iter([*model.parameters(), *model.buffers()]), None)
    return torch.device("cpu") if tensor is None or tensor.is_meta else tensor.device


def _block_number(t: DTensor) -> int:
    """Return which block of a DTensor this rank holds, counted row-major over the dims of its mesh that split it."""
    number = 0
    for place, size, placement in zip(t.device_mesh.get_coordinate() or (), t.device_mesh.shape, t.placements):
        number = number * size + place if placement.is_shard() else number
    return number


# Every rank makes its sessions in the same order, so the number is the same on all of them.
_sessions = itertools.count()


class Session:
    """One rank of a mesh. Every rank makes it at the same time.

    Args:
        mesh: the ranks.
        device: where this one runs.
        timeout: the longest wait; by default that of `init_process_group`.
    """

    def __init__(self, mesh: Mesh, device: torch.device, timeout: timedelta | None) -> None:
        self.mesh = mesh
        self.device = device
        self.groups = Groups(mesh, device, timeout)
        name = f"session {next(_sessions)}"
        self.failures = Failures(self.groups.rank, mesh.size, self.groups.timeout, self.groups.hang_up, name)
        self.transport = Transport(self.groups.rank, device, self.failures)
        self._meet()
        with self.failures.told("the making of the first process group"):
            self.agreement = Agreement(self.groups, Transport(self.groups.rank, torch.device("cpu"), self.failures))
        self.parameters = Parameters(mesh, self.groups)

    def checkpoint_group(self) -> Any:
        """Return the group of all ranks in which checkpoints are written, perhaps by a thread: none but they send in it.

        Raises:
            RankError: other ranks do something else meanwhile: a rank that made the group alone would wait for them.
        """
        self.agreement.compare("the saving of a checkpoint", "every rank has a part in it")
        group = self.groups.control("checkpoints")
        return group.process_group if group.size > 1 else None

    def _meet(self) -> None:
        """Wait until every rank is here: scripts may come long after one another, but nobody must wait for a dead one.

        A store tells nobody that a process died, a connection does: the default group's, where it has one on the CPU.
        """
        if self.mesh.size > 1 and "gloo" in str(dist.get_backend_config()):
            work = dist.all_reduce(torch.zeros(1), async_op=True)
            self.failures.wait(work, "the meeting of the ranks, before call 1", on_cpu=True, direct=False)

    def distribute(self, model: nn.Module, description: str) -> None:
        """Check that every rank parallelizes the same model in the same way, and give all of them rank 0's values."""
        named = [*model.named_parameters(), *model.named_buffers()]
        shapes = ", ".join(f"{name} {t.dtype} {list(t.shape)}" for name, t in named)
        self.agreement.compare("the model to parallelize", f"{description}; {shapes}")
        with self.failures.told("the broadcast of parameters"):
            self.parameters.distribute(model)

    def agree_on_call(self, signature: str, ready: bool, seed: int, calls: int) -> Agreed:
        """Compare the signature of a call after `calls` others; `ready` says that this rank has its program."""
        self.failures.check()
        self.failures.call = calls + 1
        return self.agreement.compare("the signature of a call", signature, ready=ready, seed=seed, calls=calls)

    def agree_on_contents(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        """Compare what the inputs hold."""
        hashes = ", ".join(f"{name} {list(t.shape)} hash {content_hash([t])}" for name, t in zip(names, tensors))
        self.agreement.compare("the contents of the inputs", hashes)

    def look_at_nodes(self, program: DistributedProgram, tensors: Sequence[Tensor]) -> dict[str, list[Held | None]]:
        """Run a forward again and return what each value held on each rank."""
        self.agreement.compare("whether the loss is finite", "it is not")
        mine = program.look_at_nodes(tensors)
        ranks = self.agreement.exchange(mine)
        return {name: [seen.get(name) for seen in ranks] for name in mine}

    def agree_on_blocks(self, named: Sequence[tuple[str, DTensor]]) -> None:
        """Compare what inputs given as blocks hold, among ranks that hold the same block."""
        blocks = [(_block_number(t), local_of(t)) for _, t in named]
        self.agreement.compare_blocks([name for name, _ in named], blocks)

    def bind(self, program: Program) -> DistributedProgram:
        """Return a program ready to run; every rank binds the same one."""
        text = "\n".join([*map(str, program.inputs), *map(str, program.outputs), program.forward.code])
        text += program.backward.code if program.backward is not None else ""
        self.agreement.compare("the compiled program", text)
        with self.failures.told("the making of process groups"):
            return DistributedProgram(program, self.groups, self.transport)

    def agree_on_constants(self, constants: Mapping[str, Tensor]) -> None:
        """Compare tensors that a model holds as plain attributes: nobody sends them, as parameters and buffers are sent."""
        hashes = ", ".join(f"{name} {list(t.shape)} hash {content_hash([t])}" for name, t in constants.items())
        self.agreement.compare("a tensor that is an attribute of the model, and no buffer,", hashes)

    def seed(self) -> int:
        """Return rank 0's seed."""
        return self.agreement.compare("the seed of the first values", "", seed=as_int64(torch.initial_seed())).seed

    def lay(self, named: Sequence[tuple[nn.Parameter, Layout]]) -> None:
        """Give parameters the layouts of a program, in place."""
        with self.failures.told("the first layout of parameters"):
            for parameter, layout in named:
                self.parameters.lay(parameter, layout)
