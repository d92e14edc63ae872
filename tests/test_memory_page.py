"""The Python blocks of docs/memory.md run; a text block right after one is what it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs/memory.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("source", "printed"), BLOCKS, ids=range(len(BLOCKS)))
def test_block(source: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(source, str(PAGE), "exec"), {"__name__": "memory"})
    if printed:
        assert capsys.readouterr().out == printed
