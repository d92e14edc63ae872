"""Prove that a call may be padded on the right to a longer one and its results cut: at one length and, by two traces, at those below.

    Before: model(ids) of 16 tokens
    After:  output 0 may be cut along dim 1; proved at lengths 16 and 3, for all of them

A forward that branches on the length by a threshold is noticed where the two lengths lie on either side; lengths below the shorter are
traced themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from partir import rules
from partir.errors import PaddingError
from partir.options import Options
from partir.passes.pair_calls import pair_calls
from partir.passes.pipeline import factorise
from partir.passes.prove_prefix import prove_prefix
from partir.passes.slots import placeholders
from partir.passes.structure import Structure
from partir.passes.trace import InputSlot, Traced, trace

PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61)


@dataclass(frozen=True)
class Lengths:
    """One call at any length.

    Args:
        model, leaves, structure: of the call.
        dims: number of a leaf -> its dim that is the length.
    """

    model: nn.Module
    leaves: Sequence[Tensor]
    structure: Structure
    dims: Mapping[int, int]

    def at(self, length: int) -> tuple[Traced, GraphModule]:
        """Return the trace of the call at a length, and its graph with rules."""
        leaves = [self._sized(number, leaf, length) for number, leaf in enumerate(self.leaves)]
        args, kwargs = self.structure.rebuild(leaves)
        traced = trace(self.model, args, kwargs)
        return traced, factorise(traced)

    def _sized(self, number: int, leaf: Tensor, length: int) -> Tensor:
        shape = list(leaf.shape)
        if number in self.dims:
            shape[self.dims[number]] = length
        return leaf.new_empty(shape)

    def primes(self, length: int) -> list[int]:
        """Return primes below a length that divide no size that stays."""
        stay = [size for t in [*self.model.parameters(), *self.model.buffers()] for size in t.shape]
        stay += [size for number, leaf in enumerate(self.leaves) for dim, size in enumerate(leaf.shape) if self.dims.get(number) != dim]
        return [prime for prime in PRIMES if prime < length and all(size % prime for size in stay)]


@dataclass(frozen=True, eq=False)
class Proved:
    """What was proved of a call.

    Args:
        outputs: for each output, the dims that are the length.
        shortest: the proof holds from this length on.
        long: the call's graph.
        lengths, options: of the call.
        buffers: what was read, with the version that each had.
        constants: that the long call's forward makes.
    """

    outputs: tuple[tuple[int, ...], ...]
    shortest: int
    long: GraphModule
    lengths: Lengths
    options: Options
    buffers: tuple[tuple[Tensor, int], ...]
    constants: tuple[Tensor, ...]

    def holds(self) -> bool:
        """Return whether no buffer has changed since."""
        return all(version_of(buffer) == version for buffer, version in self.buffers)

    def includes(self, length: int) -> bool:
        """Return whether a call of this length may be padded."""
        if length >= self.shortest:
            return True
        try:
            with rules.using(self.options.rules):
                traced, graph = self.lengths.at(length)
                pair_calls(self.long, graph)
        except PaddingError:
            return False
        return all(map(_is_start_of, _constants(traced), self.constants))


def prove_lengths(
    model: nn.Module, leaves: Sequence[Tensor], structure: Any, dims: Mapping[int, int], length: int, options: Options
) -> Proved:
    """Prove of a call that shorter ones may be padded to its length.

    Args:
        model: in its present modes.
        leaves, structure: the call, as `trace.flatten_inputs` takes it apart.
        dims: number of a leaf -> its dim that is the length.
        length: of the call.
        options: whose rules are used.

    Raises:
        PaddingError: names the first op whose result may depend on the pad or on the length.
    """
    lengths = Lengths(model, leaves, structure, dims)
    primes = lengths.primes(length)
    if not primes:
        raise PaddingError(f"every prime below {length} divides another size of the model, so that the length cannot be told from it")
    with rules.using(options.rules):
        traced, long = lengths.at(length)
        again, short = lengths.at(primes[0])
        _refuse_other_results(traced, again)
        known = _known(model, long, traced.slots), _known(model, short, again.slots)
        outputs = prove_prefix(long, short, length, primes[0], known)
    buffers = tuple((t, version_of(t)) for t in known[1].values())
    return Proved(outputs, primes[0], long, lengths, options, buffers, _constants(traced))


def _refuse_other_results(long: Traced, short: Traced) -> None:
    if long.mutated_buffers or short.mutated_buffers:
        names = ", ".join(name for _, name in long.mutated_buffers or short.mutated_buffers)
        raise PaddingError(f"forward writes the buffer {names}, which would hold what comes of the pad")
    if long.outputs.text != short.outputs.text:
        raise PaddingError(f"forward returns {long.outputs.text} at one length and {short.outputs.text} at another")


def _constants(traced: Traced) -> tuple[Tensor, ...]:
    return tuple(slot.value for slot in traced.slots if slot.kind == "constant" and slot.value is not None)


def _is_start_of(short: Tensor, long: Tensor) -> bool:
    """Return whether a constant is the first part of another, along the dims in which they differ."""
    if short.dim() != long.dim():
        return False
    for dim, size in enumerate(short.shape):
        long = long.narrow(dim, 0, min(size, long.shape[dim]))
    return torch.equal(torch.nan_to_num(short), torch.nan_to_num(long))


def _known(model: nn.Module, graph: GraphModule, slots: Sequence[InputSlot]) -> dict[str, Tensor]:
    """Return the values of buffers and constants by the names of their placeholders."""
    found: dict[str, Tensor] = {}
    for node, slot in zip(placeholders(graph), slots, strict=True):
        value = slot.value if slot.kind == "constant" else model.get_buffer(slot.target) if slot.kind == "buffer" else None
        if value is not None and value.device.type != "meta":
            found[node.name] = value
    return found


def version_of(t: Tensor) -> int:
    """Return a number that changes when a tensor is written in place; one made in inference mode has none."""
    return 0 if t.is_inference() else t._version
