"""Measuring a profile: the fit, the command, and what is said when a rank fails or time runs out."""

from __future__ import annotations

from pathlib import Path

import pytest

from partir.cli import main
from partir.errors import RankError
from partir.hardware import load_hardware
from partir.runtime.calibrate import FAMILIES, calibrate
from partir.runtime.fit_pace import Sample, fit_pace


def exact(start: float, latency: float, per_byte: float) -> list[Sample]:
    return [Sample(steps, size, start + steps * latency + size * per_byte) for steps in (1, 3, 7) for size in (10**3, 10**5, 10**7)]


@pytest.mark.parametrize("truth", [(1e-4, 1e-5, 1e-9), (0.0, 1e-5, 1e-9), (1e-4, 0.0, 1e-9)])
def test_the_fit_finds_the_constants(truth: tuple[float, float, float]) -> None:
    pace = fit_pace(exact(*truth))
    assert (pace.start, pace.latency, 1 / pace.bandwidth) == pytest.approx(truth, rel=1e-6, abs=1e-12)


def test_one_size_of_group_gives_a_latency() -> None:
    pace = fit_pace([Sample(1, size, 1e-4 + size * 1e-9) for size in (10**3, 10**6)])
    assert (pace.start, pace.latency, pace.bandwidth) == pytest.approx((0.0, 1e-4, 1e9))


def test_noise_never_gives_a_negative_constant() -> None:
    pace = fit_pace([Sample(1, 10**6, 1e-3), Sample(3, 10**6, 1e-4), Sample(3, 2 * 10**6, 1e-4)])
    assert min(pace.start, pace.latency) >= 0 and pace.bandwidth > 0


def test_two_ranks_write_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.toml"
    assert main(["calibrate", "--ranks", "2", "--seconds", "0.002", "--out", str(path)]) == 0
    hardware = load_hardware(path)
    assert path.read_text() == capsys.readouterr().out
    assert hardware.name == "here" and hardware.ranks_per_node == 2 and "2 ranks, 2 a node, gloo" in hardware.sources[0]
    assert set(hardware.links[0].collectives) == {name for members in FAMILIES.values() for name in members}
    assert 1e7 < hardware.flops["float32"] < 1e14 and 1e6 < hardware.links[0].bandwidth < 1e12


@pytest.mark.slow
def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(RankError, match=r"calibrate: rank [01] of 2 failed: (?s:.*)telegraph"):
        calibrate(2, backend="telegraph")


def test_time_runs_out() -> None:
    with pytest.raises(RankError, match=r"calibrate: ranks \[0, 1\] of 2 had not finished after 0.01 s."):
        calibrate(2, timeout=0.01)


def test_mistakes_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--out", str(tmp_path / "none" / "here.toml")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["calibrate", "--backend", "nccl", "--out", str(tmp_path / "here.toml")]) == 2
    assert "torch sees none" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["calibrate", "--ranks", "0", "--out", "here.toml"])
    assert "--ranks" in capsys.readouterr().err
