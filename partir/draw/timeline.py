"""Write when each node of a step runs as Chrome trace events, which https://ui.perfetto.dev opens: a row for compute and one an axis.

    compute   [layer_norm][linear      ][gelu]
    x         [all_gather    ]
    z                      [reduce_scatter]
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partir.draw.write import write_atomically
from partir.errors import PartirError, source_line
from partir.hardware import Hardware
from partir.mesh import AXES
from partir.paths import path_of_file
from partir.printer import op_text, type_text
from partir.timing import node_times

if TYPE_CHECKING:
    from partir.plans import Plan

COMPUTE = "compute"
RANK = 0  # the process that the trace shows: one rank stands for all


@dataclass(frozen=True)
class Event:
    """One node of a program in time.

    Args:
        name: the node's name, ``reduce_scatter_4``.
        stage: ``"forward"`` or ``"backward"``.
        row: ``"compute"``, or the mesh axes whose links it keeps busy, ``"z"`` or ``"x.z"``.
        start: seconds from the beginning of the step.
        seconds: how long it takes.
        facts: what else is known of it: layout, bytes, reason, source line.
    """

    name: str
    stage: str
    row: str
    start: float
    seconds: float
    facts: Mapping[str, str | int | float] = field(default_factory=dict[str, "str | int | float"])


def timeline_events(events: Iterable[Event], path: str | Path, title: str = "one rank") -> None:
    """Write events as a trace file.

    Args:
        events: in any order.
        path: where, by custom ``trace.json``.
        title: what Perfetto calls the rows together.

    Raises:
        PartirError: an event without a time, or a path that cannot be written.
    """
    listed = list(events)
    for event in listed:
        _check(event)
    rows = _rows(listed)
    trace = {"displayTimeUnit": "ns", "traceEvents": [*_names(rows, title), *(_trace_event(event, rows) for event in _in_order(listed))]}
    write_atomically(path_of_file(path, "the timeline", "trace.json"), (json.dumps(trace, indent=1) + "\n").encode())


def timeline_of(plan: Plan, hardware: str | Path | Hardware) -> list[Event]:
    """Return an event for each node of a plan's step, with the times that `partir.timing` predicts."""
    program = plan.program
    graphs = {"forward": program.forward, "backward": program.backward}
    nodes = {(stage, node.name): node for stage, module in graphs.items() if module is not None for node in module.graph.nodes}
    reasons = {(one.stage, one.node): one.reason for one in plan.collectives}
    events: list[Event] = []
    for time in node_times(program, hardware):
        node = nodes[(time.stage, time.name)]
        facts: dict[str, str | int | float] = {"op": op_text(node), "layout": type_text(node), "bytes": time.bytes, "flops": time.flops}
        facts |= {"reason": reasons.get((time.stage, time.name), str(node.meta.get("reason", ""))), "line": source_line(node.meta)}
        events.append(Event(time.name, time.stage, time.row, time.start, time.seconds, facts))
    return events


def _check(event: Event) -> None:
    for what, seconds in (("start", event.start), ("seconds", event.seconds)):
        if not math.isfinite(seconds) or seconds < 0:
            raise PartirError(f"timeline: {event.stage} {event.name} has {what} {seconds}; a time is finite and not negative.")


def _in_order(events: Sequence[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.start)


def _rows(events: Sequence[Event]) -> dict[str, int]:
    """Return a number for each row: compute first, then the axes in the mesh's order, those of several axes last."""
    order = [COMPUTE, *AXES]
    found = sorted({event.row for event in events}, key=lambda row: (order.index(row) if row in order else len(order), row))
    return {row: number for number, row in enumerate(found, 1)}


def _names(rows: Mapping[str, int], title: str) -> list[dict[str, Any]]:
    named: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": RANK, "args": {"name": title}}]
    for row, number in rows.items():
        shown = row if row == COMPUTE else f"links along {row}"
        named.append({"name": "thread_name", "ph": "M", "pid": RANK, "tid": number, "args": {"name": shown}})
        named.append({"name": "thread_sort_index", "ph": "M", "pid": RANK, "tid": number, "args": {"sort_index": number}})
    return named


def _trace_event(event: Event, rows: Mapping[str, int]) -> dict[str, Any]:
    """Return a complete event; Chrome's format counts microseconds."""
    times = {"ts": event.start * 1e6, "dur": event.seconds * 1e6}
    facts = {"stage": event.stage, **event.facts}
    return {"name": event.name, "cat": event.stage, "ph": "X", "pid": RANK, "tid": rows[event.row], **times, "args": facts}
