"""The paper's tables: the page's structure, and that the rows of 64 GPUs stay unseen by the fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("scipy", reason="the fit needs the extra `examples`")

from examples.paper_costs import VARIANTS, Row, best_fit, fit, layers_that_fit, predict, read_rows
from examples.paper_tables import TARGETS, main, speed_ups
from partir.hardware import load_hardware

LONGHORN = load_hardware("longhorn-v100")
ROWS = read_rows()


def changed(gpus: int) -> list[Row]:
    """Return the rows with one of 64 GPUs, or of another number, ten times as slow."""
    place = next(index for index, row in enumerate(ROWS) if row.gpus == gpus)
    return [dataclasses.replace(row, step_s=10 * row.step_s) if index == place else row for index, row in enumerate(ROWS)]


def test_rows_of_64_gpus_do_not_influence_the_fit() -> None:
    assert best_fit(changed(64), LONGHORN) == best_fit(ROWS, LONGHORN)
    assert best_fit(changed(16), LONGHORN) != best_fit(ROWS, LONGHORN)


def test_fitting_recovers_constants_that_made_the_rows() -> None:
    made = [dataclasses.replace(row, step_s=predict(row, LONGHORN, VARIANTS[0], (0.4, 0.7))) for row in ROWS]
    found = fit(made, LONGHORN, VARIANTS[0])
    assert (found.efficiency, found.gain) == pytest.approx((0.4, 0.7), rel=1e-3) and found.error < 1e-4


def test_received_elements_by_hand() -> None:
    """One layer on 64 GPUs, each byte a second: what is left without compute, memory traffic and latency."""
    slow = dataclasses.replace(
        LONGHORN,
        memory_bandwidth=1e30,
        flops={"float32": 1e30},
        links=tuple(dataclasses.replace(link, pace=dataclasses.replace(link.pace, latency=0.0, bandwidth=1.0)) for link in LONGHORN.links),
    )
    tokens, h = 64 * 512, 1024
    expected = {
        "1-D": 3 * 4 * 63 / 64 * tokens * h,
        "2-D": 4 * 7 / 8 * (7 * tokens * h + 12 * h**2) / 8,
        "3-D": 3 * 3 / 64 * (16 * tokens * h + 12 * h**2),
    }
    for method, elements in expected.items():
        row = Row("weak", method, 64, 64, h, 1.0, 1.0, 1.0)
        assert 64 * predict(row, slow, VARIANTS[0], (1.0, 0.0)) == pytest.approx(24 * 4 * elements), method


def test_one_row_of_the_paper_disagrees_with_itself() -> None:
    odd = [row for row in ROWS if abs(row.summed_s / row.step_s - 1) > 0.01]
    assert [(row.scaling, row.method, row.gpus) for row in odd] == [("weak", "3-D", 64)]
    printed = speed_ups({(row.scaling, row.method, row.gpus): row.step_s for row in ROWS})
    assert [round(value, 2) for value in printed] == [2.32, 1.57, 1.53, 1.38] and len(TARGETS) == 4
    assert round(speed_ups({(row.scaling, row.method, row.gpus): row.summed_s for row in ROWS})[0], 2) == 2.93


def test_layers_are_those_that_fit() -> None:
    assert 24 <= layers_that_fit(ROWS, LONGHORN) < 30


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--out", str(tmp_path / "paper.md")])
    text = (tmp_path / "paper.md").read_text()
    assert text == capsys.readouterr().out
    rows = [line for line in text.splitlines() if line.endswith(("| fitted |", "| predicted |"))]
    assert len(rows) == len(ROWS) == 18
    assert all(("| 64 |" in line) == line.endswith("| predicted |") for line in rows)
    assert all(value in text for value in ("2.32", "2.93", "1.57", "1.53", "1.38"))
    kept = Path(__file__).resolve().parent.parent / "docs" / "paper.md"
    assert kept.read_text() == text, "docs/paper.md is old: python examples/paper_tables.py --out docs/paper.md"
