"""Parse rule files.

An entry names an op and gives its signature, one name for each argument of the op's schema in order (trailing arguments
with defaults may be left out), then clauses, one a line:

    op aten.linear(x[* k], w[n k], b?[n]) -> y[* n]
        sum k

Signature:
    x[* k]          a tensor, its dims named by factors; a factor named twice has one size
    *               any number of dims, aligned from the right and broadcast (size 1, or missing): `*0` (last), `*1`
    ...             any number of dims, never broadcast: factors `.0` (last), `.1`; dims whose sizes differ between
                    tensors are whole and apart
    (c*d)           one dim of two factors, c the major; sizes come from other dims, or as greatest common divisors
    1               a dim of size 1
    k~              a dim of k's size, or 1, or missing
    d@dim           the dim numbered by attribute `dim` (a number, a list, or None for all); `...@dims` permutes
    1@dim?keepdim   only there when `keepdim` is true
    b?[n]           may be None
    xs*[k] ys*[k]   a list of tensors; k' is another factor in each of them
    eps             no brackets: an attribute, a Python value
    or (..) -> ..   another form of the op, tried when ranks, sizes or `when` refuse the first

Clauses (a factor that none mentions is free):
    sum k [when condition]      splitting k leaves partial sums; `max k` partial maxima
    whole k [when condition]    k stays whole
    free k [when condition]     splitting k changes nothing (of an operand read for its dtype only)
    split h:                    then lines `name = expression`: how to run where h is split. sum[h](e), max[h](e) keep h
                                as a dim of size 1; size[h], epsilon[x], default(eps, 1e-5), to(x, dtype), detach(x),
                                arithmetic, comparisons, elementwise aten ops; an absent operand drops out of its sum or
                                product
    once b over k               only the first rank along k's axes adds b
    index ids into v            shift ids, mask, look up the local part
    random [when condition]     the result is drawn
    product [a b]               a matrix product (of these operands), placed by the placement file
    linear x y                  a sum pending in all of x and y passes; a second clause is an alternative
    local size = shape[y]       the attribute's value on one rank: shape[y], shape[y, dim], size[f], min, max, sum, len,
                                part(list, start, count)
    flops 2 * k * numel[y]      floating point operations
    when condition              the form applies only then; conditions read attributes and shape[x]
    regroup | repeat repeats    result dims regroup, or repeat, the operand's
    example x[12 24], dim = 1   inputs for check_rules, where the patterns do not say enough
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any, cast

from lark import Lark, Token
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken, VisitError

from partir.errors import RuleError
from partir.rules.source import Source
from partir.rules.transform import ToSyntax, plain

CLAUSES = (
    "sum max whole free once index random split flops product linear local regroup repeat when example".split() + "or op place".split()
)
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


def parse(text: str, path: str = "<rule>", start: str = "start") -> Any:
    """Parse rule text; raise RuleError with file, line, column and a caret where it is wrong.

    Returns a list of `Entry` and placement tuples for ``start="start"``, a `Form` for ``start="inline"``.
    """
    source = Source(path, text)
    try:
        tree: Any = cast(Any, _lark()).parse(text + "\n", start=start)
        result: Any = ToSyntax(source).transform(tree)
    except VisitError as error:
        if isinstance(error.orig_exc, RuleError):
            raise error.orig_exc from None
        raise
    except UnexpectedInput as error:
        raise _syntax_error(error, source) from None
    return plain(result) if start == "inline" else result


def _syntax_error(error: UnexpectedInput, source: Source) -> RuleError:
    """Say what stands at the place and what could stand there instead."""
    if isinstance(error, UnexpectedCharacters):
        return source.error(f"unexpected character `{source.character(error.line, error.column)}`", None, error.line, error.column)
    if not isinstance(error, UnexpectedToken):
        return source.error("the text ends too early", None, error.line, error.column)
    token: Any = cast(Any, error).token
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
