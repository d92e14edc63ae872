"""The README's Python blocks run; a text block right after one is what it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall((ROOT / "README.md").read_text())


def test_the_readme_has_code() -> None:
    assert BLOCKS


@pytest.mark.parametrize(("source", "printed"), BLOCKS, ids=range(len(BLOCKS)))
def test_block(source: str, printed: str, tmp_path: Path) -> None:
    program = tmp_path / "block.py"
    program.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{source}")
    run = subprocess.run([sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    if printed:
        assert run.stdout == printed
