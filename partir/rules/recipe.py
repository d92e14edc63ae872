"""Run the recipe of a `split` clause on anything that can call aten ops: blocks, fake tensors or fx nodes.

mu = sum[h](x) / size[h]      ->   %1 = sum(%x, [-1], keepdim)   %2 = reduce(%1 over h)   %3 = div(%2, 768)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any, Protocol

import torch

from partir.errors import RuleError
from partir.pads import Pads, natural_size
from partir.rules import expressions as ex
from partir.rules.binding import Binding, Body, Dims
from partir.rules.ops import is_overload, overloads

aten = torch.ops.aten
ARITHMETIC: dict[str, Any] = {
    "+": aten.add.Tensor, "-": aten.sub.Tensor, "*": aten.mul.Tensor, "/": aten.div.Tensor,
    "==": aten.eq, "!=": aten.ne, "<": aten.lt, "<=": aten.le, ">": aten.gt, ">=": aten.ge,
    "and": aten.logical_and.default, "or": aten.logical_or.default,
}  # fmt: skip


class Backend(Protocol):
    """Where a recipe runs."""

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Call an aten op (an OpOverload) and return its value, which the recipe passes on untouched."""
        ...

    def reduce(self, kind: str, factors: tuple[str, ...], value: Any) -> Any:
        """Reduce ("sum" or "max") over all ranks that hold parts of these factors; the local dims are reduced already.

        The result is the same on each of these ranks: pending sum -> type R; a maximum has no gradient.
        """
        ...

    def dtype(self, value: Any) -> torch.dtype:
        """Return the dtype of a value."""
        ...


@dataclass(frozen=True)
class Value:
    """A tensor of the backend with the factors of its dims (those that a reduction left at size 1 are ``()``)."""

    handle: Any
    dims: Dims


def run_body(
    body: Body, binding: Binding, operands: Sequence[Any], backend: Backend, pads: Mapping[str, Pads] | None = None
) -> tuple[Any, ...]:
    """Return the results of a recipe, each with the dims that `binding.results` gives it.

    Args:
        operands: the backend's value of every operand of the binding, in order (local blocks).
        pads: the pads of factors that have some: sums mask them and sizes do not count them.
    """
    names: dict[str, Any] = dict(binding.attributes)
    for name, handle, dims in zip(binding.names, operands, binding.operands, strict=True):
        names[name] = Value(handle, dims)
    run = _Run(binding, names, backend, pads or {})
    for name, expression in body.statements:
        names[name] = run.value(expression)
    return tuple(run.shaped(names[name], dims) for name, dims in zip(body.results, binding.results, strict=True))


