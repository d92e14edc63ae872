"""Match the patterns of a form with tensors: which factors each dim is made of, and every factor's size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Any, cast

from partir.rules import syntax as sx

Dims = tuple[tuple[str, ...], ...]


class Mismatch(Exception):
    """A form that does not fit these tensors, and why."""


@dataclass(frozen=True)
class Slot:
    """One dim of one tensor: its factors, its size, and how strictly the two must agree."""

    factors: tuple[str, ...]
    size: int
    broadcast: bool = False
    wild: bool = False


@dataclass
class Matching:
    """What was matched so far: the dims of each tensor and the names that each written factor stands for."""

    attributes: Mapping[str, Any]
    tensors: list[list[Slot]] = field(default_factory=list[list[Slot]])
    groups: dict[str, dict[str, None]] = field(default_factory=dict[str, dict[str, None]])
    whole: set[str] = field(default_factory=set[str])

    def add(self, pattern: sx.Pattern, shape: Sequence[int], element: int | None = None) -> None:
        """Match one tensor; `element` is its place in a list."""
        self.tensors.append(_match(pattern, tuple(shape), self, element))

    def name(self, factor: str, suffix: str = "") -> str:
        """Return the factor's own name and remember it under the written one."""
        name = ("." if factor == sx.REST else str(factor)) + suffix
        self.groups.setdefault(factor, {})[name] = None
        return name

    def group(self, factor: str) -> tuple[str, ...]:
        """Return all factors that a written factor stands for (`d` at several dims, `*`, `c'`)."""
        return tuple(self.groups.get(factor, ()))

    def solve(self) -> tuple[list[Dims], dict[str, int]]:
        """Return every tensor's dims and the size of every factor, or raise Mismatch."""
        sizes = _single_sizes(self)
        _product_sizes([slot for tensor in self.tensors for slot in tensor], sizes)
        for tensor in self.tensors:
            for slot in tensor:
                if prod(sizes[factor] for factor in slot.factors) != slot.size:
                    raise Mismatch(f"dim ({'*'.join(slot.factors)}) has size {slot.size}")
        ones = {factor for factor, size in sizes.items() if size == 1 and (factor[0] in "*." or self._in_product(factor))}
        dims = [tuple(tuple(f for f in slot.factors if f not in ones) for slot in tensor) for tensor in self.tensors]
        return dims, {factor: size for factor, size in sizes.items() if factor not in ones}

    def _in_product(self, factor: str) -> bool:
        return any(len(slot.factors) > 1 and factor in slot.factors for tensor in self.tensors for slot in tensor)


def positions(value: Any, ndim: int) -> list[int]:
    """Return the dims that an attribute numbers: an int, a list, or None or [] for all."""
    if value is None or value in ([], ()):
        return list(range(ndim))
    listed = list(cast("Sequence[int]", value)) if isinstance(value, list | tuple) else [int(value)]
    return [number % ndim for number in listed] if ndim else []


def _match(pattern: sx.Pattern, shape: tuple[int, ...], matching: Matching, element: int | None) -> list[Slot]:
    """Give each dim of one tensor its factors."""
    items = [item for item in pattern.dims or () if item.present is None or matching.attributes.get(item.present)]
    slots: list[Slot | None] = [None] * len(shape)
    for item in items:
        if item.at is not None and not item.wild:
            _place_at(item, pattern, slots, shape, matching, element)
    free = [place for place, slot in enumerate(slots) if slot is None]
    plain = [item for item in items if item.at is None or item.wild]
    names = _spread(plain, len(free), pattern, shape, matching)
    ordered = _wild_order(names, matching)
    for place, item in zip(free, names, strict=True):
        if not item.wild:
            slots[place] = Slot(_factors(item, matching, element), shape[place], item.broadcast)
    for (place, item), number in zip([pair for pair in zip(free, names, strict=True) if pair[1].wild], ordered, strict=True):
        star = item.factors == (sx.STAR,)
        slots[place] = Slot((matching.name(item.factors[0], str(number)),), shape[place], star, wild=True)
    return [slot for slot in slots if slot is not None]


def _place_at(
    item: sx.Item,
    pattern: sx.Pattern,
    slots: list[Slot | None],
    shape: tuple[int, ...],
    matching: Matching,
    element: int | None,
) -> None:
    places = positions(matching.attributes.get(item.at or ""), len(shape))
    for number, place in enumerate(places):
        if place >= len(shape):
            raise Mismatch(f"{pattern.name} has {len(shape)} dims, none numbered {place}")
        suffix = str(number) if len(places) > 1 else ""
        slots[place] = Slot(_factors(item, matching, element, suffix), shape[place], item.broadcast)


