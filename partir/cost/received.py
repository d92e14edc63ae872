"""What one rank receives in a collective, for any sizes: the formulas of `collectives.received_bytes` in symbols."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import sympy  # pyright: ignore[reportMissingTypeStubs]

from partir.cost.monomial import Monomial, Values, symbol
from partir.records import Collective


@dataclass(frozen=True)
class Received:
    """One collective of a program.

    Args:
        record: what it is for, and its bytes in the program.
        axes: of its group.
        parts: elements of each operand's block.
        itemsize: bytes of an element.
        count: how often it happens: more than once in a layer that stands for others.
    """

    record: Collective
    axes: tuple[str, ...]
    parts: tuple[Monomial, ...]
    itemsize: int
    count: int = 1

    def ranks(self, sizes: Values) -> Any:
        """Return the number of ranks of the group."""
        total: Any = 1
        for axis in self.axes:
            total = total * sizes[axis]
        return total

    def value(self, sizes: Values) -> Any:
        """Return the bytes of one message for these sizes: numbers, or arrays of one shape."""
        n, op = self.ranks(sizes), self.record.op
        total: Any = 0
        for part in self.parts:
            held = part.value(sizes)
            total = total + _elements(op, held, n)
        return total * self.itemsize


def _elements(op: str, held: Any, n: Any) -> Any:
    if op in ("all_gather", "all_gather_same", "all_gather_bucket", "reduce_to"):
        return (n - 1) * held
    if op in ("reduce_scatter", "reduce_scatter_bucket", "all_to_all"):
        return (n - 1) * (held // n)
    if op == "all_reduce":
        return 2 * (n - 1) * -(-held // n)
    return held * (n > 1)


def _in_symbols(op: str, part: Monomial, n: sympy.Expr) -> Any:
    held: Any = part.expression
    if op in ("all_gather", "all_gather_same", "all_gather_bucket", "reduce_to"):
        return (n - 1) * held
    if op in ("reduce_scatter", "reduce_scatter_bucket", "all_to_all"):
        return (n - 1) * held / n
    if op == "all_reduce":
        return 2 * (n - 1) * sympy.ceiling(held / n)
    return held * cast(Any, sympy).Piecewise((1, sympy.Gt(n, 1)), (0, True))


def total(received: Iterable[Received]) -> sympy.Expr:
    """Return the sum of expressions; like terms are added before sympy sees them, so that 96 layers cost no more than one."""
    kinds: dict[tuple[str, tuple[str, ...], tuple[tuple[str, int], ...]], Any] = {}
    rounded: list[sympy.Expr] = []
    for one in received:
        for part in one.parts:
            if one.record.op == "all_reduce":
                n = sympy.Mul(*(symbol(axis) for axis in one.axes))
                rounded.append(_in_symbols("all_reduce", part, n) * one.itemsize * one.count)
                continue
            key = (one.record.op, one.axes, part.powers)
            kinds[key] = kinds.get(key, 0) + part.coefficient * one.itemsize * one.count
    return sympy.Add(*_collected(kinds), *_counted(rounded))


def _collected(kinds: dict[tuple[str, tuple[str, ...], tuple[tuple[str, int], ...]], Any]) -> Sequence[sympy.Expr]:
    return [
        _in_symbols(op, Monomial(coefficient, powers), sympy.Mul(*(symbol(axis) for axis in axes)))
        for (op, axes, powers), coefficient in kinds.items()
    ]


def _counted(expressions: Sequence[sympy.Expr]) -> list[sympy.Expr]:
    counts: dict[sympy.Expr, int] = {}
    for one in expressions:
        counts[one] = counts.get(one, 0) + 1
    return [count * one for one, count in counts.items()]
