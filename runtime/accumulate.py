"""Accumulate gradients over calls that share gathered weights: gather once, add up unreduced gradients, reduce once.

    gather (forward)   parameters -> what calls read of them, held between calls
    batch              held, inputs -> outputs; its backward adds to a sum for each held value, and reduces nothing
    gather (backward)  sums -> gradients of the parameters, added to `.grad` by autograd as any gradient

Memory: every held value and its sum, on each rank, from the first call to the end. Sums of 16-bit gradients are kept in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from partir.errors import PartirError
from partir.pads import extend
from partir.precision import is_half
from partir.program import Program, Slot
from partir.runtime.derivatives import first_derivative_only
from partir.runtime.distributed import DistributedProgram
from partir.runtime.simulated import SimulatedProgram, assemble, plain_execution, shard_all
from partir.runtime.torch_dtensor import spec_of

# A block on this rank; simulated, the blocks of all ranks.
Blocks = Any


class Runner(Protocol):
    """One of the two programs, run on blocks."""

    program: Program

    def shard(self, tensors: Sequence[Tensor], slots: Sequence[Slot]) -> list[Blocks]:
        """Return the blocks of whole tensors or DTensors."""
        ...

    def forward(self, blocks: Sequence[Blocks]) -> tuple[list[Blocks], list[Blocks]]:
        """Return outputs and what the backward needs."""
        ...

    def backward(self, saved: Sequence[Blocks], tangents: Sequence[Blocks]) -> list[Blocks | None]:
        """Return a gradient, or None, for each input."""
        ...

    def wrap(self, outputs: Sequence[Blocks]) -> list[Tensor]:
        """Return outputs as a user sees them."""
        ...

    def tangents(self, grads: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> list[Blocks]:
        """Return the blocks of cotangents of outputs."""
        ...

    def gradient(self, blocks: Blocks, place: int, like: Tensor) -> Tensor:
        """Return the gradient of an input as the input was given."""
        ...

    def add(self, total: Blocks | None, more: Blocks) -> Blocks:
        """Add a gradient to a sum, in float32 at least; the sum has memory of its own."""
        ...

    def narrowed(self, total: Blocks | None, slot: Slot) -> Blocks:
        """Return a sum in the dtype of what it is the gradient of; zeros where there is none."""
        ...


class SimulatedRunner:
    """Every rank's blocks, in columns."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._run = SimulatedProgram(program)
        self._device = torch.device("cpu")

    def shard(self, tensors: Sequence[Tensor], slots: Sequence[Slot]) -> list[Blocks]:
        self._device = tensors[0].device if tensors else self._device
        return [shard_all(t.detach(), slot.layout, self.program.mesh) for t, slot in zip(tensors, slots, strict=True)]

    def forward(self, blocks: Sequence[Blocks]) -> tuple[list[Blocks], list[Blocks]]:
        with plain_execution([torch.empty(0, device=self._device)]):
            return self._run._run_forward(list(blocks))  # pyright: ignore[reportPrivateUsage]

    def backward(self, saved: Sequence[Blocks], tangents: Sequence[Blocks]) -> list[Blocks | None]:
        with plain_execution([torch.empty(0, device=self._device)]):
            return cast(Any, self._run)._backward.run([*saved, *tangents])

    def wrap(self, outputs: Sequence[Blocks]) -> list[Tensor]:
        slots = zip(self.program.outputs, outputs, strict=True)
        return [self._run._assemble(slot, column) for slot, column in slots]  # pyright: ignore[reportPrivateUsage]

    def tangents(self, grads: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> list[Blocks]:
        found: list[Blocks] = []
        for grad, output, slot in zip(grads, outputs, self.program.outputs, strict=True):
            if slot.differentiable:
                whole = torch.zeros(output.shape, dtype=output.dtype, device=self._device) if grad is None else grad
                found.append(shard_all(extend(whole, slot.layout.shape), slot.layout, self.program.mesh))
        return found

    def gradient(self, blocks: Blocks, place: int, like: Tensor) -> Tensor:
        return assemble(blocks, self.program.inputs[place].layout, self.program.mesh)

    def add(self, total: Blocks | None, more: Blocks) -> Blocks:
        if total is None:
            return [_wide_copy(block) for block in more]
        for held, block in zip(total, more, strict=True):
            held += block
        return total

    def narrowed(self, total: Blocks | None, slot: Slot) -> Blocks:
        if total is None:
            shape = slot.local_shape(self.program.mesh)
            return [torch.zeros(shape, dtype=slot.dtype, device=self._device)] * self.program.mesh.size
        return [block.to(slot.dtype) for block in total]


class DistributedRunner:
    """This rank's block."""

    def __init__(self, run: DistributedProgram) -> None:
        self.program = run.program
        self._run: Any = run

    def _told(self, stage: str) -> AbstractContextManager[None]:
        return self._run._one_for_all(stage, self._run.transport.failures.call)

    def shard(self, tensors: Sequence[Tensor], slots: Sequence[Slot]) -> list[Blocks]:
        return [self._run._block(t, slot) for t, slot in zip(tensors, slots, strict=True)]

    def forward(self, blocks: Sequence[Blocks]) -> tuple[list[Blocks], list[Blocks]]:
        with torch.no_grad(), self._told("forward"):
            results = self._run.forward(*blocks)
        return list(results[: self.program.num_outputs]), list(results[self.program.num_outputs :])

    def backward(self, saved: Sequence[Blocks], tangents: Sequence[Blocks]) -> list[Blocks | None]:
        with torch.no_grad(), self._told("backward"):
            return list(self._run.backward(*saved, *tangents))

    def wrap(self, outputs: Sequence[Blocks]) -> list[Tensor]:
        return self._run._wrap(outputs)

    def tangents(self, grads: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> list[Blocks]:
        return self._run._local_tangents(grads)

    def gradient(self, blocks: Blocks, place: int, like: Tensor) -> Tensor:
        block = blocks.clone(memory_format=torch.contiguous_format)
        return self._run._gradient(block, self.program.inputs[place], spec_of(like), place)

    def add(self, total: Blocks | None, more: Blocks) -> Blocks:
        if total is None:
            return _wide_copy(more)
        total += more
        return total

    def narrowed(self, total: Blocks | None, slot: Slot) -> Blocks:
        if total is None:
            return torch.zeros(slot.local_shape(self.program.mesh), dtype=slot.dtype, device=self._run.transport.device)
        return total.to(slot.dtype)


def _wide_copy(block: Tensor) -> Tensor:
    return block.to(torch.float32 if is_half(block.dtype) else block.dtype, copy=True, memory_format=torch.contiguous_format)


class Accumulator:
    """What is kept between calls of one signature.

    Args:
        gather, batch: the two programs.
        parameters: the model's, by the slots of ``gather``.
    """

    def __init__(self, gather: Runner, batch: Runner, parameters: Sequence[Tensor]) -> None:
        self.gather, self.batch = gather, batch
        self.parameters = list(parameters)
        self.slots = batch.program.inputs[: len(gather.program.outputs)]
        self.held, self._saved = gather.forward(gather.shard(self.parameters, gather.program.inputs))
        self._versions = [parameter._version for parameter in self.parameters]
        self._sums: list[Blocks | None] = [None] * len(self.slots)
        self._anchor = torch.zeros((), requires_grad=True)

    def call(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run one batch; the gradients of its backward are kept here.

        Raises:
            PartirError: a parameter has changed since it was gathered.
        """
        for slot, parameter, version in zip(self.gather.program.inputs, self.parameters, self._versions):
            if parameter._version != version:
                raise PartirError(
                    f"{slot.name} was changed while its gathered value is kept. Step the optimizer after the block of partir.accumulate."
                )
        return cast(Any, _Batch).apply(self, len(inputs), *inputs, self._anchor)

    def keep(self, gradients: Sequence[Blocks | None], cotangents: Sequence[object]) -> None:
        """Add the gradients of what is held to their sums."""
        for place, (gradient, slot) in enumerate(zip(gradients, self.slots, strict=True)):
            if gradient is not None and slot.gets_gradient(cotangents):
                self._sums[place] = self.batch.add(self._sums[place], gradient)

    def close(self) -> None:
        """Let go what is held; a backward that comes now is an error."""
        self.held = []

    def finish(self) -> None:
        """Reduce the sums and add them to the parameters' `.grad`."""
        self.close()
        if any(total is not None for total in self._sums):
            torch.autograd.backward(cast(Any, _Finish).apply(self, *self.parameters))

    def reduced(self) -> list[Tensor | None]:
        """Return the gradient of each parameter; None for one that no backward reached."""
        outputs = self.gather.program.outputs
        reached = [total is not None for total in self._sums]
        tangents: list[Blocks] = []
        for place, slot in enumerate(outputs):
            if slot.differentiable:
                tangents.append(self.gather.narrowed(self._sums[place], slot))
            self._sums[place] = None
        gradients = self.gather.backward(self._saved, tangents)
        found: list[Tensor | None] = []
        for place, (gradient, slot) in enumerate(zip(gradients, self.gather.program.inputs, strict=True)):
            wanted = gradient is not None and any(r for r, held in zip(reached, self.slots) if _is_of(held, slot))
            found.append(self.gather.gradient(gradient, place, self.parameters[place]) if wanted else None)
        return found


def _is_of(held: Slot, parameter: Slot) -> bool:
    return held.source == parameter.name


class _Batch(torch.autograd.Function):
    """One call. An anchor stands for the parameters, so that outputs have gradients; parameters get theirs, and hooks run, at the end."""

    @staticmethod
    def forward(ctx: Any, accumulator: Accumulator, num_inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        batch, inputs = accumulator.batch, tensors[:num_inputs]
        slots = batch.program.inputs[len(accumulator.slots) :]
        blocks = [*accumulator.held, *batch.shard(inputs, slots)]
        outputs, ctx.saved = batch.forward(blocks)
        results = tuple(batch.wrap(outputs))
        ctx.accumulator, ctx.inputs = accumulator, inputs
        ctx.outputs = [torch.empty_like(result, device="meta") if spec_of(result) is None else result for result in results]
        ctx.set_materialize_grads(False)
        named = zip(results, batch.program.outputs, strict=True)
        ctx.mark_non_differentiable(*(result for result, slot in named if not slot.differentiable))
        return results

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        accumulator, saved = cast(Accumulator, ctx.accumulator), ctx.saved
        if saved is None:
            raise RuntimeError("Trying to backward through the graph a second time: a call inside partir.accumulate has one backward.")
        if not accumulator.held:
            raise PartirError("a backward of a call inside partir.accumulate came after its block: gradients are reduced at its end.")
        ctx.saved = None
        batch, first = accumulator.batch, len(accumulator.slots)
        gradients = batch.backward(saved, batch.tangents(grads, ctx.outputs))
        accumulator.keep(gradients[:first], grads)
        found: list[Tensor | None] = []
        for place, (gradient, like) in enumerate(zip(gradients[first:], ctx.inputs, strict=True)):
            slot = batch.program.inputs[first + place]
            wanted = gradient is not None and ctx.needs_input_grad[2 + place] and slot.gets_gradient(grads)
            found.append(batch.gradient(gradient, first + place, like) if wanted else None)
        return None, None, *found, None


class _Finish(torch.autograd.Function):
    """The end of an accumulation: a zero whose backward gives every parameter its gradient."""

    @staticmethod
    def forward(ctx: Any, accumulator: Accumulator, *parameters: Tensor) -> Tensor:
        ctx.accumulator = accumulator
        return torch.zeros(())

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = cast(Accumulator, ctx.accumulator).reduced()
        return None, *(g if needed else None for g, needed in zip(found, ctx.needs_input_grad[1:], strict=True))
