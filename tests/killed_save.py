"""A world in which one rank is killed at a random point while checkpoints are saved one after the other."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import partir
from partir.errors import PartirError
from tests.distributed_worker import run_world
from tests.state_model import adamw, batches, made, parallel, same_bits, shared_folder, train, whole_state

SECONDS = 60
FOLDER = "killed"


def check_killed_while_saving(rank: int) -> None:
    _save_until_killed(rank, asynchronous=False)


def check_killed_while_saving_asynchronously(rank: int) -> None:
    _save_until_killed(rank, asynchronous=True)


def _save_until_killed(rank: int, asynchronous: bool) -> None:
    """Save a first checkpoint, then more until a rank is gone; whoever is left must be told within a minute."""
    folder = shared_folder(FOLDER)
    model, optimizer = parallel((1, dist.get_world_size(), 1), 0)
    train(model, optimizer, batches(1))
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    partir.save_checkpoint(model, optimizer, folder / "step_1", step=1)
    victim, delay = _chosen()
    began = time.monotonic()
    if rank == victim:
        threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    step = 2
    try:
        while time.monotonic() - began < SECONDS:
            partir.save_checkpoint(model, optimizer, folder / f"step_{step}", step=step, asynchronous=asynchronous).wait()
            step += 1
    except PartirError:
        assert time.monotonic() - began < SECONDS
        return
    raise AssertionError(f"rank {rank} saved to the end, though rank {victim} was to be killed")


def _chosen() -> tuple[int, float]:
    """Draw on rank 0 who is killed and when, the same for all."""
    drawn = torch.tensor([random.randrange(dist.get_world_size()), random.randrange(1000)])
    dist.broadcast(drawn, 0)
    return int(drawn[0]), float(drawn[1]) / 1000


def kill_and_check(num_ranks: int, asynchronous: bool) -> str:
    """Run one trial and check what is left; return a line that says what happened.

    Raises:
        AssertionError: a survivor was not told in time, or a checkpoint was lost.
    """
    name = "check_killed_while_saving_asynchronously" if asynchronous else "check_killed_while_saving"
    reports = run_world(num_ranks, [("tests.killed_save", name)], timeout=3 * SECONDS)
    killed = [report.rank for report in reports if report.exit_code == -signal.SIGKILL and name not in report.errors]
    survivors = [report for report in reports if report.rank not in killed]
    assert len(killed) == 1, [(report.exit_code, report.errors) for report in reports]
    assert all(report.errors.get(name) == "" for report in survivors), [report.errors for report in survivors]
    folder = shared_folder(FOLDER)
    names = sorted((path.name for path in folder.iterdir()), key=lambda text: int(text.split("_")[1].split(".")[0]))
    loaded = check_all_complete(folder)
    return f"killed rank {killed[0]} of {num_ranks}{' (asynchronous)' if asynchronous else ''}: {loaded} complete, {names[-1]} last"


def check_all_complete(folder: Path) -> int:
    """Load every checkpoint that has its name, in one process: all hold the first one's values. Return how many."""
    found = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    assert partir.latest_checkpoint(folder) in found
    model = made(9)
    optimizer = adamw(model)
    partir.load_checkpoint(model, optimizer, folder / "step_1")
    expected = whole_state(model, optimizer)
    for path in found:
        partir.load_checkpoint(model, optimizer, path)
        assert same_bits(whole_state(model, optimizer), expected), path
    return len(found)
