"""A rule applied to one node: the factors of each dim and what splitting each factor means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import sympy  # pyright: ignore[reportMissingTypeStubs]

from partir.errors import RuleError
from partir.rules.expressions import Binary, Call, Constant, Expression, Lookup, Name, Unary, evaluate

Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Body:
    """A recipe: assignments in order, reductions already over the node's own factors; run it with `recipe.run_body`."""

    statements: tuple[tuple[str, Expression], ...]
    results: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(f"{name} = {value}" for name, value in self.statements)


@dataclass(frozen=True)
class MatrixProduct:
    """The factors of a matrix product ``C[m, n] = sum_k A[m, k] B[k, n]`` and which operands A and B are."""

    m: tuple[str, ...]
    k: tuple[str, ...]
    n: tuple[str, ...]
    a: int
    b: int


@dataclass(frozen=True)
class Binding:
    """What a rule says about one node.

    operands, results: the factors of each dim of each tensor; ``()`` is a dim of size 1, ``("c", "d")`` a product.
    positions: the schema argument of each operand, and its place when that is a list.
    names: the name that the rule's text gives each operand.
    attributes: the value of each attribute, by the rule's name (by the schema's for
        arguments that the rule leaves out); schema_names: rule's name -> schema's.
    sizes: the global size of each factor.
    offsets: those of `whole` whose parts a rank can compute after all, from where its part begins.
    whole, sums, maxima: factors that stay whole, or leave pending sums or maxima when split; all others are free.
    once: (operand, factors): where one of them is split only the first rank uses the operand.
    index: (ids operand, table operand, factor).
    splits: the recipe to run where the factor is split.
    local: attribute (schema name) -> expression; see `localise`.
    linear: operands through which a pending sum passes, when pending in all of them; linear_groups: every alternative.
    """

    rule: str
    operands: tuple[Dims, ...]
    positions: tuple[tuple[str, int | None], ...]
    names: tuple[str, ...]
    results: tuple[Dims, ...]
    result_names: tuple[tuple[str, int | None], ...]
    sizes: Mapping[str, int]
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    schema_names: Mapping[str, str] = field(default_factory=dict[str, str])
    whole: frozenset[str] = frozenset()
    offsets: frozenset[str] = frozenset()
    sums: frozenset[str] = frozenset()
    maxima: frozenset[str] = frozenset()
    once: tuple[tuple[int, frozenset[str]], ...] = ()
    index: tuple[tuple[int, int, str], ...] = ()
    random: bool = False
    splits: Mapping[str, Body] = field(default_factory=dict[str, Body])
    local: Mapping[str, Expression] = field(default_factory=dict[str, Expression])
    product: MatrixProduct | None = None
    linear: frozenset[int] = frozenset()
    linear_groups: tuple[frozenset[int], ...] = ()
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    flops_expression: Expression | None = None

    @cached_property
    def unsplit(self) -> frozenset[str]:
        """Factors that no rank may hold in part, whatever is put in the op's place."""
        return self.whole - self.offsets - frozenset(self.splits)

    @cached_property
    def free(self) -> frozenset[str]:
        """Factors whose split moves nothing and leaves nothing pending."""
        return frozenset(self.sizes) - self.whole - self.sums - self.maxima - frozenset(self.splits)

    def localise(self, local_sizes: Mapping[str, int]) -> dict[str, Any]:
        """Return the attributes (by schema name) that change where factors have these sizes on a rank.

        Args:
            local_sizes: factor -> size on one rank; factors left out keep their global size.
        """
        sizes = {**self.sizes, **local_sizes}
        lookup = _Sizes(self, sizes)
        return {name: evaluate(value, {**self.attributes, **sizes}, lookup) for name, value in self.local.items()}

    def shape(self, dims: Dims, local_sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of a tensor of these dims where factors have these sizes."""
        sizes = {**self.sizes, **local_sizes}
        return tuple(prod(sizes[factor] for factor in dim) for dim in dims)

    def flops(self) -> sympy.Expr | None:
        """Return the floating point operations in symbols named like the factors, None where the rule does not say."""
        return None if self.flops_expression is None else _to_sympy(self.flops_expression, self)

    def num_flops(self, local_sizes: Mapping[str, int] | None = None) -> int | None:
        """Return the floating point operations for these factor sizes (the global ones by default)."""
        value = self.flops()
        if value is None:
            return None
        sizes = {**self.sizes, **(local_sizes or {})}
        return int(value.subs({sympy.Symbol(name, positive=True): size for name, size in sizes.items()}))


@dataclass(frozen=True)
class _Sizes:
    """The meaning of ``size[f]``, ``shape[y]``, ``shape[y, dim]`` and ``numel[y]`` for given sizes."""

    binding: Binding
    sizes: Mapping[str, int]

    def __call__(self, kind: str, names: tuple[str, ...]) -> Any:
        if kind == "size":
            return prod(self.sizes[factor] for name in names for factor in self.binding.groups.get(name, ()))
        shapes = self._shapes(names[0])
        if len(names) == 2:
            at = names[1]
            dim = int(at) if at.isdigit() else self.binding.attributes[at]
            shapes = [shape[dim] for shape in shapes]
        if kind == "numel":
            return sum(prod(shape) for shape in shapes)
        return shapes if self._listed(names[0]) else shapes[0]

    def _tensors(self, name: str) -> list[tuple[Dims, int | None]]:
        binding = self.binding
        results = zip(binding.results, binding.result_names, strict=True)
        operands = zip(binding.operands, binding.names, binding.positions, strict=True)
        found = [(dims, place) for dims, (known, place) in results if known == name]
        return found or [(dims, place) for dims, known, (_, place) in operands if known == name]

    def _listed(self, name: str) -> bool:
        return any(place is not None for _, place in self._tensors(name))

    def _shapes(self, name: str) -> list[Any]:
        return [list(self.binding.shape(dims, self.sizes)) for dims, _ in self._tensors(name)]


def _to_sympy(expression: Expression, binding: Binding) -> sympy.Expr:
    """Build a sympy expression from the parse tree (never from text)."""
    match expression:
        case Constant(value) if isinstance(value, int | float):
            return sympy.Integer(value) if isinstance(value, int) else sympy.Float(value)
        case Name(name) if name in binding.groups:
            return _symbols(binding.groups[name])
        case Name(name) if isinstance(binding.attributes.get(name), int | float):
            return sympy.Float(binding.attributes[name])
        case Lookup("size", names):
            return sympy.Mul(*(_symbols(binding.groups.get(name, ())) for name in names))
        case Lookup("numel", (name,)):
            names = [*(known for known, _ in binding.result_names), *binding.names]
            both = zip((*binding.results, *binding.operands), names, strict=True)
            return sympy.Add(*(_symbols([f for dim in dims for f in dim]) for dims, known in both if known == name))
        case Unary("-", value):
            return -_to_sympy(value, binding)
        case Binary(sign, left, right) if sign in "+-*/":
            one, other = _to_sympy(left, binding), _to_sympy(right, binding)
            return {"+": one + other, "-": one - other, "*": one * other, "/": one / other}[sign]
        case Call():
            return sympy.Float(evaluate(expression, binding.attributes))
        case _:
            raise RuleError(f"{binding.rule}: `{expression}` has no meaning in flops")


def _symbols(factors: Sequence[str]) -> sympy.Expr:
    return sympy.Mul(*(sympy.Symbol(factor, positive=True) for factor in factors))
