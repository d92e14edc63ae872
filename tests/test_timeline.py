"""A timeline is a Chrome trace: a row for compute and for each axis, an event a node with its facts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from partir import PartirError
from partir.draw.timeline import Event, timeline_events

EVENTS = [
    Event("d_linear", "backward", "z", 3e-3, 1e-3),
    Event("linear", "forward", "compute", 1e-3, 2e-3, {"layout": "f32[16@x.z, 64@y]", "line": "mlp.py:3"}),
    Event("all_gather", "forward", "x", 0.0, 1e-3, {"bytes": 512, "reason": "fc1.weight for linear"}),
    Event("all_reduce", "forward", "x.z", 2e-3, 0.0),
]


def written(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "trace.json"
    timeline_events(EVENTS, path, "MLP")
    return list(json.loads(path.read_text())["traceEvents"])


def test_rows_are_compute_and_the_axes_in_order(tmp_path: Path) -> None:
    trace = written(tmp_path)
    rows = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert list(rows.values()) == ["compute", "links along x", "links along z", "links along x.z"]
    assert [event["args"]["name"] for event in trace if event["name"] == "process_name"] == ["MLP"]


def test_events_carry_microseconds_and_facts_in_the_order_of_time(tmp_path: Path) -> None:
    found = [event for event in written(tmp_path) if event["ph"] == "X"]
    assert [event["name"] for event in found] == ["all_gather", "linear", "all_reduce", "d_linear"]
    assert [(event["ts"], event["dur"]) for event in found] == [
        (pytest.approx(start), pytest.approx(long)) for start, long in [(0, 1000), (1000, 2000), (2000, 0), (3000, 1000)]
    ]
    assert found[0]["args"] == {"stage": "forward", "bytes": 512, "reason": "fc1.weight for linear"}
    assert [event["cat"] for event in found] == ["forward"] * 3 + ["backward"]
    assert [event["tid"] for event in found] == [2, 1, 4, 3]


@pytest.mark.parametrize("start, seconds", [(-1.0, 1.0), (0.0, math.nan), (math.inf, 1.0)])
def test_a_time_that_is_none_is_refused(tmp_path: Path, start: float, seconds: float) -> None:
    with pytest.raises(PartirError, match="timeline: forward linear has (start|seconds) .*; a time is finite and not negative"):
        timeline_events([Event("linear", "forward", "compute", start, seconds)], tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PartirError, match="cannot be written: No such file or directory"):
        timeline_events(EVENTS, tmp_path / "missing" / "trace.json")
