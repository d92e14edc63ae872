"""The rules that keep the repository's parts apart."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def imports(path: Path) -> Iterator[str]:
    """Yield the full name of every module (and of every name taken from one) that a file imports."""
    folder = path.relative_to(ROOT).parent.parts
    package = folder if folder[0] in ("partir", "examples", "benchmarks", "tests") else ("partir", *folder)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def offenders(folder: str, *forbidden: str) -> list[str]:
    """Return `file: import` for each import in a folder that lies within a forbidden package."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths, f"{folder} holds no Python file"
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in paths
        for name in imports(path)
        if any(within(name, package) for package in forbidden)
    ]


@pytest.mark.parametrize("folder", ["partir", "passes", "runtime", "tests", "examples", "benchmarks"])
def test_nobody_imports_the_bare_folders(folder: str) -> None:
    assert offenders(folder, "passes", "runtime") == []


def test_passes_do_not_import_runtime() -> None:
    assert offenders("passes", "partir.runtime") == []


def test_runtime_does_not_import_passes() -> None:
    assert offenders("runtime", "partir.passes") == []


def test_example_models_do_not_import_partir() -> None:
    assert offenders("examples/models", "partir") == []


def test_scan_sees_each_form_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import partir.runtime\nfrom partir import runtime\nfrom ..runtime import x\nfrom .. import runtime as r\n"
    (tmp_path / "passes").mkdir()
    (tmp_path / "passes" / "bad.py").write_text(source)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert len(offenders("passes", "partir.runtime")) == 4


def test_bare_modules_are_never_loaded() -> None:
    """A second copy of a module would have second classes."""
    source = """if True:
        import sys, partir, partir.passes, partir.runtime
        print("passes" in sys.modules, "runtime" in sys.modules)"""
    run = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.stdout.split() == ["False", "False"], run.stderr


@pytest.mark.parametrize("name", ["passes", "runtime"])
def test_packages_are_relative_links(name: str) -> None:
    assert (ROOT / "partir" / name).readlink() == Path("..") / name
