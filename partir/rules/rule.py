"""A rule: the forms of one op, bound to a node's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from partir.errors import RuleError
from partir.rules import expressions as ex
from partir.rules import syntax as sx
from partir.rules.binding import Binding, Body, MatrixProduct
from partir.rules.match import Matching, Mismatch
from partir.rules.regroup import regroup


@dataclass(frozen=True)
class Rule:
    """The rule of one op. `str(rule)` is its text."""

    name: str
    forms: tuple[sx.Form, ...]
    where: str = field(default="", compare=False)
    schema: Any = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"op {self.name}" + "\nor ".join(map(str, self.forms))

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any) -> Binding:
        """Return what the rule says about one call.

        Args:
            args, kwargs: the call's arguments, (fake) tensors in place of nodes; defaults come from the op's schema.
            results: the (fake) result: a tensor, or a tuple or list of tensors.

        Raises:
            RuleError: no form of the rule fits these ranks, sizes and attributes.
        """
        if self.schema is None:
            raise RuleError(f"{self.name}: a rule without an op cannot be bound; take it from rules.find(op)")
        values = _arguments(self.schema, args, kwargs)
        reasons: list[str] = []
        for form in self.forms:
            try:
                return _Binder(self, form, values).bind(results)
            except Mismatch as reason:
                reasons.append(f"{form.signature}: {reason}")
        shapes = ", ".join(f"{name}{list(value.shape)}" for name, value in values.items() if isinstance(value, torch.Tensor))
        raise RuleError(f"{self.where}: the rule of {self.name} does not fit {shapes}\n  " + "\n  ".join(reasons))


def _arguments(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return every argument of the call by its schema name, in schema order."""
    values: dict[str, Any] = {}
    for number, argument in enumerate(schema.arguments):
        if number < len(args):
            values[argument.name] = args[number]
        else:
            values[argument.name] = kwargs.get(argument.name, argument.default_value)
    return values


