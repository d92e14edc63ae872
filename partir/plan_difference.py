"""What differs between two plans: settings, layouts, what moves. Layers that differ alike are folded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from partir.folding import alike, columns, generic, layers_text
from partir.plan_edits import edits_caution

if TYPE_CHECKING:
    from partir.plan_document import PlanDocument, PlannedTensor

Totals = tuple[str, str, str]


@dataclass(frozen=True)
class LayoutChange:
    """Tensors of like layers whose layouts differ.

    Args:
        names: their names, one a layer.
        text: ``blocks.*.mlp.fc1.weight``, the name that stands for all.
        where: ``blocks.0..11 (12 alike)``, or ``""``.
        first, second: the layout in each plan.
    """

    names: tuple[str, ...]
    text: str
    where: str
    first: str
    second: str


@dataclass(frozen=True)
class PlanDifference:
    """What differs; false where nothing does. `print` it.

    Args:
        settings: what was asked for, by name: the first plan's and the second's.
        layouts: tensors in both plans whose layouts differ.
        moves: bytes that one rank receives by (stage, collective, axis), in each plan, where they differ.
        memory: bytes of parameters held and saved for the backward, in each plan, where they differ.
        only_first, only_second: names of tensors that only one plan has.
        cautions: what was edited in a document since it was made, so that its bytes are old.
    """

    settings: dict[str, tuple[str, str]]
    layouts: tuple[LayoutChange, ...]
    moves: dict[Totals, tuple[int, int]]
    memory: dict[str, tuple[int, int]]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    cautions: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any((self.settings, self.layouts, self.moves, self.memory, self.only_first, self.only_second))

    def __str__(self) -> str:
        if not self:
            return "\n".join(["the plans are equal", *self.cautions]) + "\n"
        parts = [list(self.cautions), self._settings(), self._layouts(), self._moves(), self._memory()]
        parts += [self._only("first", self.only_first), self._only("second", self.only_second)]
        return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"

    def _settings(self) -> list[str]:
        return [f"{name}: {first} -> {second}" for name, (first, second) in self.settings.items()]

    def _layouts(self) -> list[str]:
        if not self.layouts:
            return []
        rows = [(f"  {change.text}", change.first, f"-> {change.second}", change.where) for change in self.layouts]
        return [f"layouts: {sum(len(change.names) for change in self.layouts)} differ", *columns(rows)]

    def _moves(self) -> list[str]:
        rows = [("  " + stage, op, axis, *_change(*pair)) for (stage, op, axis), pair in self.moves.items()]
        return ["received by each rank, bytes", *columns(rows, right=[3, 5, 6])] if rows else []

    def _memory(self) -> list[str]:
        rows = [("  " + name, *_change(*pair)) for name, pair in self.memory.items()]
        return ["held by each rank, bytes", *columns(rows, right=[1, 3, 4])] if rows else []

    def _only(self, which: str, names: tuple[str, ...]) -> list[str]:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return [f"only in the {which}: {', '.join(names[:8])}{more}"] if names else []


def _change(first: int, second: int) -> tuple[str, str, str, str]:
    return f"{first:,}", "->", f"{second:,}", f"({second - first:+,})"


def difference(first: PlanDocument, second: PlanDocument) -> PlanDifference:
    """Return how the second plan differs from the first."""
    mine, others = ({(t.kind, t.name): t for t in document.tensors} for document in (first, second))
    return PlanDifference(
        settings=dict(_settings(first, second)),
        layouts=tuple(_layouts([(tensor, others[key]) for key, tensor in mine.items() if key in others])),
        moves=_moves(first, second),
        memory=dict(_memory(first, second)),
        only_first=tuple(name for kind, name in mine if (kind, name) not in others),
        only_second=tuple(name for kind, name in others if (kind, name) not in mine),
        cautions=(*edits_caution(first, "the first plan was "), *edits_caution(second, "the second plan was ")),
    )


def _settings(first: PlanDocument, second: PlanDocument) -> Iterator[tuple[str, tuple[str, str]]]:
    pairs = {"model": (first.origin.model, second.origin.model), "mesh": (str(first.mesh), str(second.mesh))}
    for name in ("memory", "vectors", "outputs", "rng", "compute_dtype", "reduce_dtype", "pin"):
        pairs[name] = (str(getattr(first.settings, name)), str(getattr(second.settings, name)))
    pairs["rules"] = (first.settings.rules_text or "None", second.settings.rules_text or "None")
    yield from ((name, pair) for name, pair in pairs.items() if pair[0] != pair[1])


def _layouts(pairs: list[tuple[PlannedTensor, PlannedTensor]]) -> Iterator[LayoutChange]:
    changed = [(a, b) for a, b in pairs if a.layout != b.layout]
    keyed = [(a.layer, (generic(_label(a), a.layer), str(a.layout), str(b.layout)), (a, b)) for a, b in changed]
    for layers, members in alike(keyed):
        a, b = members[0]
        several = len(layers) > 1
        text = generic(_label(a), layers[0]) if several else _label(a)
        where = layers_text(layers) if several else ""
        yield LayoutChange(tuple(t.name for t, _ in members), text, where, str(a.layout), str(b.layout))


def _label(tensor: PlannedTensor) -> str:
    return f"{tensor.name} of {tensor.module}" if tensor.kind == "value" and tensor.module else tensor.name


def _moves(first: PlanDocument, second: PlanDocument) -> dict[Totals, tuple[int, int]]:
    keys = sorted({(c.stage, c.op, c.axis) for document in (first, second) for c in document.collectives}, key=_forward_first)
    both = {key: (_bytes(first, key), _bytes(second, key)) for key in [*keys, ("all", "all", "all")]}
    return {key: pair for key, pair in both.items() if pair[0] != pair[1]}


def _bytes(document: PlanDocument, key: Totals) -> int:
    stage, op, axis = (None if part == "all" else part for part in key)
    return document.bytes(stage, axis, op)


def _forward_first(key: Totals) -> tuple[bool, Totals]:
    return key[0] != "forward", key


def _memory(first: PlanDocument, second: PlanDocument) -> Iterator[tuple[str, tuple[int, int]]]:
    held = [sum(t.local_bytes(document.mesh) for t in document.of("parameter")) for document in (first, second)]
    if held[0] != held[1]:
        yield "parameters", (held[0], held[1])
    if first.saved != second.saved:
        yield "saved for the backward", (first.saved, second.saved)
