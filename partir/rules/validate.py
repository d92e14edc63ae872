"""Check the form of an entry: names known, no name twice, every factor that vanishes accounted for."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from partir.rules import expressions as ex
from partir.rules import syntax as sx
from partir.rules.ops import is_packet, overloads
from partir.rules.source import Source

FUNCTIONS = ("default", "to", "detach")


def check_form(form: sx.Form, source: Source) -> None:
    """Raise RuleError at the first name of a form that is wrong."""
    _check_names(form, source)
    _check_places(form, source)
    for clause in form.clauses:
        _check_clause(clause, form, source)
    _check_mentions(form, source)
    _check_vanishing(form, source)


def factor_names(form: sx.Form) -> dict[str, None]:
    """Return every factor of a form, in order (`*` and `...` among them)."""
    patterns = (*form.operands(), *form.results)
    return {factor: None for pattern in patterns for item in pattern.dims or () for factor in item.factors}


def attribute_names(form: sx.Form) -> set[str]:
    """Return the parameters that are Python values."""
    return {pattern.name for pattern in form.parameters if pattern.dims is None}


def _check_names(form: sx.Form, source: Source) -> None:
    seen: set[str] = set()
    for pattern in (*form.parameters, *form.results):
        if pattern.name in seen:
            raise source.error(f"the name `{pattern.name}` stands twice in one signature", pattern.name)
        seen.add(pattern.name)


def _check_places(form: sx.Form, source: Source) -> None:
    attributes = attribute_names(form)
    for pattern in (*form.operands(), *form.results):
        if sum(item.factors == (sx.STAR,) for item in pattern.dims or ()) > 1:
            raise source.error(f"`{pattern.name}` has `*` twice", pattern.name)
        for item in pattern.dims or ():
            for name in (item.at, item.present):
                if name is not None and name not in attributes:
                    raise source.error(f"unknown attribute `{name}`; this op has {_spell(attributes)}", name)
            for factor in item.factors:
                if factor.endswith("'") and not pattern.listed:
                    raise source.error(f"`{factor}` differs in each tensor of a list, and `{pattern.name}` is no list", factor)


def _check_clause(clause: sx.Clause, form: sx.Form, source: Source) -> None:
    operands = {pattern.name for pattern in form.operands()}
    match clause:
        case sx.Factors(_, factors, condition):
            _check_known_factors(factors, form, source)
            _check_condition(condition, form, source)
        case sx.Once(operand, factors):
            _check_operands((operand,), operands, source)
            _check_known_factors(factors, form, source)
        case sx.Index(operand, factor):
            _check_operands((operand,), operands, source)
            _check_known_factors((factor,), form, source)
        case sx.Random(condition) | sx.When(condition):
            _check_condition(condition, form, source)
        case sx.Product(names) if names is not None:
            _check_operands(names, operands, source)
        case sx.Linear(names):
            _check_operands(names, operands, source)
        case sx.Local(attribute, value):
            _check_attribute(attribute, form, source)
            _check_values(value, form, source)
        case sx.Repeat(attribute):
            _check_attribute(attribute, form, source)
        case sx.Flops(value):
            _check_values(value, form, source)
        case sx.Split():
            _check_recipe(clause, form, source)
        case sx.Example(tensors, values):
            _check_operands([name for name, _, _ in tensors], operands, source)
            for name, _ in values:
                if name not in attribute_names(form) | operands:
                    raise source.error(f"unknown parameter `{name}`; this op has {_spell(attribute_names(form) | operands)}", name)
        case _:
            pass


def _check_known_factors(factors: tuple[str, ...], form: sx.Form, source: Source) -> None:
    known = factor_names(form)
    for factor in factors:
        if factor not in known:
            raise source.error(f"unknown factor `{factor}`; this op has {_spell(known)}", factor)


def _check_operands(names: object, operands: set[str], source: Source) -> None:
    for name in names:  # type: ignore[attr-defined]
        if name not in operands:
            raise source.error(f"unknown operand `{name}`; this op has {_spell(operands)}", name)


def _check_attribute(name: str, form: sx.Form, source: Source) -> None:
    if name not in attribute_names(form):
        raise source.error(f"unknown attribute `{name}`; this op has {_spell(attribute_names(form))}", name)


def _check_condition(condition: ex.Expression | None, form: sx.Form, source: Source) -> None:
    lists = {pattern.name for pattern in form.operands() if pattern.listed}
    for part in ex.walk(condition) if condition is not None else ():
        if isinstance(part, ex.Name) and part.name not in lists:
            _check_attribute(part.name, form, source)
        if isinstance(part, ex.Call):
            _check_list_function(part, source)
        if isinstance(part, ex.Lookup) and part.kind == "shape" and len(part.names) == 1:
            _check_operands(part.names, {pattern.name for pattern in form.operands()} - lists, source)
        elif isinstance(part, ex.Lookup | ex.Reduce):
            raise source.error("a condition reads attributes, and shape[x] of operands, only", _token(part))


def _check_list_function(call: ex.Call, source: Source) -> None:
    if call.function not in (*ex.LIST_FUNCTIONS, "default"):
        raise source.error(f"unknown function `{call.function}`; known here: {', '.join(ex.LIST_FUNCTIONS)}, default", call.function)


def _check_values(value: ex.Expression, form: sx.Form, source: Source) -> None:
    """Check the names of a `local` or `flops` expression."""
    known = set(factor_names(form)) | attribute_names(form)
    tensors = {pattern.name for pattern in (*form.operands(), *form.results)}
    for part in ex.walk(value):
        if isinstance(part, ex.Name) and part.name not in known:
            raise source.error(f"unknown name `{part.name}`; this op has {_spell(known)}", part.name)
        if isinstance(part, ex.Call):
            _check_list_function(part, source)
        if isinstance(part, ex.Lookup):
            wanted = known if part.kind == "size" else tensors
            if part.names[0] not in wanted:
                raise source.error(f"unknown name `{part.names[0]}`; {part.kind}[..] knows {_spell(wanted)}", part.names[0])


def _check_recipe(split: sx.Split, form: sx.Form, source: Source) -> None:
    _check_known_factors((split.factor,), form, source)
    names = {pattern.name for pattern in form.parameters}
    for name, value in split.statements:
        for part in ex.walk(value):
            _check_recipe_part(part, names, form, source)
        names.add(name)
    assigned = {name for name, _ in split.statements}
    for pattern in form.results:
        if pattern.name not in assigned:
            raise source.error(f"the recipe for `{split.factor}` never assigns the result `{pattern.name}`", split.factor)


def _check_recipe_part(part: ex.Expression, names: set[str], form: sx.Form, source: Source) -> None:
    match part:
        case ex.Name(name) if name not in names:
            raise source.error(f"unknown name `{name}`; known here: {_spell(names)}", name)
        case ex.Reduce(_, factors, _) | ex.Lookup("size", factors):
            _check_known_factors(factors, form, source)
        case ex.Call(function, _) if function not in FUNCTIONS and not is_elementwise(function):
            raise source.error(f"unknown function `{function}`: no elementwise aten op has this name", function)
        case _:
            pass


def is_elementwise(name: str) -> bool:
    """Whether an aten op of this name is tagged pointwise (and so may stand in a recipe)."""
    packet = getattr(torch.ops.aten, name, None) if not name.startswith("_") else None
    return is_packet(packet) and any(torch.Tag.pointwise in overload.tags for overload in overloads(packet))


def _mentioned(form: sx.Form) -> Iterator[tuple[str, sx.Clause, bool]]:
    """Yield each factor that a clause accounts for, and whether always."""
    for clause in form.clauses:
        if isinstance(clause, sx.Factors):
            yield from ((factor, clause, clause.condition is None) for factor in clause.factors)
        if isinstance(clause, sx.Split):
            yield (clause.factor, clause, True)


def _check_mentions(form: sx.Form, source: Source) -> None:
    seen: dict[str, str] = {}
    for factor, clause, always in _mentioned(form):
        kind = clause.kind if isinstance(clause, sx.Factors) else "split"
        if {seen.get(factor), kind} == {"max", "split"}:
            continue  # the maximum where no gradient is wanted, the recipe where one is
        if factor in seen and always:
            raise source.error(f"factor `{factor}` is in two clauses: {seen[factor]} and {kind}", factor)
        if always:
            seen[factor] = kind


def _check_vanishing(form: sx.Form, source: Source) -> None:
    """A factor that no result keeps must be summed, maximised, whole or split by a recipe."""
    if any(isinstance(clause, sx.Regroup | sx.Repeat) for clause in form.clauses):
        return
    kept = {factor for pattern in form.results for item in pattern.dims or () for factor in item.factors}
    kept |= {factor for factor, _, _ in _mentioned(form)}
    for factor in factor_names(form):
        if factor not in kept:
            raise source.error(f"factor `{factor}` does not reach a result: say sum, max, whole, free or split", factor)


def _token(part: ex.Expression) -> str | None:
    return part.kind if isinstance(part, ex.Lookup | ex.Reduce) else None


def _spell(names: object) -> str:
    listed = sorted(str(name) for name in names)  # type: ignore[attr-defined]
    return ", ".join(listed) if listed else "none"