def _factors(item: sx.Item, matching: Matching, element: int | None, suffix: str = "") -> tuple[str, ...]:
    return tuple(matching.name(factor, suffix + (str(element) if factor.endswith("'") else "")) for factor in item.factors)


def _spread(items: list[sx.Item], count: int, pattern: sx.Pattern, shape: tuple[int, ...], matching: Matching) -> list[sx.Item]:
    """Repeat the wild items until the items fill `count` dims."""
    wild = [place for place, item in enumerate(items) if item.wild]
    if not wild:
        while len(items) > count and items[0].broadcast:
            items = items[1:]
        if len(items) != count:
            raise Mismatch(f"{pattern} has {len(items)} dims, the tensor has {len(shape)}: {list(shape)}")
        return items
    before, after = items[: wild[0]], items[wild[-1] + 1 :]
    while len(before) + len(after) > count and after and after[0].broadcast and not before:
        after = after[1:]
    run = count - len(before) - len(after)
    if run < 0:
        raise Mismatch(f"{pattern} has at least {len(before) + len(after)} dims, the tensor has {len(shape)}: {list(shape)}")
    return [*before, *_wild_run([items[place] for place in wild], run, matching), *after]


def _wild_run(wild: list[sx.Item], run: int, matching: Matching) -> list[sx.Item]:
    """Say which wild item each dim of the run belongs to: beside `...`, `*` has as many as were met before."""
    if len({item.factors for item in wild}) == 1:
        return wild[:1] * run
    stars = min(len(matching.group(sx.STAR)), run)
    parts = {sx.STAR: stars, sx.REST: run - stars}
    return [item for item in dict.fromkeys(wild) for _ in range(parts[item.factors[0]])]


def _wild_order(names: list[sx.Item], matching: Matching) -> list[int]:
    """Number the wild dims from the right, `*` and `...` each for itself, or as `...@dims` orders them."""
    wild = [item for item in names if item.wild]
    numbers: list[int] = []
    for place, item in enumerate(wild):
        count = sum(other.factors == item.factors for other in wild)
        before = sum(other.factors == item.factors for other in wild[:place])
        order = range(count) if item.at is None else positions(matching.attributes.get(item.at), count)
        numbers.append(count - 1 - order[before])
    return numbers


def _single_sizes(matching: Matching) -> dict[str, int]:
    """Size the factors that have a dim of their own; a broadcast dim of size 1 loses its factor."""
    sizes: dict[str, int] = {}
    order = [(number, place) for number, tensor in enumerate(matching.tensors) for place in range(len(tensor))]
    for number, place in order:
        slot = matching.tensors[number][place]
        if slot.broadcast and slot.size == 1:
            slot = matching.tensors[number][place] = Slot((), 1)
        if len(slot.factors) != 1:
            continue
        (factor,) = slot.factors
        known = sizes.setdefault(factor, slot.size)
        if known == slot.size:
            continue
        if not slot.wild or slot.broadcast:
            raise Mismatch(f"factor {factor} has sizes {known} and {slot.size}")
        apart = f"{factor}={slot.size}"
        matching.tensors[number][place] = Slot((apart,), slot.size, wild=True)
        sizes[apart] = slot.size
        matching.groups[sx.REST][apart] = None
        matching.whole |= {factor, apart}
    return sizes


def _product_sizes(slots: list[Slot], sizes: dict[str, int]) -> None:
    """Size the factors of product dims: what is left over, else the common divisor of the dims that end in one."""
    pending = [slot for slot in slots if any(factor not in sizes for factor in slot.factors)]
    while pending:
        progress = [slot for slot in pending if sum(factor not in sizes for factor in slot.factors) <= 1]
        for slot in progress:
            for factor in slot.factors:
                if factor not in sizes:
                    sizes[factor] = _left_over(slot, sizes)
        if not progress:
            minor = pending[0].factors[-1]
            sizes[minor] = gcd(*(slot.size for slot in slots if slot.factors[-1:] == (minor,)))
        pending = [slot for slot in pending if any(factor not in sizes for factor in slot.factors)]


def _left_over(slot: Slot, sizes: dict[str, int]) -> int:
    known = prod(sizes[factor] for factor in slot.factors if factor in sizes)
    if known == 0 or slot.size % known:
        raise Mismatch(f"dim ({'*'.join(slot.factors)}) has size {slot.size}, no multiple of {known}")
    return slot.size // known
