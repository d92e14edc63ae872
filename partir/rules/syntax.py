"""The values that rule text parses into: frozen, and printed back as rule text."""

from __future__ import annotations

from dataclasses import dataclass, field

from partir.rules.expressions import Expression

REST = "..."
STAR = "*"


@dataclass(frozen=True)
class Item:
    """One item of a dims pattern: ``k``, ``(c*d)``, ``1``, ``*``, ``...``, ``~`` (may be 1), ``@attribute`` (place).

    factors: the factor names, major to minor; ``()`` for ``1``, ``("*",)`` and ``("...",)`` for any number of dims.
    at: the attribute that numbers the dim, or orders the dims of ``...``.
    present: the attribute that must be true for the dim to be there (``1@dim?keepdim``).
    """

    factors: tuple[str, ...]
    broadcast: bool = False
    at: str | None = None
    present: str | None = None

    @property
    def wild(self) -> bool:
        """Whether this stands for any number of dims."""
        return self.factors in ((STAR,), (REST,))

    def __str__(self) -> str:
        text = "1" if not self.factors else self.factors[0] if len(self.factors) == 1 else "(" + "*".join(self.factors) + ")"
        place = f"@{self.at}" if self.at else ""
        return text + "~" * self.broadcast + place + (f"?{self.present}" if self.present else "")


@dataclass(frozen=True)
class Pattern:
    """A parameter (an attribute when ``dims`` is None) or a result of a signature."""

    name: str
    dims: tuple[Item, ...] | None
    listed: bool = False
    optional: bool = False

    def __str__(self) -> str:
        dims = "" if self.dims is None else "[" + " ".join(map(str, self.dims)) + "]"
        return self.name + "*" * self.listed + "?" * self.optional + dims


@dataclass(frozen=True)
class Factors:
    """``sum k``, ``max k``, ``whole k``, ``free k``, ``offset k``: what splitting a factor means, when the condition holds."""

    kind: str
    factors: tuple[str, ...]
    condition: Expression | None = None

    def __str__(self) -> str:
        return f"{self.kind} {' '.join(self.factors)}" + _when(self.condition)


@dataclass(frozen=True)
class Once:
    """``once b over k``: where k is split only the first rank adds b."""

    operand: str
    factors: tuple[str, ...]

    def __str__(self) -> str:
        return f"once {self.operand} over {' '.join(self.factors)}"


@dataclass(frozen=True)
class Index:
    """``index ids into v``: where v is split the ids are shifted, and rows outside the local part masked."""

    operand: str
    factor: str

    def __str__(self) -> str:
        return f"index {self.operand} into {self.factor}"


@dataclass(frozen=True)
class Random:
    """``random``: the result is drawn, so that its numbers depend on the global element index."""

    condition: Expression | None = None

    def __str__(self) -> str:
        return "random" + _when(self.condition)


@dataclass(frozen=True)
class Split:
    """``split h:`` and how to run the op where h is split."""

    factor: str
    statements: tuple[tuple[str, Expression], ...]

    def __str__(self) -> str:
        return f"split {self.factor}:" + "".join(f"\n        {name} = {value}" for name, value in self.statements)


@dataclass(frozen=True)
class Flops:
    """``flops 2 * k * numel[y]``."""

    value: Expression

    def __str__(self) -> str:
        return f"flops {self.value}"


@dataclass(frozen=True)
class Product:
    """``product``: a matrix product, placed by the placement file; its operands, or the first two."""

    operands: tuple[str, str] | None = None

    def __str__(self) -> str:
        return "product" + ("" if self.operands is None else " " + " ".join(self.operands))


@dataclass(frozen=True)
class Linear:
    """``linear x y``: a sum pending in all these operands together passes through."""

    operands: tuple[str, ...]

    def __str__(self) -> str:
        return f"linear {' '.join(self.operands)}"


@dataclass(frozen=True)
class Local:
    """``local size = shape[y]``: what an attribute that holds a global size becomes on one rank."""

    attribute: str
    value: Expression

    def __str__(self) -> str:
        return f"local {self.attribute} = {self.value}"


@dataclass(frozen=True)
class Regroup:
    """``regroup``: the result's dims are the operand's, merged and divided."""

    def __str__(self) -> str:
        return "regroup"


@dataclass(frozen=True)
class Repeat:
    """``repeat repeats``: each dim of the result is that many copies of the operand's."""

    attribute: str

    def __str__(self) -> str:
        return f"repeat {self.attribute}"


@dataclass(frozen=True)
class When:
    """``when len(shape) == 1``: this form applies only then."""

    condition: Expression

    def __str__(self) -> str:
        return f"when {self.condition}"


@dataclass(frozen=True)
class Example:
    """``example x[12 24], dim=1``: inputs for check_rules; the rest is made from the pattern."""

    tensors: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    values: tuple[tuple[str, Expression], ...] = ()

    def __str__(self) -> str:
        tensors = [f"{name}[{' '.join(map(str, shape))}]" + (f": {dtype}" if dtype else "") for name, shape, dtype in self.tensors]
        return "example " + ", ".join(tensors + [f"{name} = {value}" for name, value in self.values])


Clause = Factors | Once | Index | Random | Split | Flops | Product | Linear | Local | Regroup | Repeat | When | Example


def _when(condition: Expression | None) -> str:
    return "" if condition is None else f" when {condition}"


@dataclass(frozen=True)
class Form:
    """One signature of an op with its clauses; an op may have several, told apart by ranks, sizes and ``when``."""

    parameters: tuple[Pattern, ...]
    results: tuple[Pattern, ...]
    clauses: tuple[Clause, ...] = ()
    line: int = field(default=0, compare=False)

    @property
    def signature(self) -> str:
        """``(x[* k], w[n k]) -> y[* n]``."""
        return f"({', '.join(map(str, self.parameters))}) -> {', '.join(map(str, self.results))}"

    def __str__(self) -> str:
        return self.signature + "".join(f"\n    {clause}" for clause in self.clauses)

    def operands(self) -> tuple[Pattern, ...]:
        """Return the parameters that are tensors."""
        return tuple(pattern for pattern in self.parameters if pattern.dims is not None)
