"""Rule text with its file name, to point at a place in it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partir.errors import RuleError


@dataclass(frozen=True)
class Source:
    """The text of one file."""

    path: str
    text: str

    @classmethod
    def read(cls, path: str | Path) -> Source:
        """Return the text of a file.

        Raises:
            RuleError: the file cannot be read, or is not UTF-8 text.
        """
        try:
            return cls(str(path), Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise RuleError(f"{path}: not text: byte {error.start} is no UTF-8; a rule file is plain text.") from None
        except OSError as error:
            raise RuleError(f"{path}: {error.strerror}; a rule file is given by its path.") from None

    @property
    def identity(self) -> tuple[str, str]:
        """The file's name without folders, and a short SHA-256 of its text."""
        return Path(self.path).name, hashlib.sha256(self.text.encode()).hexdigest()[:16]

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
