"""Rank death: every wait ends, and the error says who stopped, where and why.

gloo tells a rank when a member of its own group is gone. The others would wait for that rank, so a rank that stops closes its
connections, and says why in the store of torch.distributed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from partir.errors import RankError, first_line
from partir.runtime import uncaught
from partir.runtime.torch_dtensor import default_store, dist

LOOK_EVERY = timedelta(seconds=2)
LISTEN_SECONDS = 5.0
# The process that keeps the store takes it along, and with it the words of ranks that are slow to notice.
HOST_LISTEN_SECONDS = 15.0


class Failures:
    """What the ranks know of each other's failures.

    Args:
        rank: this rank.
        num_ranks: ranks that take part.
        timeout: the longest that a wait may take.
        hang_up: closes this rank's connections.
        name: of the session whose failures these are.
    """

    def __init__(self, rank: int, num_ranks: int, timeout: timedelta, hang_up: Callable[[], None], name: str) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeout = timeout
        self.call = 0
        """The number of the call under way or last made, from 1; 0 before the first."""
        self._hang_up = hang_up
        self._stopped = ""
        self._store: Any = dist.PrefixStore(f"partir/{name}", default_store())
        uncaught.watch(self)

    def wait(self, work: Any, where: str, on_cpu: bool, direct: bool) -> None:
        """Wait for a started message.

        Args:
            work: what torch.distributed returned.
            where: the node and collective, for the error.
            on_cpu: on an accelerator only the stream waits, and the backend's watchdog ends it.
            direct: a single send or receive, which gloo lets nobody wait for in steps: a wait that ends early closes the connection.

        Raises:
            RankError: it failed, took longer than the timeout, or another rank stopped meanwhile.
        """
        try:
            if not on_cpu:
                work.wait()
            elif direct:
                work.wait(self.timeout)
            else:
                self._wait_in_steps(work)
        except RankError as error:
            raise self.failure(where, str(error)) from None
        except RuntimeError as error:
            raise self.failure(where, _cause(error)) from error

    def _wait_in_steps(self, work: Any) -> None:
        deadline = time.monotonic() + self.timeout.total_seconds()
        while not work.is_completed():
            try:
                work.wait(LOOK_EVERY)
            except RuntimeError:
                if work.is_completed():
                    raise
                if time.monotonic() > deadline:
                    raise RankError(f"no answer within {self.timeout.total_seconds():.0f} s") from None
                if self._anyone():
                    raise RankError("another rank stopped") from None
        work.wait()

    @contextmanager
    def told(self, where: str) -> Generator[None]:
        """Turn a connection that is lost in torch's own code into the error that says who stopped.

        Args:
            where: what is done meanwhile, for the error; by default of the call at hand.

        Raises:
            RankError: the connection was lost.
        """
        try:
            yield
        except Exception as error:
            if not uncaught.is_lost_connection(error):
                raise
            when = "" if " of call " in where else f", before call {max(self.call, 1)}"
            raise self.failure(where + when, _cause(error)) from error

    def failure(self, where: str, cause: str) -> RankError:
        """Tell the others that this rank stops, hear who else did, and return the error to raise."""
        self.report(f"stopped at {where}: {cause}")
        return RankError(f"rank {self.rank} stopped at {where}: {cause}.{self.words_of_others()}")

    def report(self, text: str) -> None:
        """Leave word for the other ranks that this one stops, and let them feel it."""
        if self._stopped:
            return
        self._stopped = text
        self._ask(lambda store: store.set(str(self.rank), text))
        self._ask(lambda store: store.set("any", str(self.rank)))
        self._hang_up()

    def check(self) -> None:
        """Raise if this rank has stopped: its connections are closed.

        Raises:
            RankError: it has.
        """
        if self._stopped:
            raise RankError(f"rank {self.rank} {self._stopped}. Its connections are closed: parallelize the model again, on every rank.")

    def words_of_others(self) -> str:
        """Return what the other ranks said, for the end of an error."""
        told = self._listen()
        silent = [rank for rank in range(self.num_ranks) if rank != self.rank and rank not in told]
        text = ""
        if self._store is None:
            text = " The store of torch.distributed is gone, and with it the process that keeps it: rank 0, or the agent of torchrun."
        elif silent:
            text = f" No word from rank {', '.join(map(str, silent))}: it died or hangs."
        return text + "".join(f"\n    rank {rank} {said}" for rank, said in sorted(told.items()))

    def _anyone(self) -> bool:
        found = self._ask(lambda store: store.check(["any"]))
        return self._store is None or bool(found)

    def _listen(self) -> dict[int, str]:
        told: dict[int, str] = {}
        keeps_store = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        deadline = time.monotonic() + (HOST_LISTEN_SECONDS if keeps_store else LISTEN_SECONDS)
        while len(told) < self.num_ranks - 1 and self._store is not None:
            for rank in range(self.num_ranks):
                if rank != self.rank and rank not in told:
                    text = self._ask(lambda store, rank=rank: store.get(str(rank)) if store.check([str(rank)]) else None)
                    if text is not None:
                        told[rank] = text.decode()
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return told

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """Return what the store says; once it does not answer it is never asked again, for torch prints a page each time."""
        if self._store is None:
            return None
        try:
            return question(self._store)
        except Exception:
            # The store's own process may be the dead one; the error at hand matters more.
            self._store = None
            return None


def _cause(error: BaseException) -> str:
    """Return the first line of an error, without gloo's source line and its advice."""
    return re.sub(r"^\[\S+\] |\. This is typically .*", "", first_line(error))
