"""Gradient accumulation that gathers weights once and reduces gradients once."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from partir.errors import PartirError
from partir.module import parallelized


@contextmanager
def accumulate(model: nn.Module) -> Generator[None]:
    """Keep gathered weights between the calls of the block, and reduce their gradients once, at its end.

        with partir.accumulate(model):
            for part in partir.micro_batches(batch, 4):
                (model(part) / 4).backward()
        optimizer.step()

    Gradients are those of accumulation without the block: they are added to `.grad`, and hooks run, when the block ends. An exception
    leaves `.grad` as it was. Each rank holds, from the first call to the end, every gathered weight and a sum of the same size
    (`plan.accumulation.held_bytes`). Calls without gradient run as ever. Every rank must enter and leave it alike.

    Raises:
        PartirError: not parallelized, or inside another block; by a call, if a parameter was changed inside the block; by a backward, if
            it comes after the block.
    """
    state = parallelized(model)
    if state.accumulators is not None:
        raise PartirError(f"{state.original.__name__} is accumulating already: blocks of partir.accumulate do not nest.")
    kept = state.accumulators = {}
    try:
        yield
        for accumulator in kept.values():
            accumulator.finish()
    finally:
        state.accumulators = None
        for accumulator in kept.values():
            accumulator.close()
