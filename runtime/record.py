"""Count what a running program moves, where it moves.

>>> with record_communication() as log:
...     received(rank=0, op="all_gather", axis="y", num_bytes=96, stage="forward")
>>> log.events
[Event(rank=0, op='all_gather', axis='y', bytes=96, stage='forward')]
>>> log.bytes(rank=0), log.bytes(rank=1)
(96, 0)
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Event:
    """Data that one rank received in one collective.

    Args:
        rank: who received it.
        op: the collective, ``all_gather``.
        axis: the mesh axes of its group, ``"y"`` or ``"z.x"``.
        bytes: bytes received from other ranks.
        stage: ``"forward"`` or ``"backward"``.
    """

    rank: int
    op: str
    axis: str
    bytes: int
    stage: str


@dataclass
class CommunicationLog:
    """Events in the order in which they happened."""

    events: list[Event] = field(default_factory=list[Event])

    def bytes(
        self, *, rank: int | None = None, op: str | None = None, axis: str | None = None, stage: str | None = None
    ) -> int:
        """Return the bytes received in all events that match."""
        wanted = {"rank": rank, "op": op, "axis": axis, "stage": stage}
        given = [(name, value) for name, value in wanted.items() if value is not None]
        return sum(event.bytes for event in self.events if all(getattr(event, name) == value for name, value in given))


# The logs that are open. Not a ContextVar: autograd runs a backward on its own thread, which must count as well.
_open: list[CommunicationLog] = []


@contextmanager
def record_communication() -> Generator[CommunicationLog]:
    """Record what each rank receives while the block runs.

    Simulated, the log has events of every rank; distributed, those of this process. Not counted: what assembling a
    simulated result takes, and the signature check before a call.
    """
    log = CommunicationLog()
    _open.append(log)
    try:
        yield log
    finally:
        _open[:] = [other for other in _open if other is not log]


def recording() -> bool:
    """Return whether anybody is counting."""
    return bool(_open)


def received(*, rank: int, op: str, axis: str, num_bytes: int, stage: str) -> None:
    """Tell every open log that ``rank`` received ``num_bytes`` from others. A runtime calls this where data moves."""
    if not num_bytes:
        return
    event = Event(rank, op, axis, num_bytes, stage)
    for log in _open:
        log.events.append(event)
