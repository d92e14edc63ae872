"""A dim of a tensor on the mesh: a product of sub-dims, each split over axes, the whole split once more.

    >>> fused = Dim.parse("(3*768@y)@x")                    # three parts, each split over y; what a rank holds of them split over x
    >>> print(fused.size, fused.all_axes, fused.local_size(Mesh.parse((2, 4, 1))))
    2304 ('y', 'x') 288
    >>> print(Dim.parse("(12@y*64)"))                       # canonical: a trailing unsplit sub-dim joins
    768@y
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from partir.errors import LayoutError
from partir.mesh import Mesh

LARGEST = 2**63 - 1
"""Of sizes."""


@dataclass(frozen=True)
class Part:
    """A sub-dim: ``size`` elements split over ``axes``, major to minor."""

    size: int
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.size}@{'.'.join(self.axes)}" if self.axes else str(self.size)


@dataclass(frozen=True)
class Dim:
    """A tensor dim: a product of sub-dims, the whole local dim split once more over ``axes``.

    Construction is canonical: what holds the same blocks on every mesh compares equal.
    """

    parts: tuple[Part, ...]
    axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        parts = _merge_parts(self.parts)
        if len(parts) == 1 and self.axes:
            parts = (Part(parts[0].size, parts[0].axes + self.axes),)
            object.__setattr__(self, "axes", ())
        object.__setattr__(self, "parts", parts)

    @classmethod
    def parse(cls, text: str) -> Dim:
        """Return the dim that a text means, ``(3*768@y)@x``."""
        return parse_dim(text, None, text)

    @cached_property
    def size(self) -> int:
        """Global size."""
        return math.prod(part.size for part in self.parts)

    @cached_property
    def all_axes(self) -> tuple[str, ...]:
        """Every axis that splits this dim, in the order of the text."""
        return tuple(axis for part in self.parts for axis in part.axes) + self.axes

    def local_size(self, mesh: Mesh) -> int:
        """Return the size that one rank holds.

        Raises:
            LayoutError: the axes do not divide a sub-dim.
        """
        local = 1
        for part in self.parts:
            local *= _divide(part.size, part.axes, mesh, self)
        return _divide(local, self.axes, mesh, self)

    def __str__(self) -> str:
        if len(self.parts) == 1:
            return str(self.parts[0])
        product = "(" + "*".join(str(part) for part in self.parts) + ")"
        return f"{product}@{'.'.join(self.axes)}" if self.axes else product


_DIM = re.compile(r"\((?P<product>[^)]*)\)(?:@(?P<outer>[\w.]+))?|(?P<size>\w+)(?:@(?P<axes>[\w.]+))?")


def parse_dim(entry: str, size: int | None, text: str) -> Dim:
    match = _DIM.fullmatch(entry)
    if match is None:
        raise LayoutError(f"layout text {text!r}: dim {entry!r} is not understood; write 16@x.y or (3*768@y)@x.")
    if match["product"] is None:
        return Dim((Part(_size(match["size"], size, text), _axes(match["axes"])),))
    parts: list[Part] = []
    for item in match["product"].split("*"):
        number, _, axes = item.strip().partition("@")
        parts.append(Part(_size(number, None, text), _axes(axes)))
    dim = Dim(tuple(parts), _axes(match["outer"]))
    if size is not None and dim.size != size:
        raise LayoutError(f"layout text {text!r}: dim {entry!r} has size {dim.size}, the tensor's is {size}.")
    return dim


def _size(text: str, size: int | None, whole_text: str) -> int:
    if text.isascii() and text.isdigit():
        if len(text) > len(str(LARGEST)) or int(text) > LARGEST:
            raise LayoutError(f"layout text {whole_text[:80]!r}: size {text[:40]} is more than {LARGEST}, the most that a tensor's may be.")
        if size is not None and int(text) != size:
            raise LayoutError(f"layout text {whole_text!r}: size {text} differs from the tensor's {size}.")
        return int(text)
    if size is None:
        raise LayoutError(f"layout text {whole_text!r}: size {text!r} is a name; sizes are numbers here.")
    return size


def _axes(text: str | None) -> tuple[str, ...]:
    return tuple(text.split(".")) if text else ()


def _merge_parts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Join unsplit sub-dims to the one before: the blocks stay the same."""
    merged: list[Part] = []
    for part in parts:
        if part.size == 1 and not part.axes:
            continue
        if merged and not part.axes:
            merged[-1] = Part(merged[-1].size * part.size, merged[-1].axes)
        else:
            merged.append(part)
    return tuple(merged) or (Part(1),)


def join_used_up(parts: tuple[Part, ...], mesh: Mesh) -> tuple[Part, ...]:
    """Join each sub-dim that is split to single elements to the one after it."""
    joined: list[Part] = []
    for part in parts:
        if joined and joined[-1].axes and joined[-1].size == mesh.extent(joined[-1].axes):
            joined[-1] = Part(joined[-1].size * part.size, joined[-1].axes + part.axes)
        else:
            joined.append(part)
    return tuple(joined)


def _divide(size: int, axes: Sequence[str], mesh: Mesh, dim: Dim) -> int:
    extent = mesh.extent(axes)
    if size % extent:
        shown = ".".join(axes)
        raise LayoutError(f"dim {dim}: size {size} is not divisible by {shown}={extent}. Legal extents: {legal_extents(size)}.")
    return size // extent


def legal_extents(size: int) -> str:
    """Return the numbers that divide ``size``, as text (at most the first 12)."""
    found = [n for n in range(1, size + 1) if size % n == 0]
    return ", ".join(str(n) for n in found[:12]) + (", ..." if len(found) > 12 else "")
