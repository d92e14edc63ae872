"""Calls of every op in torch's own database of ops (OpInfo), as functions of tensors, and the ways to split them.

    for sample in samples_of(op, 10):            # sample.call(*sample.tensors)
        for split in splits_of(sample.tensors):  # tensor 0 of [4, 6] in 2 blocks along dim 0, ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)
COUNTS = (2, 3)
LARGER = (5, 7)  # for sizes that neither 2 nor 3 divides
POOL = 100  # of an op's samples, those to choose from


@dataclass(frozen=True)
class Sample:
    """One call of an op: `call(*tensors)`; `text` shows shapes and the other arguments."""

    call: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    text: str

    def leaves(self) -> tuple[Tensor, ...]:
        """Return fresh copies of the tensors that record gradients where the sample does."""
        return tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in self.tensors)


@dataclass(frozen=True)
class Split:
    """Tensor number `tensor` of a call in `count` blocks along `dim`; the others are whole."""

    tensor: int
    dim: int
    count: int

    def __str__(self) -> str:
        return f"tensor {self.tensor}, dim {self.dim} in {self.count}"


@cache
def database() -> dict[str, Any]:
    """Return every OpInfo by its full name, `sum` or `norm.fro`.

    The database sets the seed inside the calls that draw; here whoever calls sets it, since a graph holds no seeding.
    """
    from torch.testing._internal import common_methods_invocations as torchs

    def call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    cast(Any, torchs).wrapper_set_seed = call
    return {op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""): op for op in cast("list[Any]", torchs.op_db)}


def samples_of(op: Any, most: int, seed: int = 0) -> list[Sample]:
    """Return up to `most` different calls of an op with dense tensors, spread over what its OpInfo offers."""
    supported = op.supported_dtypes("cpu")
    dtype = next((dtype for dtype in DTYPES if dtype in supported), None)
    if dtype is None:
        return []
    grad = bool(op.supports_autograd and dtype in op.supported_backward_dtypes("cpu"))
    torch.manual_seed(seed)
    found: dict[str, Sample] = {}
    for given in islice(op.sample_inputs("cpu", dtype, requires_grad=grad), POOL):
        sample = _sample(op, given, grad)
        if sample is not None and any(True for _ in splits_of(sample.tensors)):
            found.setdefault(sample.text, sample)
    listed = list(found.values())
    step = max(len(listed) / most, 1.0)
    return [listed[int(place * step)] for place in range(min(most, len(listed)))]


def _sample(op: Any, given: Any, grad: bool) -> Sample | None:
    leaves, spec = pytree.tree_flatten(((given.input, *given.args), given.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = tuple(cast(Tensor, leaves[place]) for place in places)
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return None

    def call(*values: Tensor) -> Any:
        filled = list(leaves)
        for place, value in zip(places, values, strict=True):
            filled[place] = value
        args, kwargs = pytree.tree_unflatten(filled, spec)
        result = op.get_op()(*args, **kwargs)
        return given.output_process_fn_grad(result) if grad else result

    shown = [_show(leaf) for leaf in leaves]
    return Sample(call, tensors, f"({', '.join(shown)}) {sorted(given.kwargs)}")


def _show(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return f"{leaf:.3g}" if isinstance(leaf, float) else repr(leaf)[:40]


def splits_of(tensors: Sequence[Tensor]) -> Iterator[Split]:
    """Yield every split of one dim of one tensor in 2 and in 3 blocks; where neither divides it, in 5 or 7."""
    for number, tensor in enumerate(tensors):
        for dim, size in enumerate(tensor.shape):
            if tensor.numel() == 0 or size < 2:
                continue
            counts = [count for count in COUNTS if size % count == 0] or [count for count in LARGER if size % count == 0]
            yield from (Split(number, dim, count) for count in counts)
