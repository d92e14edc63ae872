"""From a compiled call to two programs for gradient accumulation: split_accumulation, then differentiate each part."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from partir.options import Options, budget_of
from partir.passes.differentiate import join, split
from partir.passes.pipeline import Compiled
from partir.passes.slots import with_tangent
from partir.passes.split_accumulation import split_accumulation
from partir.precision import without_autocast
from partir.program import Program, Slot


@dataclass(frozen=True, eq=False)
class Accumulating:
    """A compiled call in two programs, so that several calls gather weights and reduce gradients once.

    Args:
        gather: parameters -> what calls read of them; its backward reduces the gradients of that.
        batch: what is held of the parameters, then the other inputs -> outputs.
    """

    gather: Program
    batch: Program


def accumulating(compiled: Compiled, options: Options) -> Accumulating:
    """Split a compiled call that has a backward for accumulation; see `passes.split_accumulation`."""
    program = compiled.program
    parts = split_accumulation(compiled.lowered, program.inputs)
    gather = _program(parts.gather, parts.parameters, parts.held, program, options)
    batch = _program(parts.batch, (*parts.held, *parts.others), program.outputs, program, options)
    return Accumulating(gather, batch)


def _program(graph: GraphModule, inputs: tuple[Slot, ...], outputs: tuple[Slot, ...], like: Program, options: Options) -> Program:
    memory = "low" if budget_of(like.memory) else like.memory  # what was weighed for a budget was the call in one piece
    with without_autocast():
        derived = split(join(graph, like.mesh, inputs, outputs, True, options.reduce_dtype), memory)
    outputs = tuple(with_tangent(slot, takes) for slot, takes in zip(outputs, derived.differentiable))
    return Program(like.mesh, like.memory, inputs, outputs, derived.forward, derived.backward, derived.num_outputs)
