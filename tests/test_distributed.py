"""The distributed runtime on 8 gloo ranks, started once for all checks; and worlds whose ranks disagree or die."""

from __future__ import annotations

import pytest

from tests import distributed_checks
from tests.dying_rank import DEAD
from tests.distributed_worker import RankReport, run_world

CHECKS = [name for name in vars(distributed_checks) if name.startswith("check_")]


@pytest.fixture(scope="module")
def world() -> list[RankReport]:
    return run_world(8, "tests.distributed_checks", CHECKS, timeout=150)


@pytest.mark.parametrize("name", CHECKS)
def test_on_8_ranks(world: list[RankReport], name: str) -> None:
    missing = [report.rank for report in world if name not in report.errors]
    failed = [report.errors[name] for report in world if report.errors.get(name)]
    assert not failed, "\n".join(failed)
    assert not missing, f"ranks {missing} did not reach the end of {name}"


def test_a_dead_rank_is_named_by_every_survivor() -> None:
    reports = run_world(8, "tests.dying_rank", ["check_survivors_are_told"], timeout=80)
    survivors = [report for report in reports if report.rank != DEAD]
    assert [report.errors["check_survivors_are_told"] for report in survivors] == [""] * 7
    assert reports[DEAD].exit_code == 1
