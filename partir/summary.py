"""What `print(plan)` shows: one screen, for 2 layers and for 96 alike. Repeated layers are folded, the costliest collectives named."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from partir.folding import alike, columns, generic, layers_text, shortened
from partir.plan_edits import edits_caution

if TYPE_CHECKING:
    from partir.plan_document import PlanDocument, PlannedCollective, PlannedTensor

MOST_PARAMETERS = 16
MOST_COLLECTIVES = 5
MOST_NOTES = 3
WIDTH = 120
MOST_NAME = 40  # of the cells of a row, so that the row fits the screen
MOST_LAYOUT = 36
MOST_REASON = 34
MOST_PLACE = 30
REST = "plan.report() has every value and collective, plan.explain(name) one tensor, plan.diff(other) what differs."


def summary(document: PlanDocument) -> str:
    """Return a plan as text of about 45 lines of at most 120 characters."""
    parts = [_title(document), _parameters(document), _totals(document), _costliest(document), _notes(document)]
    return "\n\n".join("\n".join(lines) for lines in [*parts, [REST]] if lines) + "\n"


def _title(document: PlanDocument) -> list[str]:
    parameters, settings = document.of("parameter"), document.settings
    whole, held = sum(t.bytes for t in parameters), sum(t.local_bytes(document.mesh) for t in parameters)
    lines = [
        f"{document.origin.model} on mesh {document.mesh}, {document.mesh.size} ranks",
        f"memory={settings.memory}  vectors={settings.vectors}  outputs={settings.outputs}"
        + (f"  rng={settings.rng}" if settings.rng != "exact" else "")
        + "".join(f"  {name}={text}" for name, text in settings.precision.items())
        + (f"  rules={', '.join(name for name, _ in settings.rules)}" if settings.rules else "")
        + (f"  pins: {len(settings.pin)}" if settings.pin else ""),
        f"parameters: {whole:,} bytes in {len(parameters)} tensors, {held:,} on each rank ({fraction(held, whole)})",
        f"saved for the backward: {document.saved:,} bytes on each rank, besides inputs and parameters",
    ]
    return [*lines, *(shortened(line, WIDTH) for line in edits_caution(document))]


def fraction(part: int, whole: int) -> str:
    """Return ``1/8`` for an eighth."""
    return f"1/{whole / part:.4g}" if part else "nothing"


def _parameters(document: PlanDocument) -> list[str]:
    """Return a row a parameter, layers that are alike once; a layer like no other under its full names."""
    by_layer: dict[str, list[PlannedTensor]] = {}
    for number, tensor in enumerate(document.of("parameter")):
        by_layer.setdefault(tensor.layer or f"#{number}", []).append(tensor)
    groups = alike((layer, (_stem(layer), tuple(_cells(t, layer, document) for t in held)), held) for layer, held in by_layer.items())
    rows: list[tuple[str, ...]] = [("parameters", "at rest", "block", "gathered along", "bytes a rank")]
    shown = 0
    for layers, members in groups:
        layered = len(layers) > 1 and not layers[0].startswith("#")
        if shown >= MOST_PARAMETERS:
            break
        rows += [(layers_text(layers),)] * layered
        first = members[0][: MOST_PARAMETERS - shown]
        rows += [_cells(tensor, layers[0] if layered else "", document) for tensor in first]
        shown += len(first)
    lines = [f"  {line}" if index else line for index, line in enumerate(columns(rows, right=[4]))]
    more = sum(len(held) for _, members in groups for held in members[:1]) - shown
    return [*lines, *([f"  ... and {more} more, layers that are alike counted once"] if more > 0 else [])]


def _stem(layer: str) -> str:
    return layer if layer.startswith("#") else layer.rpartition(".")[0]


def _cells(tensor: PlannedTensor, layer: str, document: PlanDocument) -> tuple[str, ...]:
    name = "  " + tensor.name.removeprefix(layer) if layer and not layer.startswith("#") else tensor.name
    mark = "  edited" if tensor.edited else "  pinned" if tensor.why.startswith("pinned") else ""
    held = f"{tensor.local_bytes(document.mesh):,}"
    layout = shortened(str(tensor.layout), MOST_LAYOUT)
    return shortened(name, MOST_NAME), layout, tensor.layout.block or "-", (tensor.direction or "-") + mark, held


def _totals(document: PlanDocument) -> list[str]:
    """Return bytes by collective (down) and axis (across)."""
    if not document.collectives:
        return ["nothing moves"]
    axes = sorted({c.axis for c in document.collectives})
    rows = [("bytes received by each rank", *axes, "all")]
    for op in sorted({c.op for c in document.collectives}):
        rows.append((f"  {op}", *(_number(document.bytes(op=op, axis=axis)) for axis in axes), _number(document.bytes(op=op))))
    for stage in ("forward", "backward", None):
        sums = (_number(document.bytes(stage, axis)) for axis in axes)
        rows.append((f"  {stage or 'all'} ({_count(document, stage)} collectives)", *sums, _number(document.bytes(stage))))
    lines = columns(rows, right=range(1, len(axes) + 2))
    if any(c.op in ("broadcast", "reduce_to") for c in document.collectives):
        lines.append("  broadcast and reduce_to count for the rank that receives most: other ranks receive less")
    return lines


def _count(document: PlanDocument, stage: str | None) -> int:
    return sum(stage in (None, c.stage) for c in document.collectives)


def _number(number: int) -> str:
    return f"{number:,}" if number else "-"


def costliest(collectives: Iterable[PlannedCollective]) -> list[tuple[list[str], list[PlannedCollective]]]:
    """Return collectives that are alike but for the layer, with their layers, those with most bytes in all first."""
    keyed = [(c.layer, (c.stage, c.op, c.axis, generic(c.reason, c.layer), c.line, generic(c.module, c.layer)), c) for c in collectives]
    return sorted(alike(keyed), key=lambda group: -sum(c.bytes for c in group[1]))


def _costliest(document: PlanDocument) -> list[str]:
    groups = costliest(document.collectives)
    if not groups:
        return []
    rows = [("costliest", "bytes", "times", "axis", "for", "line")]
    for layers, members in groups[:MOST_COLLECTIVES]:
        first = members[0]
        reason = first.reason if len(members) == 1 else generic(first.reason, layers[0])
        total, times = f"{sum(c.bytes for c in members):,}", str(len(members))
        place = shortened(f"{first.line} {generic(first.module, layers[0] if len(layers) > 1 else '')}".strip(), MOST_PLACE)
        rows.append((f"  {first.stage} {first.op}", total, times, first.axis, shortened(reason, MOST_REASON), place))
    lines = columns(rows, right=[1, 2])
    more = len(groups) - MOST_COLLECTIVES
    return [*lines, *([f"  ... and {more} more kinds"] if more > 0 else [])]


def _notes(document: PlanDocument) -> list[str]:
    if not document.notes:
        return []
    by_weight = sorted(document.notes, key=lambda note: " is padded to " not in note)  # work first, then what is held twice
    shown = [shortened(f"  {note}", WIDTH) for note in by_weight[:MOST_NOTES]]
    more = len(document.notes) - MOST_NOTES
    return ["notes", *shown, *([f"  ... and {more} more: plan.notes"] if more > 0 else [])]
