"""Parse rule files.

An entry names an op and gives its signature, one name for each argument of the op's schema in order (trailing arguments with
defaults may be left out), then clauses, one a line:

    op aten.linear(x[* k], w[n k], b?[n]) -> y[* n]
        sum k

Signature:
    x[* k]          a tensor, its dims named by factors; a factor named twice has one size
    *               any number of dims, aligned from the right and broadcast (size 1, or missing); they are factors `*0` (last), `*1`, ...
    ...             any number of dims, never broadcast; dims whose sizes differ between tensors are whole and apart
    (c*d)           one dim of two factors, c the major; unknown sizes come from the other dims, or as the greatest common divisor
    1               a dim of size 1                   k~          a dim of k's size, or 1, or missing
    d@dim           the dim numbered by attribute `dim` (one number, a list, or None for all); `...@dims` permutes
    1@dim?keepdim   only there when `keepdim` is true
    b?[n]           may be None                       xs*[k] ys*[k]   a list of tensors; k' is another factor in each of them
    eps             no brackets: an attribute, a Python value
    or (..) -> ..   another form of the op, tried when ranks, sizes or `when` refuse the first

Clauses (a factor that none mentions is free):
    sum k | max k | whole k [when condition]         splitting k leaves partial sums | maxima | is not possible
    free k                                           splitting k changes nothing (of an operand read for its dtype only)
    split h:  then  name = expression                how to run where h is split: sum[h](e), max[h](e) keep h as a dim of size 1,
                                                     size[h], epsilon[x], default(eps, 1e-5), to(x, dtype), detach(x), arithmetic,
                                                     comparisons, elementwise aten ops;
                                                     an absent operand drops out of the sum or product it stands in
    once b over k                                    only the first rank along k's axes adds b
    index ids into v                                 shift ids, mask, look up the local part
    random [when condition]                          the result is drawn
    product [a b]                                    a matrix product (of these operands), placed by the placement file
    linear x y                                       a sum pending in all of x and y passes; a second clause is an alternative
    local size = shape[y]                            the attribute's value on one rank: shape[y], shape[y, dim], size[f], min, max, sum, len,
                                                     part(list, start, count)
    flops 2 * k * numel[y]                           floating point operations
    when condition                                   the form applies only then
    regroup | repeat repeats                         result dims regroup, or repeat, the operand's
    example x[12 24], dim = 1                        inputs for check_rules, where the patterns do not say enough
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

from lark import Lark, Token, Transformer, v_args
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken, VisitError

from partir.errors import RuleError
from partir.rules import expressions as ex
from partir.rules import syntax as sx
from partir.rules.source import Source
from partir.rules.validate import check_form

CLAUSES = "sum max whole free once index random split flops product linear local regroup repeat when example or op place".split()
PLACE_CLAUSES = "state start rest swap hidden".split()


class _DropNewlinesInBrackets:
    """Drop newline tokens inside brackets, so that a long signature may go over several lines."""

    always_accept = ("_NL",)

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        depth = 0
        for token in stream:
            depth += (token.type in ("LPAR", "LSQB")) - (token.type in ("RPAR", "RSQB"))
            if token.type != "_NL" or depth <= 0 or token == ";":
                yield token


@cache
def _lark() -> Lark:
    text = resources.files("partir.rules").joinpath("grammar.lark").read_text(encoding="utf-8")
    return Lark(text, parser="lalr", start=["start", "inline"], postlex=_DropNewlinesInBrackets(), maybe_placeholders=True)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One `op` entry: the names that share its forms, with where it stands."""

    names: tuple[str, ...]
    forms: tuple[sx.Form, ...]
    where: str = ""


@v_args(inline=True)
class _ToSyntax(Transformer[Token, Any]):
    """Turn the parse tree into values of syntax.py (names stay tokens, which know their place, until they are checked)."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source

    def path(self, *names: Token) -> Token:
        return names[0].update(value=".".join(names))

    @v_args(inline=False)
    def operation(self, children: list[Any]) -> Entry:
        paths = [child for child in children if isinstance(child, Token)]
        forms = [child for child in children if isinstance(child, sx.Form)]
        return Entry(tuple(map(str, paths)), tuple(_plain(form) for form in forms), self.source.at(paths[0].line or 0))

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

    @v_args(inline=False)
    def start(self, children: list[Any]) -> list[Any]:
        return children


def _chain(sign: str, values: tuple[ex.Expression, ...]) -> ex.Expression:
    first, *rest = values
    for value in rest:
        first = ex.Binary(sign, first, value)
    return first


def _plain(value: Any) -> Any:
    """Turn every token inside a value into a plain string."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)  # pyright: ignore[reportUnknownVariableType]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)})
    return value


def parse(text: str, path: str = "<rule>", start: str = "start") -> Any:
    """Parse rule text; raise RuleError with file, line, column and a caret where it is wrong.

    Returns a list of `Entry` and placement tuples for ``start="start"``, a `Form` for ``start="inline"``.
    """
    source = Source(path, text)
    try:
        tree = _lark().parse(text + "\n", start=start)
        result = _ToSyntax(source).transform(tree)
    except VisitError as error:
        if isinstance(error.orig_exc, RuleError):
            raise error.orig_exc from None
        raise
    except UnexpectedInput as error:
        raise _syntax_error(error, source) from None
    return _plain(result) if start == "inline" else result


def _syntax_error(error: UnexpectedInput, source: Source) -> RuleError:
    """Say what stands at the place and what could stand there instead."""
    if isinstance(error, UnexpectedCharacters):
        return source.error(f"unexpected character `{source.character(error.line, error.column)}`", None, error.line, error.column)
    if not isinstance(error, UnexpectedToken):
        return source.error("the text ends too early", None, error.line, error.column)
    token = error.token
    accepts = {str(name) for name in (error.accepts or error.expected or ())}
    if token.type == "NAME" and {"SUM", "WHOLE"} <= accepts and "LPAR" not in accepts:
        return source.error(f"unknown clause `{token}`; known: {', '.join(CLAUSES)}", token)
    if token.type == "NAME" and "STATE" in accepts:
        return source.error(f"unknown clause `{token}`; known: {', '.join(PLACE_CLAUSES)}", token)
    if token.type == "NAME" and accepts <= {"OP", "PLACE", "$END", "_NL"}:
        return source.error(f"unknown entry `{token}`; an entry starts with `op` or `place`", token)
    found = "end of line" if token.type in ("_NL", "$END") else f"`{token}`"
    return source.error(f"unexpected {found}; expected {', '.join(sorted(_spell(name) for name in accepts))}", token)


def _spell(terminal: str) -> str:
    """Write a terminal as it looks in text."""
    for definition in _lark().terminals:
        if definition.name == terminal and definition.pattern.type == "str":
            return f"`{definition.pattern.value}`"
    return {"_NL": "end of line", "$END": "end of text", "NAME": "a name", "NUMBER": "a number"}.get(terminal, terminal.lower())
