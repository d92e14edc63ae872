"""Turn the parse tree of rule text into the values of syntax.py, expressions.py and, for placements, plain tuples."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import lark
from lark import Token, Transformer

from partir.rules import expressions as ex
from partir.rules import syntax as sx
from partir.rules.source import Source
from partir.rules.validate import check_form

call_with_children: Any = cast(Any, lark).v_args


@dataclasses.dataclass(frozen=True)
class Entry:
    """One `op` entry: the names that share its forms, with where it stands."""

    names: tuple[str, ...]
    forms: tuple[sx.Form, ...]
    where: str = ""


@call_with_children(inline=True)
class ToSyntax(Transformer[Token, Any]):
    """Turn the parse tree into values of syntax.py (names stay tokens, which know their place, until checked)."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source

    def path(self, *names: Token) -> Token:
        return names[0].update(value=".".join(names))

    @call_with_children(inline=False)
    def operation(self, children: list[Any]) -> Entry:
        paths = [child for child in children if isinstance(child, Token)]
        forms = [child for child in children if isinstance(child, sx.Form)]
        return Entry(tuple(map(str, paths)), tuple(plain(form) for form in forms), self.source.at(paths[0].line or 0))

    def alternative(self, form: sx.Form) -> sx.Form:
        return form

    def form(self, parameters: Any, results: Any, *clauses: Any) -> sx.Form:
        line = next((pattern.name.line for pattern in (*(parameters or ()), *results)), 0)
        form = sx.Form(tuple(parameters or ()), tuple(results), tuple(clauses), line)
        check_form(form, self.source)
        return form

    inline = form

    def parameters(self, *items: sx.Pattern) -> tuple[sx.Pattern, ...]:
        return items

    results = parameters

    def parameter(self, name: Token, listed: Any, optional: Any, dims: Any) -> sx.Pattern:
        return sx.Pattern(name, dims, listed is not None, optional is not None)

    def result(self, name: Token, listed: Any, dims: Any) -> sx.Pattern:
        return sx.Pattern(name, dims, listed is not None)

    def dims(self, *items: sx.Item) -> tuple[sx.Item, ...]:
        return items

    def item(self, factors: tuple[str, ...], broadcast: Any, at: Any, _mark: Any, present: Any) -> sx.Item:
        return sx.Item(factors, broadcast is not None, at, present)

    def factor(self, name: Token) -> tuple[str, ...]:
        return (name,)

    star = rest = factor

    def one(self, number: Token) -> tuple[str, ...]:
        if number != "1":
            raise self.source.error(f"a dim is a factor or 1, not {number}", number)
        return ()

    def product_dim(self, *names: Token) -> tuple[str, ...]:
        return tuple(name for name in names if name != "*")

    def factors(self, *names: Token) -> tuple[Token, ...]:
        return names

    names = factors

    def condition(self, value: ex.Expression) -> ex.Expression:
        return value

    def sum_clause(self, factors: Any, condition: Any) -> sx.Factors:
        return sx.Factors("sum", factors, condition)

    def max_clause(self, factors: Any, condition: Any) -> sx.Factors:
        return sx.Factors("max", factors, condition)

    def whole_clause(self, factors: Any, condition: Any) -> sx.Factors:
        return sx.Factors("whole", factors, condition)

    def free_clause(self, factors: Any, condition: Any) -> sx.Factors:
        return sx.Factors("free", factors, condition)

    def offset_clause(self, factors: Any, condition: Any) -> sx.Factors:
        return sx.Factors("offset", factors, condition)

    def once_clause(self, operand: Token, factors: Any) -> sx.Once:
        return sx.Once(operand, factors)

    def index_clause(self, operand: Token, factor: Token) -> sx.Index:
        return sx.Index(operand, factor)

    def random_clause(self, condition: Any) -> sx.Random:
        return sx.Random(condition)

    def statement(self, name: Token, value: ex.Expression) -> tuple[str, ex.Expression]:
        return (name, value)

    def split_clause(self, factor: Token, *statements: Any) -> sx.Split:
        return sx.Split(factor, statements)

    def flops_clause(self, value: ex.Expression) -> sx.Flops:
        return sx.Flops(value)

    def product_clause(self, a: Any, b: Any) -> sx.Product:
        return sx.Product(None if a is None else (a, b))

    def linear_clause(self, *operands: Token) -> sx.Linear:
        return sx.Linear(operands)

    def local_clause(self, attribute: Token, value: ex.Expression) -> sx.Local:
        return sx.Local(attribute, value)

    def regroup_clause(self) -> sx.Regroup:
        return sx.Regroup()

    def repeat_clause(self, attribute: Token) -> sx.Repeat:
        return sx.Repeat(attribute)

    def when_clause(self, condition: ex.Expression) -> sx.When:
        return sx.When(condition)

    def example_value(self, name: Token, value: ex.Expression) -> tuple[Any, ...]:
        return (name, value)

    def example_tensor(self, name: Token, *shape: Any) -> tuple[Any, ...]:
        *numbers, dtype = shape
        return (name, tuple(int(number) for number in numbers), dtype or "")

    def example_clause(self, *items: tuple[Any, ...]) -> sx.Example:
        return sx.Example(tuple(item for item in items if len(item) == 3), tuple(item for item in items if len(item) == 2))

    def number(self, token: Token) -> ex.Expression:
        return ex.Constant(int(token) if token.isdigit() else float(token))

    def constant(self, token: Token) -> ex.Expression:
        return ex.Constant({"None": None, "True": True, "False": False}[token])

    def name(self, token: Token) -> ex.Expression:
        return ex.Name(token)

    def reduce(self, kind: Token, factors: Any, value: ex.Expression) -> ex.Expression:
        if kind not in ("sum", "max"):
            raise self.source.error(f"unknown reduction `{kind}`; known: sum, max", kind)
        return ex.Reduce(kind, factors, value)

    def lookup(self, kind: Token, names: Any) -> ex.Expression:
        if kind not in ("size", "shape", "numel", "epsilon"):
            raise self.source.error(f"unknown `{kind}[..]`; known: size, shape, numel, epsilon", kind)
        return ex.Lookup(kind, names)

    def call(self, function: Token, *arguments: Any) -> ex.Expression:
        return ex.Call(function, tuple(argument for argument in arguments if argument is not None))

    def list(self, *items: Any) -> ex.Expression:
        return ex.Listing(tuple(item for item in items if item is not None))

    def negative(self, _minus: Token, value: ex.Expression) -> ex.Expression:
        return ex.Unary("-", value)

    def negation(self, value: ex.Expression) -> ex.Expression:
        return ex.Unary("not", value)

    def comparison(self, left: ex.Expression, sign: Any = None, right: Any = None) -> ex.Expression:
        return left if sign is None else ex.Binary(sign, left, right)

    def addition(self, first: ex.Expression, *rest: Any) -> ex.Expression:
        for sign, value in zip(rest[::2], rest[1::2], strict=True):
            first = ex.Binary(sign, first, value)
        return first

    term = addition

    def either(self, *values: ex.Expression) -> ex.Expression:
        return _chain("or", values)

    def both(self, *values: ex.Expression) -> ex.Expression:
        return _chain("and", values)

    def placement(self, *children: Any) -> Any:
        return ("product", children)

    def vector(self, name: Token, index: Token, *hidden: Any) -> Any:
        return ("vector", str(name), str(index), hidden)

    def matrix(self, name: Token, rows: Token, columns: Token) -> tuple[str, tuple[str, str]]:
        return (str(name), (str(rows), str(columns)))

    def axes(self, *names: Token) -> tuple[str, ...]:
        return tuple(map(str, names))

    def assignment(self, index: Token, axes: tuple[str, ...]) -> tuple[Token, tuple[str, ...]]:
        return (index, axes)

    def slot(self, matrix: Token, dim: Token) -> tuple[Token, Token]:
        return (matrix, dim)

    def state_clause(self, name: Token, *assignments: Any) -> Any:
        return ("state", name, assignments)

    def start_clause(self, state: Token, lookup: Any) -> Any:
        return ("start", state, lookup)

    def rest_clause(self, *slots: Any) -> Any:
        return ("rest", slots)

    def swap_clause(self, one: Token, other: Token) -> Any:
        return ("swap", one, other)

    def hidden(self, state: Token, index: Token, axes: Any, first: Any, second: Any) -> Any:
        return (state, index, axes, None if first is None else (str(first), str(second)))

    @call_with_children(inline=False)
    def start(self, children: list[Any]) -> list[Any]:
        return children


def _chain(sign: str, values: tuple[ex.Expression, ...]) -> ex.Expression:
    first, *rest = values
    for value in rest:
        first = ex.Binary(sign, first, value)
    return first


def plain(value: Any) -> Any:
    """Turn every token inside a value into a plain string."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)  # pyright: ignore[reportUnknownVariableType]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)})
    return value
