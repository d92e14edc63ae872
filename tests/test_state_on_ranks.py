"""Checkpoints of 8 gloo ranks, started once; what they saved is loaded in one process afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import partir
from tests import state_checks
from tests.distributed_worker import RankReport, run_world
from tests.state_checks import FOLDER, SAVED, close
from tests.state_model import batches, parallel, remove_shared_folders, shared_folder, train

CHECKS = [name for name in vars(state_checks) if name.startswith("check_") and name != "check_plain_twin"]

pytestmark = [pytest.mark.timeout(900), pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture(scope="module")
def world() -> Iterator[list[RankReport]]:
    yield run_world(8, [("tests.state_checks", name) for name in CHECKS], timeout=840)
    remove_shared_folders()


@pytest.mark.parametrize("name", CHECKS)
def test_on_8_ranks(world: list[RankReport], name: str) -> None:
    failed = [report.errors[key] for report in world for key in ("start", name) if report.errors.get(key)]
    assert not failed, "\n".join(failed)
    assert all(name in report.errors for report in world)


@pytest.mark.parametrize("mesh", [(4, 1, 2), (1, 1, 1), (2, 1, 2, 2)])
def test_saved_by_8_ranks_and_loaded_in_one_process(world: list[RankReport], mesh: Any) -> None:
    folder = shared_folder(FOLDER)
    model, optimizer = parallel(mesh, 8)
    losses = partir.load_checkpoint(model, optimizer, folder / "step_8").extra["losses"]
    found = partir.load_checkpoint(model, optimizer, folder / "step_3")
    assert found.step == SAVED and close(train(model, optimizer, batches(8)[SAVED:]), losses)
