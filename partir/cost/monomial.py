"""Sizes as monomials: a number times powers of symbols, `128*B*S/(x*z)`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, cast

import sympy  # pyright: ignore[reportMissingTypeStubs]

Values = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Monomial:
    """A coefficient times powers of symbols.

    Args:
        coefficient: an exact number.
        powers: symbol and exponent, sorted by symbol, no exponent 0.

    >>> rows = Monomial.of(64, ["B", "S"], ["x", "y"])
    >>> print(rows, rows.value({"B": 8, "S": 16, "x": 2, "y": 4}))
    64*B*S/(x*y) 1024
    """

    coefficient: Fraction = Fraction(1)
    powers: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, coefficient: int | Fraction, above: Iterable[str] = (), below: Iterable[str] = ()) -> Monomial:
        """Return a coefficient times the symbols of ``above``, divided by those of ``below``."""
        powers: dict[str, int] = {}
        for sign, names in ((1, above), (-1, below)):
            for name in names:
                powers[name] = powers.get(name, 0) + sign
        return cls(Fraction(coefficient), tuple(sorted((name, power) for name, power in powers.items() if power)))

    def __post_init__(self) -> None:
        key = (self.coefficient.numerator, self.coefficient.denominator, self.powers)
        object.__setattr__(self, "_key", key)  # compared and hashed as integers: a search compares monomials a million times
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return cast(Any, self)._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Monomial) and cast(Any, self)._key == cast(Any, other)._key)

    def __mul__(self, other: Monomial | int | Fraction) -> Monomial:
        return _product(self, other) if isinstance(other, Monomial) else Monomial(self.coefficient * other, self.powers)

    def __truediv__(self, other: Monomial) -> Monomial:
        return self * Monomial(1 / other.coefficient, tuple((name, -power) for name, power in other.powers))

    def over(self, axes: Iterable[str]) -> Monomial:
        """Return it divided by the sizes of ``axes``."""
        return self * _of_axes(tuple(axes), -1)

    def times(self, axes: Iterable[str]) -> Monomial:
        """Return it times the sizes of ``axes``."""
        return self * _of_axes(tuple(axes), 1)

    def is_square(self) -> bool:
        """Return whether it is the square of a monomial."""
        parts = (self.coefficient.numerator, self.coefficient.denominator)
        return all(math.isqrt(part) ** 2 == part for part in parts) and all(power % 2 == 0 for _, power in self.powers)

    def value(self, sizes: Values) -> Any:
        """Return its value; sizes may be numbers (an exact int where it is one) or numpy arrays (floats)."""
        above, below = self.coefficient.numerator, self.coefficient.denominator
        for name, power in self.powers:
            if power > 0:
                above = above * sizes[name] ** power
            else:
                below = below * sizes[name] ** -power
        if isinstance(above, int) and isinstance(below, int):
            return above // below if above % below == 0 else Fraction(above, below)
        return above / below

    def numerator_at(self, sizes: Mapping[str, int]) -> int:
        """Return what it is before anything is divided."""
        return math.prod((self.coefficient.numerator, *(sizes[name] ** power for name, power in self.powers if power > 0)))

    @property
    def expression(self) -> sympy.Expr:
        """It as a sympy expression."""
        factors = [symbol(name) ** power for name, power in self.powers]
        return sympy.Mul(sympy.Rational(self.coefficient.numerator, self.coefficient.denominator), *factors)

    def __str__(self) -> str:
        return str(self.expression)


@lru_cache(maxsize=1 << 16)
def _product(a: Monomial, b: Monomial) -> Monomial:
    powers = dict(a.powers)
    for name, power in b.powers:
        powers[name] = powers.get(name, 0) + power
    return Monomial(a.coefficient * b.coefficient, tuple(sorted((n, p) for n, p in powers.items() if p)))


@lru_cache(maxsize=256)
def _of_axes(axes: tuple[str, ...], sign: int) -> Monomial:
    return Monomial.of(1, axes) if sign > 0 else Monomial.of(1, (), axes)


@lru_cache(maxsize=1024)
def symbol(name: str) -> sympy.Symbol:
    """Return the symbol of a size: a positive integer."""
    return sympy.Symbol(name, positive=True, integer=True)
