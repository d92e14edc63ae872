"""The README's Python blocks run; a text block right after one is what it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall(README.read_text())


def test_the_readme_has_code() -> None:
    assert BLOCKS


@pytest.mark.parametrize(("source", "printed"), BLOCKS, ids=range(len(BLOCKS)))
def test_block(source: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(source, str(README), "exec"), {"__name__": "readme"})
    if printed:
        assert capsys.readouterr().out == printed
