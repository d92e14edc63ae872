"""What one rank holds in a step of a program, in numbers: the symbols of `cost_of` left out, which take longer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from partir.cost.cost import Cost
from partir.cost.lifetimes import blocks_of
from partir.cost.monomial import Monomial
from partir.graph import tensors_of
from partir.program import Program


class ActualSizes:
    """The bytes of each value of a program on one rank."""

    def bytes_of(self, node: Node) -> Sequence[Monomial]:
        """Return those of each result of a node."""
        return [Monomial.of(result.numel() * result.dtype.itemsize) for result in tensors_of(node)]


def peak_bytes(program: Program) -> int:
    """Return the most bytes that one rank holds in a step, AdamW's moments among them; `Cost.peak_memory` of the same program."""
    slots = [slot for slot in program.inputs if slot.kind in ("parameter", "buffer")]
    held = [(torch.Size(slot.local_shape(program.mesh)).numel() * slot.dtype.itemsize, slot.differentiable) for slot in slots]
    parameters = tuple((Monomial.of(number), trained) for number, trained in held)
    return int(Cost({}, (), (), blocks_of(program, ActualSizes(), {}), parameters).peak_memory())
