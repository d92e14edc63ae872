"""Paths that users give for files to be written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

from partir.errors import PartirError


def path_of_file(path: str | os.PathLike[str], what: str, example: str, error: type[PartirError] = PartirError) -> Path:
    r"""Return a path.

    Args:
        path: as a user gives it.
        what: is written there, ``"the plan"``.
        example: of a path, ``"plan.json"``.
        error: that is raised.

    Raises:
        PartirError: it is no path of a file.

    >>> path_of_file("plan.json", "the plan", "plan.json").name
    'plan.json'
    """
    give = f"{what} cannot be written. Give a path, {example}."
    if not isinstance(cast(object, path), (str, os.PathLike)):
        raise error(f"{path!r} is a {type(path).__name__}: {give}")
    if "\0" in os.fspath(path):
        raise error(f"{os.fspath(path)!r} has a NUL character in it: {give}")
    if not Path(path).name:
        raise error(f"{str(Path(path))!r} names no file: {give}")
    return Path(path)
