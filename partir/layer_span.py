"""Layers that stand for others: of a long list of equal layers some are kept, and those between the first and the last of them count
several times."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """The equal layers of one list: ``first`` to ``end`` are kept, ``middle`` to ``end - 1`` stand for all up to ``last - 1``.

    Args:
        prefix: path of the list, ``"blocks"``.
        first, middle, end, last: numbers in the list; ``end`` stands for ``last``.

    >>> Span("blocks", 1, 2, 3, 11).counts()
    {'blocks.2': 9}
    """

    prefix: str
    first: int
    middle: int
    end: int
    last: int

    @property
    def period(self) -> int:
        """After how many layers the next is laid out in the same way."""
        return self.end - self.middle

    @property
    def times(self) -> int:
        """How many layers each of the middle stands for."""
        return (self.last - self.middle) // self.period

    def layer(self, number: int) -> str:
        """Return the path of a layer."""
        return f"{self.prefix}.{number}"

    def counts(self) -> dict[str, int]:
        """Return how many layers each layer of the middle stands for."""
        return {self.layer(number): self.times for number in range(self.middle, self.end)}
