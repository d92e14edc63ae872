"""Expressions of rule text: a small tree, printed, evaluated or made into sympy, never run as Python.

The same tree serves conditions (``when dropout_p > 0``), local attributes (``shape[y]``), recipes
(``sum[h](x) / size[h]``) and flops (``2 * k * numel[y]``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from partir.errors import RuleError


@dataclass(frozen=True)
class Constant:
    """A number, ``None``, ``True`` or ``False``."""

    value: Any

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class Name:
    """An operand, an attribute, a factor, or a name that a recipe assigned before."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Listing:
    """``[a, b]``."""

    items: tuple[Expression, ...]

    def __str__(self) -> str:
        return "[" + ", ".join(map(str, self.items)) + "]"


@dataclass(frozen=True)
class Lookup:
    """``size[h]``, ``shape[y]``, ``shape[y, dim]``, ``numel[y]``, ``epsilon[x]``."""

    kind: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}[{', '.join(self.names)}]"


@dataclass(frozen=True)
class Reduce:
    """``sum[h](e)`` or ``max[h](e)``: over the dims of the factors and over every rank that holds a part of them."""

    kind: str
    factors: tuple[str, ...]
    value: Expression

    def __str__(self) -> str:
        return f"{self.kind}[{', '.join(self.factors)}]({self.value})"


@dataclass(frozen=True)
class Call:
    """``rsqrt(e)``: an elementwise aten op in recipes, a list function elsewhere."""

    function: str
    arguments: tuple[Expression, ...]

    def __str__(self) -> str:
        return f"{self.function}({', '.join(map(str, self.arguments))})"


@dataclass(frozen=True)
class Unary:
    """``-e`` or ``not e``."""

    operator: str
    value: Expression

    def __str__(self) -> str:
        text = f"({self.value})" if isinstance(self.value, Binary) else str(self.value)
        return f"not {text}" if self.operator == "not" else f"-{text}"


@dataclass(frozen=True)
class Binary:
    """Arithmetic, a comparison, ``and`` or ``or``."""

    operator: str
    left: Expression
    right: Expression

    def __str__(self) -> str:
        mine = PRECEDENCE[self.operator]
        left = _wrap(self.left, mine)
        return f"{left} {self.operator} {_wrap(self.right, mine + 1)}"


Expression: TypeAlias = Constant | Name | Listing | Lookup | Reduce | Call | Unary | Binary


def _part(items: list[Any], start: int, count: int) -> list[Any]:
    return items[start : start + count]


def _divide(left: Any, right: Any) -> Any:
    return left / right


COMPARISONS = ("==", "!=", "<=", ">=", "<", ">")
PRECEDENCE = {"or": 0, "and": 1, **dict.fromkeys(COMPARISONS, 3), "+": 4, "-": 4, "*": 5, "/": 5}
LIST_FUNCTIONS: dict[str, Callable[..., Any]] = {"len": len, "min": min, "max": max, "sum": sum, "part": _part}
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne, "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": _divide,
}  # fmt: skip


def _wrap(expression: Expression, precedence: int) -> str:
    """Print a child, in parentheses where it binds less tightly than its parent."""
    if isinstance(expression, Binary) and PRECEDENCE[expression.operator] < precedence:
        return f"({expression})"
    if isinstance(expression, Unary) and expression.operator == "not" and precedence > 2:
        return f"({expression})"
    return str(expression)


def walk(expression: Expression) -> list[Expression]:
    """Return the expression and all its parts, outermost first."""
    children: Sequence[Expression] = ()
    match expression:
        case Binary(_, left, right):
            children = (left, right)
        case Unary(_, value) | Reduce(_, _, value):
            children = (value,)
        case Call(_, items) | Listing(items):
            children = items
        case _:
            pass
    return [expression, *(part for child in children for part in walk(child))]


def evaluate(expression: Expression, names: Mapping[str, Any], lookup: Callable[[str, tuple[str, ...]], Any] | None = None) -> Any:
    """Return the Python value of an expression of plain values.

    Args:
        names: the value of each name.
        lookup: what ``size[..]``, ``shape[..]`` and ``numel[..]`` mean here.
    """
    match expression:
        case Constant(value):
            return value
        case Name(name) if name in names:
            return names[name]
        case Listing(items):
            return [evaluate(item, names, lookup) for item in items]
        case Lookup(kind, keys) if lookup is not None:
            return lookup(kind, keys)
        case Unary(sign, value):
            result = evaluate(value, names, lookup)
            return (not result) if sign == "not" else -result
        case Binary("and", left, right):
            return bool(evaluate(left, names, lookup)) and bool(evaluate(right, names, lookup))
        case Binary("or", left, right):
            return bool(evaluate(left, names, lookup)) or bool(evaluate(right, names, lookup))
        case Binary(sign, left, right):
            return _apply(sign, evaluate(left, names, lookup), evaluate(right, names, lookup))
        case Call("default", (value, fallback)):
            result = evaluate(value, names, lookup)
            return evaluate(fallback, names, lookup) if result is None else result
        case Call(function, arguments) if function in LIST_FUNCTIONS:
            return LIST_FUNCTIONS[function](*(evaluate(argument, names, lookup) for argument in arguments))
        case _:
            raise RuleError(f"`{expression}` has no value here")


def _apply(sign: str, left: Any, right: Any) -> Any:
    """Compare or compute; an ordering with None is False, so that `when p > 0` works for an absent p."""
    if sign in ("<", "<=", ">", ">=") and (left is None or right is None):
        return False
    return OPERATORS[sign](left, right)
