"""Run a program on every rank of its mesh in this process, as one differentiable function of whole tensors.

    whole inputs -> blocks -> forward on all ranks -> blocks -> whole outputs
    whole tangents -> blocks -> backward on all ranks -> blocks -> whole gradients

The blocks are real, so this is exactly the program that torch.distributed would run; only its collectives are cat and
sum here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from partir.blocks import gather, shard
from partir.errors import PartirError, VerifyError
from partir.layout import Layout
from partir.mesh import Mesh
from partir.non_finite import Held, held
from partir.pads import cut, extend
from partir.program import Program, Slot
from partir.runtime.derivatives import first_derivative_only
from partir.runtime.lockstep_collectives import Column
from partir.runtime.run_lockstep import LockstepGraph


@dataclass(frozen=True)
class RunBlocks:
    """Every rank's blocks in one run of the forward: a list by rank for each name.

    Args:
        inputs: by input slot.
        outputs: by output slot.
        saved: what the forward keeps for the backward, by its name in the graph; inputs among it are the input blocks.
    """

    inputs: Mapping[str, Column]
    outputs: Mapping[str, Column]
    saved: Mapping[str, Column]

    def saved_bytes(self, rank: int) -> dict[str, int]:
        """Return the bytes of storage that each saved value keeps alive on a rank, inputs and repeats not counted."""
        seen = {column[rank].untyped_storage().data_ptr() for column in self.inputs.values()}
        sizes: dict[str, int] = {}
        for name, column in self.saved.items():
            storage = column[rank].untyped_storage()
            if storage.data_ptr() not in seen:
                sizes[name] = storage.nbytes()
                seen.add(storage.data_ptr())
        return sizes


class SimulatedProgram:
    """A program whose ranks all run here.

    Args:
        program: what each rank runs.
        check_ranks: raise where ranks that must hold the same output hold different bits (tests and ``partir.verify``).
    """

    def __init__(self, program: Program, check_ranks: bool = False) -> None:
        self.program = program
        self.check_ranks = check_ranks
        mesh, backward = program.mesh, program.backward
        self._forward = LockstepGraph(program.forward, mesh, "forward")
        self._backward = None if backward is None else LockstepGraph(backward, mesh, "backward")
        results = cast("tuple[Any, ...]", program.forward.graph.output_node().args[0])
        self.saved_names = tuple(str(node) for node in results[program.num_outputs :])

    def __call__(self, *wholes: Tensor) -> tuple[Tensor, ...]:
        """Return the whole outputs, one whole tensor given for each input slot; differentiable.

        Raises:
            PartirError: the number, a shape or a dtype of the inputs is not the program's.
        """
        self._check_inputs(wholes)
        if self._backward is None or not torch.is_grad_enabled():
            with plain_execution(wholes):
                outputs, _ = self._run_forward(self._shard_inputs(wholes))
                return tuple(
                    self._assemble(slot, column) for slot, column in zip(self.program.outputs, outputs, strict=True)
                )
        apply = cast("Callable[..., tuple[Tensor, ...]]", _Run.apply)  # pyright: ignore[reportUnknownMemberType]
        return apply(self, *wholes)

    def run_blocks(self, *wholes: Tensor) -> RunBlocks:
        """Run the forward and return the blocks that each rank holds."""
        self._check_inputs(wholes)
        with plain_execution(wholes):
            inputs = self._shard_inputs(wholes)
            outputs, saved = self._run_forward(list(inputs))
        return RunBlocks(
            {slot.name: column for slot, column in zip(self.program.inputs, inputs, strict=True)},
            {slot.name: column for slot, column in zip(self.program.outputs, outputs, strict=True)},
            dict(zip(self.saved_names, saved, strict=True)),
        )

    def look_at_nodes(self, *wholes: Tensor) -> dict[str, list[Held | None]]:
        """Run the forward and return what each value holds on each rank."""
        seen: dict[str, list[Held | None]] = {}

        def look(name: str, column: Column) -> None:
            seen[name] = [held(value) for value in column]

        with plain_execution(wholes):
            self._forward.run(self._shard_inputs(wholes), look)
        return seen

    def gradient_blocks(self, saved: Sequence[Column], tangents: Sequence[Tensor]) -> dict[str, Column]:
        """Run the backward and return each differentiable input's gradient, a block a rank.

        Args:
            saved: columns, as ``run_blocks(...).saved.values()``.
            tangents: whole tensors, one for each of ``program.tangents()``.
        """
        with plain_execution(tangents):
            columns = self._run_backward(list(saved), tangents)
        named = zip(self.program.inputs, columns, strict=True)
        return {slot.name: column for slot, column in named if column is not None}

    def _check_inputs(self, wholes: Sequence[Tensor]) -> None:
        slots = self.program.inputs
        if len(wholes) != len(slots):
            raise PartirError(f"the program takes {len(slots)} tensors, {len(wholes)} were given.")
        for slot, whole in zip(slots, wholes, strict=True):
            if tuple(whole.shape) != slot.shape or whole.dtype != slot.dtype:
                raise PartirError(
                    f"{slot.name}: the program was compiled for {slot.dtype} {list(slot.shape)}, "
                    f"got {whole.dtype} {list(whole.shape)}."
                )

    def _shard_inputs(self, wholes: Sequence[Tensor]) -> list[Column]:
        mesh = self.program.mesh
        return [
            shard_all(whole.detach(), slot.layout, mesh)
            for whole, slot in zip(wholes, self.program.inputs, strict=True)
        ]

    def _run_forward(self, inputs: list[Column]) -> tuple[list[Column], list[Column]]:
        results = cast("list[Column]", self._forward.run(inputs))
        return results[: self.program.num_outputs], results[self.program.num_outputs :]

    def _run_backward(self, saved: list[Column], tangents: Sequence[Tensor]) -> list[Column | None]:
        assert self._backward is not None, "the program has no backward"
        mesh, slots = self.program.mesh, self.program.tangents()
        whole = [extend(tangent, slot.layout.shape) for tangent, slot in zip(tangents, slots, strict=True)]
        columns = [shard_all(tangent, slot.layout, mesh) for tangent, slot in zip(whole, slots, strict=True)]
        return self._backward.run([*saved, *columns])

    def _assemble(self, slot: Slot, column: Column) -> Tensor:
        if self.check_ranks:
            check_ranks_agree(slot, column, self.program.mesh)
        return cut(assemble(column, slot.layout, self.program.mesh), slot.shape)


class _Run(torch.autograd.Function):
    """One call of a program. Every unique block that is saved goes through ``save_for_backward``, which notices a
    parameter changed in place between forward and backward and frees the blocks after it."""

    @staticmethod
    def forward(ctx: Any, simulated: SimulatedProgram, *wholes: Tensor) -> tuple[Tensor, ...]:
        with plain_execution(wholes):
            outputs, saved = simulated._run_forward(simulated._shard_inputs(wholes))  # pyright: ignore[reportPrivateUsage]
            slots = simulated.program.outputs
            results = tuple(
                simulated._assemble(slot, column)  # pyright: ignore[reportPrivateUsage]
                for slot, column in zip(slots, outputs, strict=True)
            )
        unique, ctx.places = _unique(saved)
        ctx.save_for_backward(*unique)
        ctx.simulated = simulated
        ctx.results = [(tuple(result.shape), result.dtype, result.device) for result in results]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(r for r, slot in zip(results, slots, strict=True) if not slot.differentiable))
        return results

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        simulated = cast(SimulatedProgram, ctx.simulated)
        program, unique = simulated.program, ctx.saved_tensors
        saved = [[unique[place] for place in places] for places in ctx.places]
        known = zip(grads, ctx.results, program.outputs, strict=True)
        tangents = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            for grad, (shape, dtype, device), slot in known
            if slot.differentiable
        ]
        del unique
        with plain_execution(tangents):
            columns = simulated._run_backward(saved, tangents)  # pyright: ignore[reportPrivateUsage]
            needs = ctx.needs_input_grad[1:]
            gradients = tuple(
                assemble(column, slot.layout, program.mesh) if column is not None and need and slot.gets_gradient(grads) else None
                for column, slot, need in zip(columns, program.inputs, needs, strict=True)
            )
        return None, *gradients


def _unique(columns: Sequence[Column]) -> tuple[list[Tensor], list[list[int]]]:
    """Return the distinct tensors of some columns, and for each column where its ranks' tensors are among them."""
    places: dict[int, int] = {}
    unique: list[Tensor] = []
    for column in columns:
        for tensor in column:
            if places.setdefault(id(tensor), len(unique)) == len(unique):
                unique.append(tensor)
    return unique, [[places[id(tensor)] for tensor in column] for column in columns]


