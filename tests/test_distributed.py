"""The distributed runtime on 8 gloo ranks, started once for all checks; and worlds whose ranks disagree or die."""

from __future__ import annotations

import pytest

from tests import distributed_checks, evaluation_checks, model_checks, module_checks, training_checks
from tests.distributed_worker import RankReport, run_world
from tests.dying_rank import DEAD

MODULES = {
    "tests.distributed_checks": distributed_checks,
    "tests.module_checks": module_checks,
    "tests.evaluation_checks": evaluation_checks,
    "tests.model_checks": model_checks,
    "tests.training_checks": training_checks,
}
CHECKS = [(module, name) for module, found in MODULES.items() for name in vars(found) if name.startswith("check_")]


pytestmark = [pytest.mark.timeout(600), pytest.mark.ranks]


@pytest.fixture(scope="module")
def world() -> list[RankReport]:
    return run_world(8, CHECKS, timeout=540)


@pytest.mark.parametrize(("module", "name"), CHECKS)
def test_on_8_ranks(world: list[RankReport], module: str, name: str) -> None:
    failed = [report.errors[key] for report in world for key in ("start", name) if report.errors.get(key)]
    missing = [report.rank for report in world if name not in report.errors]
    assert not failed, "\n".join(failed)
    assert not missing, f"ranks {missing} did not reach the end of {name}"


def test_a_dead_rank_is_named_by_every_survivor() -> None:
    reports = run_world(8, [("tests.dying_rank", "check_survivors_are_told")], timeout=100)
    survivors = [report for report in reports if report.rank != DEAD]
    assert [report.errors["check_survivors_are_told"] for report in survivors] == [""] * 7
    assert reports[DEAD].exit_code == 1


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_every_model_on_every_mesh_of_8_ranks() -> None:
    reports = run_world(8, [("tests.model_checks", "everywhere")], timeout=2300)
    assert [report.errors.get("everywhere") for report in reports] == [""] * 8, reports


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_models_of_others_on_8_ranks() -> None:
    reports = run_world(8, [("tests.model_checks", "models_of_others")], timeout=2300)
    assert [report.errors.get("models_of_others") for report in reports] == [""] * 8, reports
