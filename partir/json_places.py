"""Values of a JSON file that know where they stand, so that a mistake in one is named by field and line.

    entry = read_json(path)                         # the whole file
    entry["tensors"][3]["layout"].fail("is no layout")
    PlanError: plan.json:41: tensors[3].layout is no layout
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, cast

from partir.errors import PlanError, first_line

Step = str | int
NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "an integer", float: "a fraction"}
LARGEST = 2**63 - 1
WHITE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True)
class File:
    """A JSON file as it was read.

    Args:
        name: its path, as the user gave it.
        text: what it holds.
    """

    name: str
    text: str

    def line(self, path: Sequence[Step]) -> int:
        """Return the line, from 1, of the value at a path (of its key, for a value of an object)."""
        return self.text.count("\n", 0, _position(self.text, _skip(self.text, 0), path)) + 1


@dataclass(frozen=True)
class Entry:
    """One value of a file.

    Args:
        file: the file.
        path: keys and list indices that lead to it.
        value: the parsed value.
    """

    file: File
    path: tuple[Step, ...]
    value: object

    def fail(self, message: str) -> NoReturn:
        """Raise an error that names file, line and field.

        Args:
            message: what is wrong with the field and what is legal: "is 3; write a text".
        """
        raise PlanError(f"{self.where}: {self.field} {message}".replace(":  ", ": "))

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self.file.name}:{self.file.line(self.path)}"

    @property
    def field(self) -> str:
        """The path as text, ``tensors[3].layout``."""
        text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path)
        return text.removeprefix(".") or "the file"

    def object(self, required: Sequence[str] = (), optional: Sequence[str] | None = None) -> Mapping[str, Entry]:
        """Return the entries of an object by key.

        Args:
            required: keys that it must have.
            optional: further keys that it may have; None: any.
        """
        if isinstance(self.value, Repeated):
            self.fail(f"names {self.value.key!r} twice; name it once.")
        items = cast("dict[str, object]", self._expect(dict))
        for key in required:
            if key not in items:
                self.fail(f"has no {key!r}; it needs {', '.join(map(repr, required))}.")
        legal = [*required, *(optional or ())]
        for key in items:
            if optional is not None and key not in legal:
                self._child(key, items[key]).fail(f"is no field; legal here: {', '.join(map(repr, legal))}.")
        return {key: self._child(key, value) for key, value in items.items()}

    def list(self) -> Iterator[Entry]:
        """Yield the entries of a list."""
        for index, value in enumerate(cast("list[object]", self._expect(list))):
            yield self._child(index, value)

    def text(self) -> str:
        """Return a text."""
        return cast(str, self._expect(str))

    def integer(self, least: int = 0) -> int:
        """Return an integer of ``least`` or more."""
        number = cast(int, self._expect(int))
        if number > LARGEST:
            self.fail(f"is {_shown(number)}; it is {LARGEST} or less.")
        return number if number >= least else self.fail(f"is {_shown(number)}; it is {least} or more.")

    def _expect(self, kind: type) -> object:
        if type(self.value) is kind:
            return self.value
        self.fail(f"is {_shown(self.value)}; write {NAMES[kind]}.")

    def _child(self, step: Step, value: object) -> Entry:
        return Entry(self.file, (*self.path, step), value)


def read_json(path: Path) -> Entry:
    """Return what a JSON file holds.

    Raises:
        PlanError: it cannot be read or is not JSON (with line and column), or names a key twice.
    """
    try:
        file = File(str(path), path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: is no JSON: byte {error.start} is no UTF-8 text.") from error
    try:
        return Entry(file, (), json.loads(file.text, object_pairs_hook=_without_repeats, parse_constant=_no_constant))
    except json.JSONDecodeError as error:
        raise PlanError(f"{path}:{error.lineno}: is no JSON: column {error.colno}: {error.msg}.") from error
    except RecursionError as error:
        raise PlanError(f"{path}: is nested too deep.") from error
    except ValueError as error:  # Python refuses integers of thousands of digits
        raise PlanError(f"{path}: {error if isinstance(error, _Refused) else f'cannot be read: {first_line(error)}'}") from error


class _Refused(ValueError):
    """JSON that Python reads and partir does not."""


@dataclass(frozen=True)
class Repeated:
    """An object that names a key twice."""

    key: str


def _without_repeats(pairs: list[tuple[str, object]]) -> object:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    keys = [key for key, _ in pairs]
    return Repeated(next(key for key in keys if keys.count(key) > 1))


def _no_constant(text: str) -> object:
    raise _Refused(f"is no JSON: it holds the number {text}.")


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{NAMES.get(type(value), 'null')} ({text[:30]}...)"


def _position(text: str, start: int, path: Sequence[Step]) -> int:
    """Return where the value at ``path`` (its key, in an object) begins in the text of the value that begins at ``start``."""
    if not path:
        return start
    decoder, at, index = json.JSONDecoder(), _skip(text, start + 1), 0
    while True:
        here, step = at, cast(Step, index)
        if text[start] == "{":
            step, at = decoder.raw_decode(text, at)
            at = _skip(text, _skip(text, at) + 1)
        if step == path[0]:
            return here if len(path) == 1 else _position(text, at, path[1:])
        at = _skip(text, _skip(text, decoder.raw_decode(text, at)[1]) + 1)
        index += 1


def _skip(text: str, at: int) -> int:
    """Return the place of the first character that is no white space."""
    return cast("re.Match[str]", WHITE.match(text, at)).end()
