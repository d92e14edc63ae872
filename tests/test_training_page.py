"""The code of docs/training.md runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_readme import BLOCK

PAGE = Path(__file__).resolve().parent.parent / "docs" / "training.md"
BLOCKS = [source for source, _ in BLOCK.findall(PAGE.read_text())]


@pytest.mark.parametrize("source", BLOCKS, ids=range(len(BLOCKS)))
def test_block(source: str) -> None:
    exec(compile(source, str(PAGE), "exec"), {"__name__": "training"})
