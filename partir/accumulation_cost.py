"""What accumulation with held weights moves and holds, read from its two programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from partir.errors import PartirError
from partir.options import Options
from partir.passes.accumulating import accumulating
from partir.passes.pipeline import Compiled
from partir.precision import is_half
from partir.program import Program, Slot
from partir.records import Collective, collectives_of

if TYPE_CHECKING:
    from partir.mesh import Mesh


@dataclass(frozen=True)
class AccumulationCost:
    """What one rank receives and holds in a block of `partir.accumulate`.

    Args:
        before: collectives that gather parameters, once.
        each: collectives of every call and its backward.
        after: collectives that reduce gradients, once.
        weight_bytes: of the gathered values that are held from the first call to the end.
        gradient_bytes: of their sums of gradients, held as long.
    """

    before: tuple[Collective, ...]
    each: tuple[Collective, ...]
    after: tuple[Collective, ...]
    weight_bytes: int
    gradient_bytes: int

    @property
    def held_bytes(self) -> int:
        """Bytes that each rank holds besides what a call without the block holds."""
        return self.weight_bytes + self.gradient_bytes

    def bytes(self, num_batches: int) -> int:
        """Return the bytes that one rank receives in a block of some micro-batches."""
        each = sum(c.bytes for c in self.each)
        return sum(c.bytes for c in (*self.before, *self.after)) + num_batches * each

    def __str__(self) -> str:
        before, each, after = (sum(c.bytes for c in part) for part in (self.before, self.each, self.after))
        return (
            f"received by each rank: {before:,} bytes before, {each:,} for each micro-batch, {after:,} after; "
            f"held meanwhile: {self.weight_bytes:,} bytes of weights, {self.gradient_bytes:,} of gradients"
        )


def accumulation_cost(compiled: Compiled, options: Options) -> AccumulationCost:
    """Return what accumulating a compiled call costs.

    Raises:
        PartirError: the call has no backward.
    """
    if compiled.program.backward is None:
        raise PartirError("nothing has a gradient in this plan, so there is nothing to accumulate: plan it with gradients on.")
    split = accumulating(compiled, options)
    gather, mesh = split.gather, compiled.program.mesh
    held = gather.outputs
    weights = sum(_numel(slot, mesh) * slot.dtype.itemsize for slot in held)
    sums = sum(_numel(slot, mesh) * (4 if is_half(slot.dtype) else slot.dtype.itemsize) for slot in held if slot.differentiable)
    return AccumulationCost(_of(gather, "forward"), collectives_of(split.batch), _of(gather, "backward"), weights, sums)


def _of(program: Program, stage: str) -> tuple[Collective, ...]:
    return tuple(record for record in collectives_of(program) if record.stage == stage)


def _numel(slot: Slot, mesh: Mesh) -> int:
    return torch.Size(slot.local_shape(mesh)).numel()