@dataclass
class _Binder:
    """One form being bound."""

    rule: Rule
    form: sx.Form
    values: dict[str, Any]

    def bind(self, results: Any) -> Binding:
        schema_names = dict(zip((pattern.name for pattern in self.form.parameters), self.values, strict=False))
        self.attributes = {name: self.values[real] for name, real in schema_names.items()}
        for clause in self._of(sx.When):
            if not self._holds(clause.condition):
                raise Mismatch(f"not `{clause}`")
        self.matching = Matching(self.attributes)
        self.names: list[str] = []
        self.positions: list[tuple[str, int | None]] = []
        self._match_operands(schema_names)
        result_names = self._match_results(results)
        operands, outputs, sizes, whole = self._solve()
        self.sizes = sizes
        sums, maxima, rest, offsets = (self._factors(kind) for kind in ("sum", "max", "whole", "offset"))
        linear = self._linear()
        return Binding(
            rule=self.rule.name,
            operands=operands,
            positions=tuple(self.positions),
            names=tuple(self.names),
            results=outputs,
            result_names=result_names,
            sizes=sizes,
            attributes=self._plain_attributes(schema_names),
            schema_names=schema_names,
            whole=whole | rest | offsets,
            offsets=offsets,
            sums=sums,
            maxima=maxima,
            once=tuple((place, self._known(clause.factors)) for clause in self._of(sx.Once) for place in self._places(clause.operand)),
            index=tuple(self._index(operands)),
            random=any(self._holds(clause.condition) for clause in self._of(sx.Random)),
            splits=self._splits(),
            local={schema_names[clause.attribute]: clause.value for clause in self._of(sx.Local)},
            product=self._product(operands, outputs, sums),
            linear=linear[0] if linear else frozenset(),
            linear_groups=linear,
            groups={name: tuple(f for f in self.matching.group(name) if f in sizes) for name in self.matching.groups},
            flops_expression=next((clause.value for clause in self._of(sx.Flops)), None),
        )

    def _plain_attributes(self, schema_names: Mapping[str, str]) -> dict[str, Any]:
        """Return the arguments that are no tensors: by the rule's names, those it leaves out by the schema's."""
        named = set(schema_names.values())
        values = {**self.attributes, **{name: value for name, value in self.values.items() if name not in named}}
        return {name: value for name, value in values.items() if not _holds_tensors(value)}

    def _of(self, kind: type[Any]) -> list[Any]:
        return [clause for clause in self.form.clauses if isinstance(clause, kind)]

    def _holds(self, condition: ex.Expression | None) -> bool:
        return condition is None or bool(ex.evaluate(condition, self.attributes, self._shape))

    def _shape(self, kind: str, names: tuple[str, ...]) -> list[int]:
        """Return the global sizes of an operand: what `shape[x]` means in a condition."""
        return [int(size) for size in self.attributes[names[0]].shape]

    def _match_operands(self, schema_names: Mapping[str, str]) -> None:
        for pattern in self.form.operands():
            value = self.attributes[pattern.name]
            listed = list(cast("Sequence[Any]", value)) if isinstance(value, list | tuple) else [value]
            for number, tensor in enumerate(listed):
                if isinstance(tensor, torch.Tensor):
                    self._add_operand(pattern, tensor, schema_names[pattern.name], number if pattern.listed else None)
                elif tensor is None and not pattern.optional:
                    raise Mismatch(f"{pattern.name} is None")
        missed = [name for name, value in self.attributes.items() if _holds_tensors(value) and name not in self.names]
        missed += [name for name, value in list(self.values.items())[len(self.form.parameters) :] if _holds_tensors(value)]
        if missed:
            raise Mismatch(f"the rule does not say how tensor {missed[0]} is split")

    def _add_operand(self, pattern: sx.Pattern, tensor: torch.Tensor, real: str, element: int | None) -> None:
        self.matching.add(pattern, tensor.shape, element)
        self.names.append(pattern.name)
        self.positions.append((real, element))

    def _match_results(self, results: Any) -> tuple[tuple[str, int | None], ...]:
        listed: list[Any] = list(results) if isinstance(results, list | tuple) else [results]  # pyright: ignore
        names: list[tuple[str, int | None]] = []
        if len(self.form.results) == 1 and self.form.results[0].listed:
            patterns = [(self.form.results[0], number) for number in range(len(listed))]
        else:
            patterns = [(pattern, None) for pattern in self.form.results]
        if len(patterns) != len(listed):
            raise Mismatch(f"the rule has {len(patterns)} results, the op {len(listed)}")
        for (pattern, number), tensor in zip(patterns, listed, strict=True):
            if tensor is None:
                continue
            self.matching.add(pattern, tensor.shape, number)
            names.append((pattern.name, number))
        return tuple(names)

    def _solve(self) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, int], frozenset[str]]:
        """Return the dims of operands and results, the sizes, and the factors found to be whole."""
        if self._of(sx.Regroup):
            before, after = ([slot.size for slot in tensor] for tensor in self.matching.tensors)
            found = regroup(before, after)
            self.matching.groups[sx.REST] = dict.fromkeys(found.sizes)
            return (found.before,), (found.after,), found.sizes, found.whole
        for clause in self._of(sx.Repeat):
            return self._repeat(self.attributes[clause.attribute])
        dims, sizes = self.matching.solve()
        count = len(self.names)
        whole = frozenset(factor for factor in self.matching.whole if factor in sizes)
        return tuple(dims[:count]), tuple(dims[count:]), sizes, whole

    def _repeat(self, repeats: Sequence[int]) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, int], frozenset[str]]:
        """Each result dim is (copies, operand dim), the copies whole."""
        before, after = ([slot.size for slot in tensor] for tensor in self.matching.tensors)
        sizes: dict[str, int] = {}
        dims: list[tuple[str, ...]] = []
        for place, (copies, size) in enumerate(zip(reversed(repeats), reversed([1] * (len(after) - len(before)) + before), strict=True)):
            pair = ((f"r{place}", copies), (f"*{place}", size))
            sizes |= {name: count for name, count in pair if count != 1}
            dims.append(tuple(name for name, count in pair if count != 1))
        after_dims = tuple(reversed(dims))
        before_dims = tuple(tuple(name for name in dim if name[0] == "*") for dim in after_dims[len(after) - len(before) :])
        self.matching.groups[sx.STAR] = {name: None for name in sizes if name[0] == "*"}
        return (before_dims,), (after_dims,), sizes, frozenset(name for name in sizes if name[0] == "r")

    def _known(self, factors: Sequence[str]) -> frozenset[str]:
        return frozenset(name for factor in factors for name in self.matching.group(factor) if name in self.sizes)

    def _factors(self, kind: str) -> frozenset[str]:
        clauses = [clause for clause in self._of(sx.Factors) if clause.kind == kind and self._holds(clause.condition)]
        return frozenset(name for clause in clauses for name in self._known(clause.factors))

    def _places(self, operand: str) -> list[int]:
        return [place for place, name in enumerate(self.names) if name == operand]

    def _index(self, operands: Sequence[Any]) -> list[tuple[int, int, str]]:
        found: list[tuple[int, int, str]] = []
        for clause in self._of(sx.Index):
            factors = sorted(self._known((clause.factor,)))
            if len(factors) > 1:
                raise Mismatch(f"`{clause}`: ids number one dim, and {clause.factor} stands for {len(factors)} here")
            for factor in factors:
                ids = self._places(clause.operand)
                tables = [place for place, dims in enumerate(operands) if any(factor in dim for dim in dims)]
                found += [(ids[0], table, factor) for table in tables[:1] if ids]
        return found

    def _splits(self) -> dict[str, Body]:
        bodies: dict[str, Body] = {}
        for clause in self._of(sx.Split):
            statements = tuple((name, self._expand(value)) for name, value in clause.statements)
            body = Body(statements, tuple(pattern.name for pattern in self.form.results))
            bodies |= dict.fromkeys(sorted(self._known((clause.factor,))), body)
        return bodies

    def _expand(self, value: ex.Expression) -> ex.Expression:
        """Write the node's own factors for those of the rule's text."""
        match value:
            case ex.Reduce(kind, factors, inner):
                return ex.Reduce(kind, tuple(sorted(self._known(factors))), self._expand(inner))
            case ex.Lookup("size", factors):
                return ex.Lookup("size", tuple(sorted(self._known(factors))))
            case ex.Call(function, arguments):
                return ex.Call(function, tuple(map(self._expand, arguments)))
            case ex.Binary(sign, left, right):
                return ex.Binary(sign, self._expand(left), self._expand(right))
            case ex.Unary(sign, inner):
                return ex.Unary(sign, self._expand(inner))
            case _:
                return value

    def _linear(self) -> tuple[frozenset[int], ...]:
        groups: list[frozenset[int]] = []
        for clause in self._of(sx.Linear):
            places = [self._places(operand) for operand in clause.operands]
            if all(places):
                groups.append(frozenset(place for found in places for place in found))
        return tuple(groups)

    def _product(self, operands: Sequence[Any], results: Sequence[Any], sums: frozenset[str]) -> MatrixProduct | None:
        clauses = self._of(sx.Product)
        if not clauses:
            return None
        names = clauses[0].operands or tuple(pattern.name for pattern in self.form.operands())[:2]
        a, b = (self._places(name)[0] for name in names)
        flat = [[factor for dim in operands[place] for factor in dim] for place in (a, b)]
        kept = {factor for dim in results[0] for factor in dim}
        m = tuple(factor for factor in flat[0] if factor in kept and factor not in flat[1])
        n = tuple(factor for factor in flat[1] if factor in kept and factor not in flat[0])
        k = tuple(factor for factor in flat[1] if factor in sums)
        return MatrixProduct(m, k, n, a, b) if not kept & set(flat[0]) & set(flat[1]) else None


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(isinstance(item, torch.Tensor) for item in cast("Sequence[Any]", value))
    return isinstance(value, torch.Tensor)
