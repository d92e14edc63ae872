"""The benchmark of predicted time: its statistics, and its page from numbers that are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import predicted_time


def test_spearman_by_hand() -> None:
    assert predicted_time.ranking([3.0, 1.0, 2.0, 2.0]) == [3, 0, 1.5, 1.5]
    assert predicted_time.spearman([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1)
    assert predicted_time.spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert predicted_time.spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)  # 1 - 6 * 2 / (4 * 15)


def test_meshes_of_eight_ranks() -> None:
    found = predicted_time.meshes(8)
    assert len(set(found)) == 10 and all(x * y * z == 8 for x, y, z in found)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {(8, 1, 1): ([0.3, 0.1], 0.30), (4, 2, 1): ([0.2, 0.3], 0.20), (2, 2, 2): ([0.4, 0.5], 0.15), (1, 1, 8): ([0.9, 0.8], 0.90)}
    records = [
        {"model": "gpt", "mesh": mesh, "seconds": seconds, "predicted": predicted, "compute": 0.1, "exposed": predicted - 0.1}
        for mesh, (seconds, predicted) in times.items()
    ]
    sizes = {"ranks": 8, "layers": 1, "hidden": 64, "batch": 4, "seq": 8, "repeats": 2, "seconds": 0.1}
    (tmp_path / "run.json").write_text(json.dumps({"profile": 'name = "toy"', "sizes": sizes, "records": records}))
    page = tmp_path / "time.md"
    monkeypatch.setattr("sys.argv", ["predicted_time.py", "--read", str(tmp_path / "run.json"), "--out", str(page)])
    predicted_time.main()
    text = page.read_text()
    assert "Spearman's rho 0.20 over 4 meshes; of single repeats 0.20 to 0.40." in text
    assert "The measured best, (8, 1, 1), is number 3 of the predicted, in the top 3." in text
    assert "| (1, 1, 8) | 0.850 | 0.800 | 0.900 | 0.900 | 0.100 | 0.800 |" in text
