"""Run a program as one rank of torch.distributed, as one differentiable function of DTensors and whole tensors.

    whole or DTensor inputs -> this rank's blocks -> forward -> blocks -> whole or DTensor outputs

The code is what torch.fx generates from the graphs; their collectives are bound to process groups (`bind_collectives`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from partir.blocks import is_owner, shard
from partir.errors import OutOfRangeError, PartirError, RankError, add_note, is_out_of_range, name_in_generated_code, source_line
from partir.non_finite import Held, held
from partir.pads import cut, extend
from partir.program import Program, Slot
from partir.runtime.bind_collectives import bind_collectives
from partir.runtime.derivatives import first_derivative_only
from partir.runtime.groups import Groups
from partir.runtime.parameters import layout_spec, local_block
from partir.runtime.torch_dtensor import local_of, make_dtensor, spec_of
from partir.runtime.transport import Transport
from partir.runtime.uncaught import describe


class DistributedProgram:
    """A program of which this process runs one rank. Every rank makes it at the same time: it makes process groups.

    Args:
        program: what each rank runs.
        groups: process groups over its mesh.
        transport: sends and receives for this rank.
    """

    def __init__(self, program: Program, groups: Groups, transport: Transport) -> None:
        self.program = program
        self.mesh, self.rank = program.mesh, groups.rank
        self.transport = transport
        self.forward = bind_collectives(program.forward, "forward", groups, transport)
        backward = program.backward
        self.backward = None if backward is None else bind_collectives(backward, "backward", groups, transport)
        self._specs = [self._output_spec(slot, groups) for slot in program.outputs]
        self._input_specs = [self._spec(slot, groups) if slot.kind == "input" else None for slot in program.inputs]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs, one tensor given for each input slot.

        Args:
            tensors: parameters as DTensors; inputs as whole tensors, of which this rank takes its block, or as DTensors that
                are laid out as their slots say.

        Raises:
            RankError: another rank stopped or does not answer.
        """
        if len(tensors) != len(self.program.inputs):
            raise PartirError(f"the program takes {len(self.program.inputs)} tensors, {len(tensors)} were given.")
        if self.backward is None or not torch.is_grad_enabled():
            with torch.no_grad(), self._one_for_all("forward", self.transport.failures.call):
                results = self.forward(*self._blocks(tensors))
            return tuple(self._wrap(results[: self.program.num_outputs]))
        return cast(Any, _Run).apply(self, *tensors)

    def look_at_nodes(self, tensors: Sequence[Tensor]) -> dict[str, Held | None]:
        """Run the forward again and return what each value holds on this rank. Every rank must call it."""
        with torch.no_grad(), self._one_for_all("forward", self.transport.failures.call):
            looking = _Looking(self.forward)
            looking.run(*self._blocks(tensors))
        return looking.seen

    def _blocks(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self._block(t, slot) for t, slot in zip(tensors, self.program.inputs)]

    def _block(self, t: Tensor, slot: Slot) -> Tensor:
        if isinstance(t, DTensor):
            return local_block(t, slot.layout, self.mesh, self.rank)
        if tuple(t.shape) != slot.shape or t.dtype != slot.dtype:
            raise PartirError(
                f"{slot.name}: the program was compiled for {slot.dtype} {list(slot.shape)}, got {t.dtype} {list(t.shape)}."
            )
        layout = slot.layout.strip(self.mesh)
        block = shard(t.detach(), layout, self.mesh, self.rank)
        if not is_owner(layout, self.mesh, self.rank):
            return t.new_zeros(()).expand(slot.local_shape(self.mesh))
        return block.contiguous()

    def _wrap(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        named = zip(blocks, self._specs, self.program.outputs)
        return [block if spec is None else make_dtensor(self._real(block, slot), spec) for block, spec, slot in named]

    def _real(self, block: Tensor, slot: Slot) -> Tensor:
        shape = slot.real_shape(self.mesh, self.rank)
        return block if tuple(block.shape) == shape else cut(block, shape).contiguous()

    def _output_spec(self, slot: Slot, groups: Groups) -> Any:
        """Return how an output leaves as a DTensor; None for a plain tensor, and for what stays inside as a sum not yet made."""
        layout = slot.layout.strip(self.mesh)
        return self._spec(slot, groups) if layout.split_axes and not layout.pending else None

    def _spec(self, slot: Slot, groups: Groups) -> Any:
        layout = slot.layout.strip(self.mesh)
        return layout_spec(layout, slot.dtype, groups.device_mesh(layout), slot.shape)

    @contextmanager
    def _one_for_all(self, stage: str, call: int) -> Generator[None]:
        """Tell the other ranks when this one fails, so that they do not wait for it."""
        failures = self.transport.failures
        failures.check()
        latest, failures.call = failures.call, call
        try:
            with torch.autocast(self.transport.device.type, enabled=False), failures.told(f"the {stage} of call {call}"):
                yield
        except RankError:
            raise
        except Exception as error:
            where = f"the {stage} of call {call}{self._failed_node(error, stage)}"
            failures.report(f"raised {describe(error)} in {where}")
            if is_out_of_range(error) and not isinstance(error, PartirError):
                raise OutOfRangeError(f"rank {self.rank}, {where}: {error}") from error
            add_note(error, f"rank {self.rank} raised this in {where}")
            raise
        finally:
            failures.call = latest

    def _failed_node(self, error: Exception, stage: str) -> str:
        """Name the node whose line of the generated code raised an error."""
        module = self.forward if stage == "forward" else self.backward
        name = name_in_generated_code(error)
        node = next((node for node in module.graph.nodes if node.name == name), None) if module is not None else None
        if node is None:
            return ""
        return f" at %{node.name} = {node.target}" + (f", {source_line(node.meta)}" if node.meta.get("stack_trace") else "")

    def _local_tangents(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        tangents: list[Tensor] = []
        for grad, slot, spec in zip(grads, self.program.outputs, self._specs, strict=True):
            if not slot.differentiable:
                continue
            if grad is None:
                shape = slot.local_shape(self.mesh)
                tangents.append(torch.zeros(shape, dtype=slot.dtype, device=self.transport.device))
            elif spec is None:
                tangents.append(grad.full_tensor() if isinstance(grad, DTensor) else grad)
            elif isinstance(grad, DTensor):
                block = local_of(grad.redistribute(spec.mesh, spec.placements))
                tangents.append(extend(block, slot.local_shape(self.mesh)).contiguous())
            else:
                whole = extend(grad, slot.layout.shape)
                tangents.append(shard(whole, slot.layout.strip(self.mesh), self.mesh, self.rank).contiguous())
        return tangents

    def _gradient(self, block: Tensor, slot: Slot, spec: Any, place: int) -> Tensor:
        """Return an input's gradient as the input itself was given: a DTensor, or whole."""
        if spec is not None:
            owned = is_owner(slot.layout.strip(self.mesh), self.mesh, self.rank)
            return make_dtensor(block if owned else block.new_zeros((0,)), spec)
        own_spec = self._input_specs[place]
        if own_spec is None or not slot.layout.strip(self.mesh).split_axes:
            return block
        return make_dtensor(block, own_spec).full_tensor()


class _Looking(torch.fx.Interpreter):
    """Runs a bound graph node by node and counts what each value holds."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.seen: dict[str, Held | None] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        self.seen[n.name] = held(value)
        return value


class _Run(torch.autograd.Function):
    """One call of a program."""

    @staticmethod
    def forward(ctx: Any, distributed: DistributedProgram, *tensors: Tensor) -> tuple[Tensor, ...]:
        blocks = distributed._blocks(tensors)  # pyright: ignore[reportPrivateUsage]
        ctx.call = distributed.transport.failures.call
        with distributed._one_for_all("forward", ctx.call):  # pyright: ignore[reportPrivateUsage]
            results = distributed.forward(*blocks)
        count, slots = distributed.program.num_outputs, distributed.program.outputs
        outputs, saved = distributed._wrap(results[:count]), results[count:]  # pyright: ignore[reportPrivateUsage]
        ctx.save_for_backward(*saved)
        kept = {id(t) for t in saved}
        named = zip(tensors, blocks, distributed.program.inputs)
        ctx.versions = [(slot.name, t, t._version, local_of(t)) for t, b, slot in named if isinstance(t, DTensor) and id(b) in kept]
        ctx.specs = [spec_of(t) for t in tensors]
        ctx.distributed = distributed
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o, slot in zip(outputs, slots, strict=True) if not slot.differentiable))
        return tuple(outputs)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        distributed = cast(DistributedProgram, ctx.distributed)
        for name, t, version, block in ctx.versions:  # block: off the diagonal the block that ran is a stand-in
            if t._version != version or local_of(t) is not block:
                raise PartirError(f"{name} was changed between forward and backward; its gradient would be wrong.")
        saved = ctx.saved_tensors
        with distributed._one_for_all("backward", ctx.call):  # pyright: ignore[reportPrivateUsage]
            tangents = distributed._local_tangents(grads)  # pyright: ignore[reportPrivateUsage]
            gradients = cast(Any, distributed.backward)(*saved, *tangents)
            wanted = [gradient if slot.gets_gradient(grads) else None for gradient, slot in zip(gradients, distributed.program.inputs)]
            return None, *_wrap_gradients(distributed, wanted, ctx, [*saved, *tangents])


def _wrap_gradients(
    distributed: DistributedProgram, gradients: Sequence[Tensor | None], ctx: Any, others: Sequence[Tensor]
) -> list[Tensor | None]:
    """Wrap gradients; each gets memory of its own, for `.grad` is changed in place and a DTensor hides who shares its block."""
    taken = {t.untyped_storage().data_ptr() for t in others}
    wrapped: list[Tensor | None] = []
    for place, (gradient, slot) in enumerate(zip(gradients, distributed.program.inputs, strict=True)):
        if gradient is None or not ctx.needs_input_grad[place + 1]:
            wrapped.append(None)
            continue
        storage = gradient.untyped_storage().data_ptr()
        own = gradient.is_contiguous() and storage not in taken
        block = gradient if own else gradient.clone(memory_format=torch.contiguous_format)
        taken.add(storage)
        wrapped.append(distributed._gradient(block, slot, ctx.specs[place], place))  # pyright: ignore[reportPrivateUsage]
    return wrapped
