"""Calls of lengths that grow, padded to a few compiled ones: evaluation and generation without a compilation a token.

    with torch.no_grad(), partir.length_buckets(model, sizes=(32, 64)):
        for _ in range(40):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)       # compiled for 32 and for 64 tokens

    [B, 20] -> pad on the right -> [B, 32] -> compiled -> [B, 32, V] -> cut -> [B, 20, V]

Before a length is compiled it is proved that nothing of the pad, nor the number of places, reaches what is kept.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from partir.errors import PaddingError, PartirError
from partir.inference import ordinary_tensors
from partir.signature import signature_here

if TYPE_CHECKING:
    from partir.parallelized import Parallelized

SHORTEST = 16  # by default lengths are padded to powers of two from here
FEWEST = 4  # below, no two lengths can be told apart from other sizes


@dataclass
class LengthBuckets:
    """How calls are padded while the context is open.

    Args:
        sizes: lengths that are compiled, ascending; empty: powers of two.
        dim: of inputs that is the length.
        mask: keyword argument that is given as ones where a call leaves it out.
    """

    sizes: tuple[int, ...]
    dim: int
    mask: str | None
    _proved: dict[Any, Any] = field(default_factory=dict[Any, Any])
    _included: dict[tuple[Any, int], bool] = field(default_factory=dict[tuple[Any, int], bool])

    def size_of(self, length: int) -> int:
        """Return the compiled length for a length.

        Raises:
            PartirError: it is longer than all of them.
        """
        if not self.sizes:
            return max(SHORTEST, 1 << (length - 1).bit_length())
        found = next((size for size in self.sizes if size >= length), None)
        if found is None:
            raise PartirError(f"length_buckets: a call of length {length} is longer than sizes={self.sizes}; add a larger one.")
        return found

    def call(self, state: Parallelized, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call padded, and cut what it returns."""
        if torch.is_grad_enabled():
            raise PartirError(
                "length_buckets: gradients are recorded. Padded calls are for evaluation: call the model under torch.no_grad() or "
                "torch.inference_mode(), and train outside of the context."
            )
        kwargs = self._with_mask(state, args, kwargs)
        leaves, structure = state.compiler.flatten(args, kwargs)
        length, dims = self._lengths(leaves)
        size = self.size_of(length)
        if size == length:
            return state.run(model, args, kwargs)
        names = state.input_names(model, structure)
        padded = [self._pad(t, dims[n], size, names[n]) if n in dims else t for n, t in enumerate(leaves)]
        proved = self._prove(state, model, padded, structure, dims, size)
        if not self._includes(state, model, proved, length):
            return state.run(model, args, kwargs)
        args, kwargs = structure.rebuild(padded)
        return state.run(model, args, kwargs, lambda results: [_cut(t, cut, length) for t, cut in zip(results, proved.outputs)])

    def _with_mask(self, state: Parallelized, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments with the mask last, so that a call with one and a call without have one program."""
        if self.mask is None:
            return kwargs
        rest, mask = {name: value for name, value in kwargs.items() if name != self.mask}, kwargs.get(self.mask)
        if mask is None:
            first = next((t for t in state.compiler.flatten(args, rest)[0] if t.dim() > self.dim), None)
            mask = None if first is None else first.new_ones(first.shape[: self.dim + 1], dtype=torch.int64)
        return {**rest, self.mask: mask}

    def _lengths(self, leaves: Sequence[Tensor]) -> tuple[int, dict[int, int]]:
        """Return the length of a call, and the dim of each leaf that is of it; a vector of that length is one of positions."""
        length = next((t.shape[self.dim] for t in leaves if t.dim() > self.dim), None)
        if length is None:
            raise PartirError(f"length_buckets: no input has a dim {self.dim}, so that the call has no length.")
        if any(isinstance(t, DTensor) for t in leaves):
            raise PartirError("length_buckets: an input is a DTensor, which cannot be padded; pass whole tensors.")
        own = [self.dim if t.dim() > self.dim else 0 for t in leaves]
        return length, {n: dim for n, (t, dim) in enumerate(zip(leaves, own)) if t.dim() > dim and t.shape[dim] == length}

    def _pad(self, t: Tensor, dim: int, size: int, name: str) -> Tensor:
        """Repeat the last position, a value that is legal; of a mask, zeros."""
        more = [size - t.shape[dim] if each == dim else -1 for each in range(t.dim())]
        last = t.narrow(dim, t.shape[dim] - 1, 1)
        return torch.cat([t, (torch.zeros_like(last) if name == self.mask else last).expand(more)], dim)

    def _prove(
        self, state: Parallelized, model: nn.Module, leaves: list[Tensor], structure: Any, dims: dict[int, int], size: int
    ) -> Any:
        key = signature_here(model, leaves, structure)[1]
        found = self._proved.get(key)
        if found is None or not found.holds():
            with ordinary_tensors():
                try:
                    found = self._proved[key] = state.prove(model, leaves, structure, dims, size)
                except PaddingError as error:
                    raise PaddingError(
                        f"length_buckets: {state.original.__name__} cannot be padded to {size}: {error}. Only a causal model can, one "
                        "that returns a result for every position. Call it without length_buckets, which compiles each length."
                    ) from error
        return found

    def _includes(self, state: Parallelized, model: nn.Module, proved: Any, length: int) -> bool:
        """Return whether a length may be padded to the one that was proved; each is asked for once."""
        if (proved, length) not in self._included:
            with ordinary_tensors():
                self._included[proved, length] = state.includes(model, proved, length)
        return self._included[proved, length]


def _cut(t: Tensor, dims: Sequence[int], length: int) -> Tensor:
    for dim in dims:
        t = t.narrow(dim, 0, length)
    return t


@contextmanager
def length_buckets(model: nn.Module, sizes: Sequence[int] | None = None, *, dim: int = 1, mask: str | None = None) -> Generator[None]:
    """Pad calls of a parallelized model on the right to a few compiled lengths, and cut what they return; exact, or an error.

    For evaluation and generation, under `torch.no_grad()` or `torch.inference_mode()`. A call as long as a size runs as it is. What is
    proved of each size, from the graph: for every op, a prefix of what it reads decides that prefix of what it makes.

    Args:
        model: that `parallelize` returned, in `eval()` where it has dropout.
        sizes: lengths to compile, ``(64, 256)``; by default powers of two from 16.
        dim: of the inputs that is the length. Every input with this dim of that size is padded by its last position.
        mask: name of a mask that forward takes, ``"attention_mask"``: padded by zeros, and given as ones where a call leaves it out,
            as Hugging Face's `generate` does; ones must mean the same as no mask.

    Raises:
        PartirError: the sizes are no lengths, outputs leave as blocks, a call is too long or records gradients.
        PaddingError: a call's result would depend on the pad; names the op and its line.
    """
    from partir.module import parallelized

    state, given = parallelized(model), tuple(sorted(set(sizes or ())))
    if any(type(size) is not int or size < FEWEST for size in given):
        raise PartirError(f"length_buckets: sizes={tuple(sizes or ())}: each is a number of positions, {FEWEST} or more.")
    if state.options.outputs == "sharded":
        raise PartirError('length_buckets: outputs="sharded" leaves blocks, which are not cut; parallelize with outputs="whole".')
    before, state.lengths = state.lengths, LengthBuckets(given, dim, mask)
    try:
        yield
    finally:
        state.lengths = before
