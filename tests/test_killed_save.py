"""A rank killed while saving: the others are told, and every checkpoint that has its name is whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.killed_save import kill_and_check
from tests.state_model import remove_shared_folders

pytestmark = [pytest.mark.timeout(300), pytest.mark.ranks]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    remove_shared_folders()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_earlier_checkpoints_survive_a_kill(asynchronous: bool) -> None:
    assert "complete" in kill_and_check(2, asynchronous)
