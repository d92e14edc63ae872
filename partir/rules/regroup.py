"""Common refinement of two lists of sizes with one product: the factors of view, reshape, flatten.

[B, S, 768] -> [B, S, 12, 64]      B; S; 12*64       each side's dims are products of the same factors
[6, 4] -> [4, 6]                   none: the factors concerned are whole, and apart on both sides
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Regrouping:
    """Factor names of both sides' dims, their sizes, and those that cannot be split."""

    before: Dims
    after: Dims
    sizes: dict[str, int]
    whole: frozenset[str]


def regroup(before: Sequence[int], after: Sequence[int]) -> Regrouping:
    """Return the factors that the dims of a view's operand and result share.

    >>> regroup([2, 3, 768], [6, 12, 64]).after
    (('v0', 'v1'), ('v2',), ('v3',))
    """
    if 0 in before or 0 in after:
        return _apart(before, after)
    cuts_before, cuts_after = _cuts(before), _cuts(after)
    shared = sorted(set(cuts_before) & set(cuts_after))
    spans: list[tuple[int, int, bool]] = []
    for low, high in reversed(list(pairwise(shared))):
        inner = sorted({cut for cut in cuts_before + cuts_after if low <= cut <= high})
        chained = all(big % small == 0 for small, big in pairwise(inner))
        for small, big in reversed(list(pairwise(inner))) if chained else ():
            spans.append((small, big, True))
        if not chained:
            spans.append((low, high, False))
    names = {span: f"v{number}" for number, span in enumerate(spans)}
    free = {names[span]: span[1] // span[0] for span in spans if span[2]}
    table = dict(free)
    whole: set[str] = set()
    sides = [_side(dims, names, table, whole, mark) for dims, mark in ((before, ""), (after, "'"))]
    return Regrouping(sides[0], sides[1], table, frozenset(whole))


def _cuts(sizes: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor of these sizes, 1 and the whole count included."""
    cuts = [1]
    for size in reversed(sizes):
        if size != 1:
            cuts.append(cuts[-1] * size)
    return cuts


def _side(sizes: Sequence[int], names: dict[tuple[int, int, bool], str], table: dict[str, int], whole: set[str], mark: str) -> Dims:
    """Name the factors of each dim; dims inside a span without refinement get whole factors of their own."""
    dims: list[tuple[str, ...]] = []
    stride = 1
    for position, size in reversed(list(enumerate(sizes))):
        low, high = stride, stride * size
        stride = high
        inside = tuple(name for (small, big, free), name in names.items() if free and low <= small and big <= high)
        if size > 1 and not inside:
            span = next(name for (small, big, free), name in names.items() if not free and small <= low and high <= big)
            inside = (f"{span}{mark}.{position}",)
            table[inside[0]] = size
            whole.add(inside[0])
        dims.append(inside if size > 1 else ())
    return tuple(reversed(dims))


def _apart(before: Sequence[int], after: Sequence[int]) -> Regrouping:
    """Give every dim a whole factor of its own (tensors without elements)."""
    names = [tuple((f"v{mark}.{number}",) for number in range(len(dims))) for dims, mark in ((before, ""), (after, "'"))]
    table = {name[0]: size for side, dims in zip(names, (before, after), strict=True) for name, size in zip(side, dims, strict=True)}
    return Regrouping(names[0], names[1], table, frozenset(table))
