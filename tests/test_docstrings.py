"""Every example in a docstring of partir is run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import partir

ROOT = Path(partir.__file__).parent


def modules_with_examples() -> list[str]:
    """Return the dotted names of the modules of partir that have an example, those of passes and runtime (links) too."""
    folders = [ROOT, ROOT / "passes", ROOT / "runtime"]  # a pattern does not follow links
    files = {file for folder in folders for file in folder.rglob("*.py") if ">>> " in file.read_text()}
    names = (".".join(file.relative_to(ROOT.parent).with_suffix("").parts) for file in files)
    return sorted(name.removesuffix(".__init__") for name in names)


def test_examples_are_found() -> None:
    found = modules_with_examples()
    assert {"partir.mesh", "partir.suggest", "partir.passes.trace", "partir.runtime.record", "partir.hardware"} <= set(found)
    assert len(found) > 40 and len(set(found)) == len(found)


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed
