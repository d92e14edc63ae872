"""The errors that partir raises: each message says where, what law, expected and actual, what to do."""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, cast


class PartirError(Exception):
    """Base of every error that partir raises on purpose."""


class MeshError(PartirError):
    """A mesh that does not exist: sizes, axis names, or the world size."""


class LayoutError(PartirError):
    """A layout that cannot be: text, axes used twice, or sizes that do not divide."""


class RuleError(PartirError):
    """An op without a rule, or a rule that contradicts its op."""


class TypeRuleError(PartirError):
    """Operands whose per-axis types may not meet, or a collective on the wrong type."""


class TraceError(PartirError):
    """A model that cannot be captured as a graph."""


class RankError(PartirError):
    """Ranks that disagree, stopped, or do not answer."""


class NonFiniteError(PartirError, FloatingPointError):
    """A loss that is nan or inf, where `check_finite` asks for it."""


class VerifyError(PartirError):
    """A graph or a result that fails its check."""


class HardwareError(PartirError):
    """A hardware profile that cannot be read, or that lacks what is asked of it."""


class PlanError(PartirError):
    """A plan file that cannot be read or written, is of another model, or was edited into nonsense."""


class CheckpointError(PartirError):
    """A checkpoint that is incomplete, damaged or of another model, or that cannot be written."""


class PaddingError(PartirError):
    """A length that may not be padded: the result would depend on the pad."""


class UnknownNameError(PartirError, KeyError):
    """A name that nothing has; the message has the closest names."""

    def __str__(self) -> str:
        return Exception.__str__(self)

    @classmethod
    def of(cls, what: str, name: str, known: Iterable[str]) -> UnknownNameError:
        """Return the error that nothing of ``what`` is called ``name``, with the closest of the ``known`` names."""
        close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
        hint = f" Closest: {', '.join(close)}." if close else ""
        return cls(f"no {what} is called {name!r}.{hint}")


class OutOfRangeError(PartirError, IndexError, RuntimeError):
    """An index that its dim does not have, as a token id beyond the vocabulary.

    It is what one device raises, too: torch has an IndexError for an embedding or a loss, a RuntimeError for a gather or a scatter.
    """


_OUT_OF_RANGE = re.compile(r"\bout of (\w+ )?(range|bounds)\b")  # torch has no class for what a gather or a scatter raises


def is_out_of_range(error: Exception) -> bool:
    """Say whether an op failed because an index lies beyond its dim."""
    return isinstance(error, IndexError) or (isinstance(error, RuntimeError) and _OUT_OF_RANGE.search(str(error)) is not None)


def source_line(meta: Mapping[str, Any]) -> str:
    """Return ``file:line (module path)`` of the user's code that made a graph node.

    Args:
        meta: ``node.meta`` as ``torch.export`` fills it.
    """
    frames = [line.strip() for line in str(meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File ")]
    where = "<unknown line>"
    if frames:
        path, line = frames[-1].split(",")[:2]
        where = f"{path[6:-1].rsplit('/', 1)[-1]}:{line.strip().removeprefix('line ')}"
    module = module_path(meta)
    return f"{where} ({module})" if module else where


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def add_note(error: BaseException, note: str) -> None:
    """Add a line to what Python prints of an error, which keeps its class and its text; Python 3.10 prints no such lines."""
    if hasattr(error, "add_note"):
        cast(Any, error).add_note(note)


def name_in_generated_code(error: BaseException) -> str:
    """Return the name that the line assigns which raised an error in code that torch.fx generated; "" where none did."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith("<eval_with_key>")]
    return (frames[-1].line or "").split("=")[0].split(":")[0].strip() if frames else ""


def module_path(meta: Mapping[str, Any]) -> str:
    """Return the dotted name of the innermost module that made a node, or ``""`` for the root."""
    stack = meta.get("nn_module_stack")
    if not stack:
        return ""
    innermost = list(stack.values())[-1]
    path: Any = cast("tuple[Any, ...]", innermost)[0] if isinstance(innermost, tuple) else innermost
    return str(path).removeprefix("L['self'].").removeprefix("L['self']")
