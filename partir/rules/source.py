"""Rule text with its file name, to point at a place in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from partir.errors import RuleError


@dataclass(frozen=True)
class Source:
    """The text of one file."""

    path: str
    text: str

    def at(self, line: int) -> str:
        """``file:line``."""
        return f"{self.path}:{line}"

    def character(self, line: int, column: int) -> str:
        """Return the character at a 1-based place."""
        return (self._line(line) + "\n")[column - 1]

    def error(self, message: str, token: Any = None, line: int | None = None, column: int | None = None) -> RuleError:
        """Make an error that shows the line with a caret under the place.

        Args:
            token: a lark token, which knows its place; or give `line` and `column`, both from 1.
        """
        line = int(line or getattr(token, "line", None) or 1)
        column = int(column or getattr(token, "column", None) or 1)
        if line < 1:
            line, column = self.text.count("\n") + 1, 1
        caret = " " * (column - 1) + "^"
        return RuleError(f"{self.path}:{line}:{column}: {message}\n    {self._line(line)}\n    {caret}")

    def _line(self, number: int) -> str:
        lines = self.text.splitlines() or [""]
        return lines[min(number, len(lines)) - 1].rstrip()
