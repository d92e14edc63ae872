"""Kill one rank at a random point, many times: does every other rank end soon, and say why?

    python -m benchmarks.kill_ranks --phase step --times 20

Each time 4 gloo ranks begin a phase, and `kill -9` takes one of them at a random moment: half of the times after they have joined (they
compile then), half of the times after they are ready (they repeat what the phase does).
Exit code 0: every survivor ended within 60 s with an error that names itself, the call, and the dead rank.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from datetime import timedelta
from io import StringIO
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 60
PRELOADED = ["torch", "torch.distributed.tensor", "partir", "benchmarks.kill_phases"]
MARKS = ("joined", "ready")
WITHIN_SECONDS = {"joined": 10.0, "ready": 3.0}


@dataclass
class Survivor:
    """What one rank left.

    Args:
        rank: which.
        steps: what it said while it worked.
        error: what it printed when it ended.
        seconds: from the kill to its end, None where it did not end.
    """

    rank: int
    steps: list[str] = field(default_factory=list[str])
    error: str = ""
    seconds: float | None = None

    def fault(self, dead: int, store_ended: float) -> str:
        """Say what is wrong with how this rank ended, "" where nothing is.

        Args:
            dead: the rank that was killed.
            store_ended: seconds from the kill to the end of rank 0, which keeps the store: who comes later hears nobody any more.
        """
        if self.seconds is None:
            return f"rank {self.rank} still ran after {LIMIT_SECONDS} s"
        if not re.search(rf"rank {self.rank} .*\b(call \d+|the first call)", self.error):
            return f"rank {self.rank} named neither itself nor a call: {self.error}"
        named = re.search(rf"No word from rank (\d+, )*{dead}\b", self.error)
        if not named and not (store_ended < self.seconds and "The store of torch.distributed is gone" in self.error):
            return f"rank {self.rank} did not name rank {dead}: {self.error}"
        return ""


@dataclass
class Trial:
    """One kill.

    Args:
        dead: the rank.
        mark: what every rank had said when the clock began, of `MARKS`.
        after: seconds from then to the kill.
        ranks: all of them, the dead one too.
    """

    dead: int
    mark: str
    after: float
    ranks: list[Survivor]

    @property
    def survivors(self) -> list[Survivor]:
        """The ranks that were not killed."""
        return [rank for rank in self.ranks if rank.rank != self.dead]

    def faults(self) -> list[str]:
        """Return what is wrong, nothing where nothing is."""
        store_ended = self.ranks[0].seconds
        faults = [survivor.fault(self.dead, LIMIT_SECONDS if store_ended is None else store_ended) for survivor in self.survivors]
        return [fault for fault in faults if fault]

    def __str__(self) -> str:
        point = (self.ranks[self.dead].steps or ["joined"])[-1]
        slowest = max((survivor.seconds or LIMIT_SECONDS for survivor in self.survivors), default=0.0)
        moment = f"{self.after:5.2f} s after all were {self.mark} ({point})"
        return f"rank {self.dead} killed {moment}: last survivor ended {slowest:4.1f} s later"


def kill_once(phase: str, num_ranks: int, dead: int, mark: str, after: float, folder: Path) -> Trial:
    """Start the ranks, kill one `after` seconds after all have said a mark, and collect what the others leave.

    Args:
        phase: a name in `benchmarks.kill_phases.PHASES`.
        folder: for what a phase writes.
    """
    processes, pipes = _start(phase, num_ranks, folder)
    ranks = [Survivor(rank) for rank in range(num_ranks)]
    while not all(mark in rank.steps for rank in ranks):
        _hear(ranks, pipes, 1.0)
    until = time.monotonic() + after
    while time.monotonic() < until:
        _hear(ranks, pipes, until - time.monotonic())
    killed = time.monotonic()
    os.kill(processes[dead].pid, signal.SIGKILL)
    while time.monotonic() < killed + LIMIT_SECONDS and any(process.is_alive() for process in processes):
        _hear(ranks, pipes, 0.2)
        for rank, process in zip(ranks, processes):
            if not process.is_alive() and rank.seconds is None:
                rank.seconds = time.monotonic() - killed
    _hear(ranks, pipes, 0.0)
    for process in processes:
        process.kill()
        process.join()
    return Trial(dead, mark, after, ranks)


def kill_at_random_points(
    phase: str, times: int, num_ranks: int, seed: int, folder: Path, say: Callable[[str], None] = print
) -> list[Trial]:
    """Kill a random rank at a random moment, again and again."""
    chance = random.Random(seed)
    trials: list[Trial] = []
    for number in range(times):
        mark = MARKS[(number + 1) % len(MARKS)]
        after = chance.uniform(0, WITHIN_SECONDS[mark])
        trial = kill_once(phase, num_ranks, chance.randrange(num_ranks), mark, after, folder)
        trials.append(trial)
        say("\n".join([str(trial), *(f"    WRONG: {fault}" for fault in trial.faults())]))
    return trials


def _start(phase: str, num_ranks: int, folder: Path) -> tuple[list[Any], list[Connection]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    processes: list[Any] = []
    pipes: list[Connection] = []
    for rank in range(num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run_rank, args=(phase, rank, num_ranks, port, str(folder), sender), daemon=True)
        process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    return processes, pipes


def _hear(ranks: Sequence[Survivor], pipes: list[Connection], seconds: float) -> None:
    """Note what ranks say for at most some seconds."""
    still: list[Any] = [pipe for pipe in pipes if not pipe.closed]
    for pipe in wait(still, timeout=max(0.0, seconds)):
        rank = ranks[pipes.index(pipe)]  # pyright: ignore[reportArgumentType]
        try:
            kind, text = pipe.recv()  # pyright: ignore
        except EOFError:
            pipe.close()  # pyright: ignore
            continue
        if kind == "error":
            rank.error = text
        else:
            rank.steps.append(text)


def _run_rank(phase: str, rank: int, num_ranks: int, port: int, folder: str, sender: Connection) -> None:
    """Run a phase as one rank; an error goes the way of one that nobody catches."""
    import torch
    import torch.distributed as dist

    from benchmarks.kill_phases import PHASES

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=timedelta(minutes=30))
    sender.send(("step", "joined"))
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        PHASES[phase](rank, lambda text: sender.send(("step", text)), Path(folder))
    except BaseException as error:
        # What a user reads is all that the hook prints: an error of torch's own code says nothing of ranks, the line after it does.
        with redirect_stderr(StringIO()) as printed:
            sys.excepthook(type(error), error, error.__traceback__)
        sender.send(("error", printed.getvalue()))
        os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase", default="step", help="a name in benchmarks/kill_phases.py")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trials = kill_at_random_points(arguments.phase, arguments.times, arguments.ranks, arguments.seed, Path(folder))
    wrong = [trial for trial in trials if trial.faults()]
    slowest = max((survivor.seconds or LIMIT_SECONDS for trial in trials for survivor in trial.survivors), default=0.0)
    print(f"{len(trials) - len(wrong)} of {len(trials)} right; the slowest survivor ended {slowest:.1f} s after the kill")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
