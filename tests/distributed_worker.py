"""Checks that run on every rank of a gloo world, started once for all of them; `run_world` starts them and collects what they say."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOADED = ["torch", "torch.distributed.tensor", "tests.module_checks", "tests.preloaded"]


@dataclass(frozen=True)
class RankReport:
    """What one rank says of its checks.

    Args:
        rank: which.
        errors: by check, the traceback, or "" where it passed; a check that it did not reach is missing.
        exit_code: of its process, None if it had to be ended.
    """

    rank: int
    errors: dict[str, str]
    exit_code: int | None


def run_world(
    num_ranks: int, checks: Sequence[tuple[str, str]], timeout: float, preload: Sequence[str] = PRELOADED
) -> list[RankReport]:
    """Run functions on every rank, in order, each taking the rank.

    Args:
        num_ranks: processes to start.
        checks: (module, name) of each function.
        timeout: seconds after which every process is ended.
        preload: modules that the processes start with; only the first world of this process has a say.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    port = _free_port()
    pipes: list[Connection] = []
    processes: list[Any] = []
    for rank in range(num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(rank, num_ranks, port, list(checks), sender), daemon=True)
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    errors = _collect(pipes, time.monotonic() + timeout)
    reports: list[RankReport] = []
    for rank, process in enumerate(processes):
        process.join(5 if rank == 0 else 1)
        code = process.exitcode
        if code is None:
            process.kill()
        reports.append(RankReport(rank, errors[rank], code))
    return reports


def _collect(pipes: list[Connection], deadline: float) -> list[dict[str, str]]:
    errors: list[dict[str, str]] = [{} for _ in pipes]
    open_pipes: list[Any] = list(pipes)
    while open_pipes and time.monotonic() < deadline:
        for pipe in wait(open_pipes, timeout=1):
            try:
                name, text = pipe.recv()  # pyright: ignore
                errors[pipes.index(pipe)][name] = text  # pyright: ignore
            except EOFError:
                open_pipes.remove(pipe)
    return errors


def _rank_main(rank: int, num_ranks: int, port: int, checks: list[tuple[str, str]], sender: Connection) -> None:
    import importlib

    import torch
    import torch.distributed as dist

    def attempt(name: str, call: Callable[[], Any]) -> Any:
        began = time.monotonic()
        try:
            result = call()
        except Exception:
            sender.send((name, f"rank {rank} after {time.monotonic() - began:.1f} s:\n{traceback.format_exc()}"))
            return None
        sender.send((name, ""))
        return result

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank))
    limit = timedelta(seconds=100)
    attempt("start", lambda: dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=limit))
    for module, name in checks:
        attempt(name, lambda module=module, name=name: getattr(importlib.import_module(module), name)(rank))
    # Nobody leaves before the others are done: rank 0 holds the store.
    sender.close()
    if rank == 0:
        time.sleep(1)
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
