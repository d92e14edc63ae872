"""docs/checkpoints.md runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_readme import BLOCK

PAGE = Path(__file__).resolve().parent.parent / "docs" / "checkpoints.md"


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = {"__name__": "checkpoints"}
    for source, printed in BLOCK.findall(PAGE.read_text()):
        exec(compile(source, str(PAGE), "exec", dont_inherit=True), names)
        out = capsys.readouterr().out
        assert not printed or out == printed