@dataclass
class _Run:
    binding: Binding
    names: Mapping[str, Any]
    backend: Backend
    pads: Mapping[str, Pads]

    def value(self, expression: ex.Expression) -> Any:
        """Return a Value, or a plain number, None for an absent operand."""
        match expression:
            case ex.Constant(value):
                return value
            case ex.Name(name):
                return self.names.get(name)
            case ex.Lookup("size", factors):
                return prod(natural_size(self.binding.sizes[factor], self.pads.get(factor, ())) for factor in factors)
            case ex.Lookup("epsilon", (name,)):
                return torch.finfo(self.backend.dtype(self.names[name].handle)).eps
            case ex.Reduce(kind, factors, inner):
                return self.reduce(kind, factors, self.value(inner))
            case ex.Call("default", (first, second)):
                value = self.value(first)
                return self.value(second) if value is None else value
            case ex.Call("to", (first, second)):
                return self.convert(self.value(first), self.value(second))
            case ex.Call("detach", (inner,)):
                return self.elementwise(lambda _: aten.detach.default, [self.value(inner)])
            case ex.Call(function, arguments):
                return self.elementwise(partial(elementwise, function), [self.value(argument) for argument in arguments])
            case ex.Unary(sign, inner):
                value = self.value(inner)
                op = aten.logical_not.default if sign == "not" else aten.neg.default
                return self.elementwise(lambda _: op, [value]) if isinstance(value, Value) else -value
            case ex.Binary(sign, left, right):
                return self.binary(sign, self.value(left), self.value(right))
            case _:
                raise RuleError(f"{self.binding.rule}: `{expression}` has no meaning in a recipe")

    def binary(self, sign: str, left: Any, right: Any) -> Any:
        if left is None or right is None:
            return right if left is None else left
        if not isinstance(left, Value) and not isinstance(right, Value):
            return ex.OPERATORS[sign](left, right)
        return self.elementwise(lambda values: _operator(sign, values), [left, right])

    def reduce(self, kind: str, factors: tuple[str, ...], value: Value) -> Value:
        dims = [place for place, dim in enumerate(value.dims) if set(dim) & set(factors)]
        if any(not set(value.dims[place]) <= set(factors) for place in dims):
            raise RuleError(f"{self.binding.rule}: {kind}[{', '.join(factors)}] reduces only a part of a dim")
        handle = value.handle
        if kind == "max":
            handle = self.backend.call(aten.amax.default, self.backend.call(aten.detach.default, handle), dims, True)
        elif dims:
            for place in dims:
                handle = self._mask(handle, place, value.dims[place])
            handle = self.backend.call(aten.sum.dim_IntList, handle, dims, True)
        reduced = self.backend.reduce(kind, factors, handle)
        return Value(reduced, tuple(() if place in dims else dim for place, dim in enumerate(value.dims)))

    def _mask(self, handle: Any, place: int, names: tuple[str, ...]) -> Any:
        behind = 1
        for name in reversed(names):
            for pad in self.pads.get(name, ()):
                arguments = (place, pad.block * behind, pad.size, pad.padded)
                handle = self.backend.call(torch.ops.partir_local.mask_pads.default, handle, *arguments)
            behind *= self.binding.sizes[name]
        return handle

    def convert(self, value: Value, dtype: Any) -> Value:
        if dtype is None or dtype == self.backend.dtype(value.handle):
            return value
        return Value(self.backend.call(aten._to_copy.default, value.handle, dtype=dtype), value.dims)

    def elementwise(self, choose: Callable[[list[Any]], Any], values: list[Any]) -> Value:
        """Call an elementwise op on values broadcast against each other, dims aligned from the right."""
        tensors = [value for value in values if isinstance(value, Value)]
        widest = max(tensors, key=lambda value: len(value.dims))
        dims = list(widest.dims)
        for value in tensors:
            for place in range(1, len(value.dims) + 1):
                dims[-place] = dims[-place] or value.dims[-place]
        plain = [value.handle if isinstance(value, Value) else value for value in values]
        return Value(self.backend.call(choose(values), *plain), tuple(dims))

    def shaped(self, value: Value, dims: Dims) -> Any:
        """Drop the dims of size 1 that a reduction left and the result does not have."""
        handle, mine = value.handle, list(value.dims)
        place = 0
        while len(mine) > len(dims):
            while place < len(dims) and mine[place] == dims[place]:
                place += 1
            if mine[place] != ():
                raise RuleError(f"{self.binding.rule}: the recipe's result has dims {mine}, the op's {list(dims)}")
            handle = self.backend.call(aten.squeeze.dim, handle, place)
            del mine[place]
        return handle


def _operator(sign: str, values: list[Any]) -> Any:
    """Return the overload of an arithmetic op or comparison for tensors or a number on the right."""
    op = ARITHMETIC[sign]
    if is_overload(op):
        return op
    return op.Tensor if isinstance(values[1], Value) else op.Scalar


@cache
def _overloads(function: str) -> tuple[Any, ...]:
    """Return the overloads of an elementwise op that make a tensor, those with the pointwise tag first."""
    packet = getattr(aten, function)
    found = [op for op in overloads(packet) if "out" not in op._schema.overload_name]
    tensors = [op for op in found if [str(value.type) for value in op._schema.returns] == ["Tensor"]]
    return tuple(sorted(tensors, key=lambda op: torch.Tag.pointwise not in op.tags))


def elementwise(function: str, values: list[Any]) -> Any:
    """Return the overload of an elementwise aten op whose schema takes these tensors and numbers."""
    for op in _overloads(function):
        arguments = op._schema.arguments
        if len(values) > len(arguments) or any(not argument.has_default_value() for argument in arguments[len(values) :]):
            continue
        if all(("Tensor" in str(argument.type)) == isinstance(value, Value) for argument, value in zip(arguments, values, strict=False)):
            return op
    raise RuleError(f"no elementwise aten op {function} takes these {len(values)} arguments")
