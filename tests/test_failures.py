"""Ranks that fail: each of the others is told, soon, what, where and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kill_ranks import kill_at_random_points
from tests import failing_ranks
from tests.distributed_worker import RankReport, run_world

CHECKS = [("tests.failing_ranks", name) for name in vars(failing_ranks) if name.startswith("check_")]

pytestmark = [pytest.mark.timeout(300), pytest.mark.ranks]


@pytest.fixture(scope="module")
def world() -> list[RankReport]:
    return run_world(4, CHECKS, timeout=200, preload=["torch", "torch.distributed.tensor", "partir"])


@pytest.mark.parametrize("name", [name for _, name in CHECKS])
def test_on_4_ranks(world: list[RankReport], name: str) -> None:
    failed = [report.errors[key] for report in world for key in ("start", name) if report.errors.get(key)]
    missing = [report.rank for report in world if name not in report.errors]
    assert not failed, "\n".join(failed)
    assert not missing, f"ranks {missing} did not reach the end of {name}"


# In "clip" the connection is lost in torch's own code, whose error says nothing of ranks.
@pytest.mark.parametrize("phase", ["step", "clip"])
def test_survivors_of_a_kill_end_and_name_it(phase: str, tmp_path: Path) -> None:
    trials = kill_at_random_points(phase, times=1, num_ranks=4, seed=0, folder=tmp_path)
    assert not [fault for trial in trials for fault in trial.faults()], "\n".join(map(str, trials))
