"""Layouts by name, with a hint where a name is unknown."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from partir.errors import UnknownNameError
from partir.layout import Layout


class Layouts(Mapping[str, Layout]):
    """Layouts by name: dotted for parameters and modules of one value, as in `plan.text("annotated")` for the rest."""

    def __init__(self, known: Mapping[str, Layout]) -> None:
        self._known = dict(known)

    def __getitem__(self, name: str) -> Layout:
        if name not in self._known:
            close = difflib.get_close_matches(name, self._known, n=3, cutoff=0.4)
            hint = f" Closest: {', '.join(close)}." if close else ""
            raise UnknownNameError(f"no parameter, input or value is called {name!r}.{hint}")
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)
