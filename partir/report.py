"""What `plan.report()` shows: every layout, collectives and totals, plain ASCII, the same text for every run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.fx import Node

from partir.errors import module_path, source_line
from partir.layout import Layout
from partir.printer import op_text
from partir.program import Slot
from partir.records import Collective, layer_of

if TYPE_CHECKING:
    from partir.plans import Plan


@dataclass(frozen=True)
class Row:
    """One line of a table: its cells, the layer that it belongs to, and the bytes that it stands for."""

    layer: str
    cells: tuple[str, ...]
    bytes: int = 0


def report(plan: Plan, fold: bool = True) -> str:
    """Return the text of a plan.

    Args:
        plan: what to show.
        fold: fold repeated layers.
    """
    parts = [_title(plan), _parameters(plan, fold), _inputs(plan), _values(plan, fold)]
    parts += [_collectives(plan, stage, fold) for stage in ("forward", "backward")]
    parts += [_outputs(plan), _totals(plan), _notes(plan)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _title(plan: Plan) -> str:
    program, options = plan.program, plan.options
    parameters = [slot for slot in program.inputs if slot.kind == "parameter"]
    held, whole = sum(_local_bytes(slot, plan) for slot in parameters), sum(_whole_bytes(slot) for slot in parameters)
    lines = [
        f"{plan.model} on mesh {plan.mesh}, {plan.mesh.size} ranks",
        f"memory={options.memory}  vectors={options.vectors}  outputs={options.outputs}",
        f"parameters: {whole:,} bytes in {len(parameters)} tensors, {held:,} on each rank ({_fraction(held, whole)})",
        f"saved for the backward: {saved_bytes(plan):,} bytes on each rank, besides inputs and parameters",
        f"received by each rank in one step: {plan.bytes():,} bytes, forward {plan.bytes('forward'):,}, "
        f"backward {plan.bytes('backward'):,}",
    ]
    if any(record.op in ("broadcast", "reduce_to") for record in plan.collectives):
        lines.append("broadcast and reduce_to count for the rank that receives most: other ranks receive less")
    return "\n".join(lines)


def _fraction(part: int, whole: int) -> str:
    return f"1/{whole / part:.4g}" if part else "nothing"


def _whole_bytes(slot: Slot) -> int:
    return torch.Size(slot.shape).numel() * slot.dtype.itemsize


def _local_bytes(slot: Slot, plan: Plan) -> int:
    return torch.Size(slot.local_shape(plan.mesh)).numel() * slot.dtype.itemsize


def saved_bytes(plan: Plan) -> int:
    """Return the bytes that each rank keeps for the backward, besides inputs and parameters."""
    results = cast("tuple[Any, ...]", plan.program.forward.graph.output_node().args[0])[plan.program.num_outputs :]
    saved = dict.fromkeys(node for node in results if isinstance(node, Node) and node.op != "placeholder")
    values = [cast(torch.Tensor, node.meta["val"]) for node in saved]
    return sum(value.numel() * value.dtype.itemsize for value in values)


def _parameters(plan: Plan, fold: bool) -> str:
    slots = [slot for slot in plan.program.inputs if slot.kind in ("parameter", "buffer")]
    rows = [Row(layer_of(slot.name), _slot_cells(slot, plan)) for slot in slots]
    tied = [f"{name} is {first}" for name, first in plan.aliases.items()]
    table = _table("parameters, at rest", ("name", "layout", "block", "direction", "bytes a rank", ""), rows, fold)
    return "\n".join([table, *(f"  {line}" for line in tied)])


def _inputs(plan: Plan) -> str:
    slots = [slot for slot in plan.program.inputs if slot.kind not in ("parameter", "buffer")]
    rows = [Row("", _slot_cells(slot, plan)) for slot in slots]
    return _table("inputs", ("name", "layout", "block", "direction", "bytes a rank", ""), rows, False)


def _slot_cells(slot: Slot, plan: Plan) -> tuple[str, ...]:
    pattern = plan.pinned(slot.name)
    note = f"pinned by {pattern!r}" if pattern else "buffer" if slot.kind == "buffer" else ""
    return slot.name, *_layout_cells(slot.layout), f"{_local_bytes(slot, plan):,}", note


def _layout_cells(layout: Layout) -> tuple[str, str, str]:
    return str(layout), layout.block or "-", layout.direction or "-"


def _values(plan: Plan, fold: bool) -> str:
    rows: list[Row] = []
    for node in plan.compiled.annotated.graph.nodes:
        layout = node.meta.get("layout")
        if node.op != "call_function" or not isinstance(layout, Layout):
            continue
        pattern = plan.pinned(node.name)
        note = f"pinned by {pattern!r}" if pattern else ""
        cells = (node.name, *_layout_cells(layout), node.meta.get("state") or "-", op_text(node), source_line(node.meta), note)
        rows.append(Row(layer_of(module_path(node.meta)), cells))
    header = ("name", "layout", "block", "direction", "state", "op", "line", "")
    return _table("values, at rest, in the order in which they are computed", header, rows, fold)


def _collectives(plan: Plan, stage: str, fold: bool) -> str:
    records = [record for record in plan.collectives if record.stage == stage]
    if not records:
        return f"{stage}: nothing moves" if stage == "forward" or plan.program.backward else "no backward: nothing has a gradient"
    header = ("collective", "axis", "dtype", "bytes", "name", "for", "line")
    title = f"{stage}: {len(records)} collectives, {plan.bytes(stage):,} bytes received by each rank"
    return _table(title, header, [Row(record.layer, _record_cells(record), record.bytes) for record in records], fold)


def _record_cells(record: Collective) -> tuple[str, ...]:
    return record.op, record.axis, record.dtype, f"{record.bytes:,}", record.node, record.reason, record.source


def _outputs(plan: Plan) -> str:
    names = _output_names(plan)
    rows: list[Row] = []
    for slot, name in zip(plan.program.outputs, names):
        cost = sum(c.bytes for c in plan.collectives if c.stage == "forward" and c.reason == f"output of {name}")
        how = "in blocks" if slot.layout.split_axes else "whole on every rank"
        rows.append(Row("", (slot.name, str(slot.layout), how, f"{cost:,}", name)))
    return _table("outputs", ("name", "layout", "leaves", "bytes for it", "value"), rows, False)


def _output_names(plan: Plan) -> list[str]:
    values = cast("tuple[Any, ...]", plan.compiled.annotated.graph.output_node().args[0])
    return [value.name if isinstance(value, Node) else str(value) for value in values]


def _totals(plan: Plan) -> str:
    kinds = sorted({(c.op, c.axis) for c in plan.collectives})
    rows = [Row("", (op, axis, *_by_stage(plan, op=op, axis=axis))) for op, axis in kinds]
    rows += [Row("", ("all", axis, *_by_stage(plan, axis=axis))) for axis in sorted({axis for _, axis in kinds})]
    rows.append(Row("", ("all", "all", *_by_stage(plan))))
    return _table("totals, bytes received by each rank", ("collective", "axis", "forward", "backward", "both", "number"), rows, False)


def _by_stage(plan: Plan, op: str | None = None, axis: str | None = None) -> tuple[str, ...]:
    number = sum(op in (None, c.op) and axis in (None, c.axis) for c in plan.collectives)
    return *(f"{plan.bytes(stage, axis, op):,}" for stage in ("forward", "backward", None)), str(number)


def _notes(plan: Plan) -> str:
    return "\n".join(["notes", *(f"  {note}" for note in plan.notes)]) if plan.notes else ""


NUMBERS = frozenset({"bytes", "bytes a rank", "bytes for it", "forward", "backward", "both", "number"})


def _table(title: str, header: tuple[str, ...], rows: Sequence[Row], fold: bool) -> str:
    """Return rows under a header, in columns; a layer like an earlier one becomes one line that says so."""
    if not rows:
        return ""
    shown: list[Row | str] = list(_folded(rows)) if fold else list(rows)
    cells = [header, *(row.cells for row in shown if isinstance(row, Row))]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]

    def line(texts: tuple[str, ...]) -> str:
        padded = [t.rjust(w) if name in NUMBERS else t.ljust(w) for t, w, name in zip(texts, widths, header)]
        return "  " + "  ".join(padded).rstrip()

    return "\n".join([title, line(header), *(line(row.cells) if isinstance(row, Row) else f"  {row}" for row in shown)])


def _folded(rows: Sequence[Row]) -> Iterable[Row | str]:
    """Replace runs of rows of one layer that read as an earlier layer's by one line for all of them."""
    first: dict[tuple[tuple[str, ...], ...], str] = {}
    like: list[str] = []
    runs = [(layer, tuple(run)) for layer, run in groupby(rows, key=lambda row: row.layer)]
    for place, (layer, run) in enumerate(runs):
        model = first.setdefault(_normal_form(layer, run), layer)
        if not layer or model == layer:
            yield from run
            continue
        like.append(layer)
        following = runs[place + 1] if place + 1 < len(runs) else ("", ())
        if following[0] and following[0] != layer and first.get(_normal_form(*following)) == model:
            continue
        moved = sum(row.bytes for row in run)
        each = f"{len(run)} rows" + (f", {moved:,} bytes" if moved else "")
        yield f"{', '.join(like)}: as {model} but for the numbers in names ({each}{' each' if len(like) > 1 else ''})"
        like.clear()


def _normal_form(layer: str, run: Sequence[Row]) -> tuple[tuple[str, ...], ...]:
    """Return the cells of a run without the layer's own number and the numbers of value names."""
    if not layer:
        return ()
    dotted, joined = re.escape(layer), re.escape(layer.replace(".", "_"))
    paths = (rf"(?<![\w.]){dotted}(?=\.[A-Za-z_])", rf"(?<=\(){dotted}(?=\))", rf"(?<=of ){dotted}(?=,|$)")
    spelled = re.compile("|".join([*paths, rf"(?<![A-Za-z0-9]){joined}(?=_[A-Za-z])"]))
    layer_free = [[spelled.sub("*", cell) for cell in row.cells] for row in run]
    return tuple(tuple(re.sub(r"(?<=[a-z])_\d+\b", "", cell) for cell in cells) for cells in layer_free)
