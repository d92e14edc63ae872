"""An exception that ends this process ends the waits of the other ranks, and they hear what it was.

Python's own message comes first, unchanged; where the exception is a lost connection, what the other ranks said follows it.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakSet

from partir.errors import PartirError
from partir.runtime.torch_dtensor import dist


class Told(Protocol):
    """A session's failures, as far as the hook knows them."""

    rank: int
    call: int

    def report(self, text: str) -> None:
        """Leave word for the other ranks."""
        ...

    def words_of_others(self) -> str:
        """Return what they said."""
        ...


_watched: WeakSet[Told] = WeakSet()
_hook_before: list[Callable[..., Any]] = []
NOT_THE_USERS = ("site-packages", str(Path(__file__).parent.parent / "partir"), str(Path(__file__).parent), "<eval_with_key>")


def watch(failures: Told) -> None:
    """Tell the other ranks of a session of an exception that nobody catches here."""
    if not _hook_before:
        _hook_before.append(sys.excepthook)
        sys.excepthook = _tell
    _watched.add(failures)


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for failures in list(_watched):
        failures.report(f"raised {describe(error)} {after(failures.call)}")
    _hook_before[0](kind, error, trace)
    if is_lost_connection(error):
        for failures in list(_watched):
            print(f"rank {failures.rank} lost a connection {after(failures.call)}.{failures.words_of_others()}", file=sys.stderr)


def is_lost_connection(error: BaseException) -> bool:
    """Say whether torch.distributed failed because another process is gone: torch has no class for what gloo raises."""
    if isinstance(error, PartirError):
        return False
    text = str(error)
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and ("gloo" in text or "Connection" in text))


def describe(error: BaseException) -> str:
    """Return an exception in one line, with the user's line that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not any(part in frame.filename for part in NOT_THE_USERS)] or frames
    where = f" ({users[-1].filename.rsplit('/', 1)[-1]}:{users[-1].lineno})" if users else ""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}{where}" if text else f"{type(error).__name__}{where}"


def after(call: int) -> str:
    """Return "after call 7", or "before the first call"."""
    return f"after call {call}" if call else "before the first call"
