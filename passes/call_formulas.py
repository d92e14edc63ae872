"""Write down the formula of one call: the ATen ops that it is and those of its backward, as torch runs them on fake tensors.

    aten.linear(f32[16, 8], f32[4, 8])         forward   %t = aten.t(#1); %c = aten.mm(#0, %t)
    both need a gradient                 ->    backward  %1 = aten.mm(tangent, aten.t(%t)); %2 = aten.t(aten.mm(aten.t(tangent), #0))

Nothing but shapes, strides, dtypes and the call's other arguments enters, so that one formula serves every call that agrees in those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SIDE_EFFECTS = frozenset({torch.ops.aten._linalg_check_errors.default})


class Unwritten(Exception):
    """A formula cannot be written down call by call: it writes in place, or reads a tensor made elsewhere."""


@dataclass(frozen=True)
class Ref:
    """A tensor of a formula: an operand (``call`` -1), a tangent (-2), or a result of one of its calls."""

    call: int
    place: int


@dataclass(frozen=True)
class Call:
    """One op of a formula, with a Ref for each tensor among its arguments."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any
    backward: bool


@dataclass(frozen=True)
class Formula:
    """How one call runs and is differentiated.

    Args:
        calls: its ops, those of the backward last.
        results: of the call, in order; None where it gives none (a backward op that is asked for some gradients only).
        requires_grad: which of them have a gradient.
        gradients: of the operands; None where there is none.
        given: the gradient of each result that it was written for.
    """

    calls: tuple[Call, ...]
    results: tuple[Ref | None, ...]
    requires_grad: tuple[bool, ...]
    gradients: tuple[Ref | None, ...]
    given: tuple[Spec | None, ...]


@dataclass(frozen=True)
class Spec:
    """What a formula may depend on of a tensor: everything but its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    needs_gradient: bool

    @classmethod
    def of(cls, value: Tensor, needs_gradient: bool = False) -> Spec:
        """Return a fake tensor's.

        Raises:
            Unwritten: it is a lazy conjugate or negative.
        """
        if value.is_conj() or value.is_neg():
            raise Unwritten("a lazy conjugate")
        return cls(tuple(value.shape), value.stride(), value.dtype, value.device, needs_gradient)

    def make(self) -> Tensor:
        """Return a tensor like this, in the present fake mode."""
        empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return empty.requires_grad_(self.needs_gradient)


Given = tuple[Spec | None, ...]
"""Of the gradient given for each result; None for none."""


class _Recorder(TorchDispatchMode):
    """Writes down what runs below autograd."""

    def __init__(self, operands: Sequence[Tensor]) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.calls: list[Call] = []
        self.backward = False
        self._refs: dict[int, Ref] = {}
        self._alive: list[Tensor] = []  # an id is a tensor's as long as it lives
        self.know(operands, -1)

    def know(self, tensors: Sequence[Tensor | None], call: int) -> None:
        """Note what tensors are, by their places; one that is known keeps its first name."""
        for place, tensor in enumerate(tensors):
            if tensor is not None:
                self._refs.setdefault(id(tensor), Ref(call, place))
                self._alive.append(tensor)

    def ref(self, tensor: Tensor) -> Ref:
        """Return what a tensor is in the formula."""
        found = self._refs.get(id(tensor))
        if found is None:
            raise Unwritten("a formula reads a tensor that none of its calls has made")
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = results_in(result)
        if not any(one is not None for one in results) and func not in SIDE_EFFECTS:
            return result
        if func._schema.is_mutable:
            raise Unwritten(f"{func} writes in place")
        written = map_tensors(self.ref, (args, kwargs or {}))
        self.calls.append(Call(func, written[0], written[1], result, self.backward))
        self.know(results, len(self.calls) - 1)
        return result


def write_formula(run: Callable[[Sequence[Tensor]], Any], specs: Sequence[Spec], given: Given | None) -> Formula:
    """Run a call and its backward on fake tensors.

    Args:
        run: the call, of its tensor operands.
        specs: of the operands.
        given: of the gradients of its results; None for a contiguous one of each that can have one.

    Raises:
        Unwritten: it cannot be written down.
    """
    operands = [spec.make() for spec in specs]
    recorder = _Recorder(operands)
    with torch.enable_grad(), recorder:
        results = results_in(run(operands))
    needs = tuple(result is not None and result.requires_grad for result in results)
    if given is None:
        given = tuple(_contiguous(result) if result is not None and result.requires_grad else None for result in results)
    tangents = [None if spec is None else spec.make() for spec in given]
    recorder.know([t for t in tangents if t is not None], -2)
    gradients = _backward(recorder, operands, results, tangents)
    refs = tuple(None if gradient is None else recorder.ref(gradient) for gradient in gradients)
    calls = tuple(Call(c.target, c.args, c.kwargs, map_tensors(Tensor.detach, c.value), c.backward) for c in recorder.calls)
    made = tuple(None if result is None else recorder.ref(result) for result in results)
    return Formula(calls, made, needs, refs, given)


def _backward(
    recorder: _Recorder, operands: Sequence[Tensor], results: Sequence[Tensor | None], tangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    pairs = [(result, tangent) for result, tangent in zip(results, tangents, strict=True) if result is not None and tangent is not None]
    asked = [operand for operand in operands if operand.requires_grad]
    if not pairs or not asked:
        return [None] * len(operands)
    recorder.backward = True
    with recorder:
        found = iter(torch.autograd.grad([r for r, _ in pairs], asked, [t for _, t in pairs], allow_unused=True))
    return [next(found) if operand.requires_grad else None for operand in operands]


def results_in(result: Any) -> list[Tensor | None]:
    """Return what a call gives, by place: one tensor, or several of which some may be None or numbers."""
    if isinstance(result, Tensor):
        return [result]
    if not isinstance(result, (list, tuple)):
        return []
    several = cast("Sequence[Any]", result)
    if any(isinstance(one, (list, tuple)) for one in several):
        raise Unwritten("a list of tensors among several results")
    return [one if isinstance(one, Tensor) else None for one in several]


def _contiguous(like: Tensor) -> Spec:
    return Spec.of(torch.empty(tuple(like.shape), dtype=like.dtype, device=like.device))


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return the arguments or results of an op with each tensor among them replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        several = [map_tensors(function, one) for one in cast("Sequence[Any]", value)]
        return tuple(several) if isinstance(value, tuple) else several
    if isinstance(value, dict):
        return {name: map_tensors(function, one) for name, one in cast("dict[str, Any]", value).items()}
    return value
