"""Inputs for trying a rule: tensors made from the patterns of a form and its `example` clause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch

from partir.rules import expressions as ex
from partir.rules import syntax as sx
from partir.rules.rule import Rule

SIZE = 12


@dataclass(frozen=True)
class Trial:
    """One call to try: the arguments by position and by keyword."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among the arguments, lists flattened."""
        found: list[torch.Tensor] = []
        for value in (*self.args, *self.kwargs.values()):
            items: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
            found += [item for item in items if isinstance(item, torch.Tensor)]
        return found


def make_trial(rule: Rule, form: sx.Form, generator: torch.Generator) -> Trial | str:
    """Return a call that fits the form, or say why none could be made."""
    example = next((clause for clause in form.clauses if isinstance(clause, sx.Example)), sx.Example())
    shapes = {name: (shape, dtype) for name, shape, dtype in example.tensors}
    given = {name: ex.evaluate(value, {}) for name, value in example.values}
    indexed = {clause.operand: clause.factor for clause in form.clauses if isinstance(clause, sx.Index)}
    values: dict[str, Any] = {}
    for pattern, argument in zip(form.parameters, rule.schema.arguments, strict=False):
        if pattern.dims is None:
            value = given.get(pattern.name, argument.default_value if argument.has_default_value() else _guess(argument))
            if value is _UNKNOWN:
                return f"no example value for attribute `{pattern.name}`"
        elif pattern.optional and pattern.name not in shapes and "mask" in pattern.name:
            value = None
        else:
            value = _tensor(pattern, shapes, indexed, str(argument.type), generator)
        values[argument.name] = value
    keyword = {argument.name for argument in rule.schema.arguments if argument.kwarg_only}
    args = tuple(value for name, value in values.items() if name not in keyword)
    return Trial(args, {name: value for name, value in values.items() if name in keyword})


_UNKNOWN = object()


def _guess(argument: Any) -> Any:
    """Guess a value for an attribute without example or default."""
    kind = str(argument.type)
    return {"bool": True, "int": 1, "float": 0.5, "Optional[int]": None, "Optional[List[int]]": None}.get(kind, _UNKNOWN)


def _tensor(
    pattern: sx.Pattern,
    shapes: Mapping[str, tuple[tuple[int, ...], str]],
    indexed: Mapping[str, str],
    kind: str,
    generator: torch.Generator,
) -> Any:
    shape, dtype = shapes.get(pattern.name, (auto_shape(pattern), ""))
    if pattern.name in indexed or pattern.name in ("ids", "at"):
        dtype = "int"
    if kind == "number":
        return 2.0
    count = 1 if pattern.name in indexed or not pattern.listed else 2
    tensors = [random_tensor(shape, dtype, generator) for _ in range(count)]
    return tensors if pattern.listed else tensors[0]


def auto_shape(pattern: sx.Pattern) -> tuple[int, ...]:
    """Return a shape that fits a pattern: 12 for each factor, two dims for `*` and one for each `...`."""
    shape: list[int] = []
    wilds = sum(item.wild for item in pattern.dims or ())
    for item in pattern.dims or ():
        if item.wild:
            shape += [SIZE] if wilds > 1 or len(pattern.dims or ()) > 2 else [SIZE, SIZE]
        else:
            shape.append(SIZE ** max(len(item.factors), 1) if item.factors else 1)
    return tuple(shape)


def random_tensor(shape: tuple[int, ...], kind: str, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers in float64, or what an example's kind says.

    int: ids below 12; range: 0 1 2 ...; one: 1 2 3 ... along the last dim (pivots); bool: every row partly true;
    unit: between 0 and 1; sorted: ascending along the last dim; definite: symmetric with a large diagonal; complex.
    """
    if kind == "int":
        return torch.randint(0, SIZE, shape, generator=generator)
    if kind in ("range", "one"):
        first = int(kind == "one")
        return torch.arange(first, shape[-1] + first, dtype=torch.int32 if first else torch.int64).expand(shape).clone()
    values = torch.rand(shape, generator=generator, dtype=torch.float64)
    if kind == "bool":
        return values > 0.3
    if kind == "unit":
        return values
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    signed = (values + 0.1) * signs if prod(shape) > 1 else values + 0.1
    if kind == "sorted":
        return signed.sort(-1).values
    if kind == "definite":
        return signed + signed.mT + torch.eye(shape[-1], dtype=torch.float64) * 4 * shape[-1]
    return torch.complex(signed, values) if kind == "complex" else signed