def shard_all(whole: Tensor, layout: Layout, mesh: Mesh) -> Column:
    """Return every rank's block of a whole tensor, contiguous, ranks with the same block sharing one tensor."""
    axes = tuple(axis for axis in mesh.names if axis in _axes_that_matter(layout))
    made: dict[int, Tensor] = {}
    column: Column = []
    for rank in range(mesh.size):
        place = mesh.index(rank, axes)
        if place not in made:
            made[place] = shard(whole, layout, mesh, rank).contiguous()
        column.append(made[place])
    return column


def _axes_that_matter(layout: Layout) -> tuple[str, ...]:
    return (*layout.split_axes, *(axis for axis, _ in layout.pending), *(layout.owner or ()))


def assemble(column: Column, layout: Layout, mesh: Mesh) -> Tensor:
    """Return the whole tensor of which every rank holds a block; new memory unless every rank holds all of it."""
    if not _axes_that_matter(layout):
        return cast(Tensor, column[0])
    return gather(cast("list[Tensor]", column), layout, mesh)


def check_ranks_agree(slot: Slot, column: Column, mesh: Mesh) -> None:
    """Check that ranks which must hold the same block hold the same bits.

    Raises:
        VerifyError: naming the value and two ranks that differ.
    """
    axes = _axes_that_matter(slot.layout)
    first: dict[int, int] = {}
    for rank in range(mesh.size):
        other = first.setdefault(mesh.index(rank, axes), rank)
        if column[rank] is column[other] or _same_bits(column[rank], column[other]):
            continue
        raise VerifyError(
            f"{slot.name}: layout {slot.layout} says that ranks {other} and {rank} of {mesh} hold the same block, "
            "and their bits differ. A pending sum was taken for a value, or a random number depends on the rank."
        )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


@contextmanager
def plain_execution(tensors: Sequence[Tensor]) -> Generator[None]:
    """Run a compiled graph as it is: without gradients, and without an autocast that is already in the graph."""
    device = tensors[0].device.type if tensors else "cpu"
    with torch.no_grad(), torch.autocast(device, enabled=False):
        yield
