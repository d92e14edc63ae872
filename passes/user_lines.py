"""Errors of tracing that start with the line of the user's code, and stack traces that end with it."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from partir.errors import TraceError, first_line

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent.parent)  # all of partir

DATA_DEPENDENT = (
    "{what}: one graph must serve every input, so control flow, Python numbers and shapes may depend on shapes only. "
    "Use torch.where, masks or a fixed size instead."
)


def user_stack(stack_trace: str) -> str:
    """Return a stack trace without the frames of torch and of this package, if others remain.

    The line that made a node is then the last one, also where the op is called by a module of ``torch.nn``. Where the whole
    model is made of such modules, the last line of theirs stays.
    """
    frames = ["  File " + part for part in ("\n" + stack_trace).replace("\nFile ", "\n  File ").split("\n  File ")[1:]]
    files = [frame.split('"')[1] if '"' in frame else "" for frame in frames]
    own = [frame for frame, file in zip(frames, files, strict=True) if not _foreign(file)]
    modules = [frame for frame, file in zip(frames, files, strict=True) if _is_torchs_module(file)]
    return "\n".join(own or modules or frames)


def _is_torchs_module(filename: str) -> bool:
    return filename.startswith(f"{_TORCH}/nn/modules/") and not filename.endswith("/module.py")


def _foreign(filename: str) -> bool:
    return filename.startswith((_TORCH, _HERE, "<"))


def fail(message: str) -> NoReturn:
    """Raise a TraceError that starts with the innermost line of user code now running."""
    frames = [frame for frame in traceback.extract_stack() if not _foreign(frame.filename)]
    raise TraceError(f"{_where(frames)}{message}")


def refuse(error: Exception) -> NoReturn:
    """Raise a TraceError for whatever stopped the trace, with the user's line."""
    cause: BaseException = error
    while isinstance(cause.__cause__, Exception) and not isinstance(cause, TraceError):
        cause = cause.__cause__
    if isinstance(cause, TraceError):
        raise cause from None
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _foreign(frame.filename)]
    text = first_line(error)
    if "DataDependent" in type(error).__name__ or "data-dependent" in text.lower():
        raise TraceError(_where(frames) + DATA_DEPENDENT.format(what="control flow depends on data")) from error
    raise TraceError(f"{_where(frames)}the model cannot be traced: {type(error).__name__}: {text}") from error


def _where(frames: Sequence[traceback.FrameSummary]) -> str:
    if not frames:
        return ""
    frame = frames[-1]
    code = f"`{frame.line.strip()}`: " if frame.line else ""
    return f"{frame.filename}:{frame.lineno}: {code}"
