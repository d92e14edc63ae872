"""Write a drawing to a file, whole or not at all."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, cast

import graphviz  # pyright: ignore[reportMissingTypeStubs]

from partir.errors import PartirError

RENDERED, TEXT, PAGE = (".svg", ".png", ".pdf"), (".dot", ".gv"), (".html",)
INSTALL = "apt install graphviz / brew install graphviz"


def suffix_of(path: Path) -> str:
    """Return the suffix of a path for a drawing.

    Raises:
        PartirError: no drawing has it, or the folder does not exist.
    """
    known = (*RENDERED, *TEXT, *PAGE)
    if path.suffix.lower() not in known:
        found = f"suffix {path.suffix!r}" if path.suffix else "no suffix"
        raise PartirError(f"drawing {path}: it has {found}; a drawing is one of {', '.join(known)}.")
    if not path.parent.is_dir():
        raise PartirError(f"drawing {path}: there is no folder {path.parent}; make it first.")
    return path.suffix.lower()


def rendered(graph: graphviz.Digraph, form: str) -> bytes:
    """Return a graph as svg, png or pdf.

    Raises:
        PartirError: the program `dot` is missing or fails.
    """
    try:
        return cast(bytes, cast(Any, graph).pipe(format=form, quiet=True))
    except graphviz.ExecutableNotFound:
        raise PartirError(f"a drawing in {form} needs the program dot: {INSTALL}; .html and .dot need none.") from None
    except subprocess.CalledProcessError as error:
        said = cast(bytes, error.stderr or b"").decode(errors="replace").strip()
        raise PartirError(f"dot could not draw the graph as {form}: {said or error}") from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under another name beside its own, then rename it: a reader never finds half of it.

    Raises:
        PartirError: the path cannot be written.
    """
    unfinished = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            unfinished = Path(file.name)
            file.write(content)
        unfinished.chmod(0o666 & ~_mask())
        unfinished.replace(path)
    except OSError as error:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
        raise PartirError(f"{path} cannot be written: {error.strerror}.") from None


def _mask() -> int:
    """Return the process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
