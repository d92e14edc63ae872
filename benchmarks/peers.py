"""Compare partir with DDP, FSDP2 and DTensor tensor parallelism: one GPT, 8 gloo ranks on this machine, one run.

    python benchmarks/peers.py                                  # about 10 minutes on 2 cores
    python benchmarks/peers.py --partir-mesh 4,2,1 2,2,2 --rounds 5 --json peers.json

All systems live in the same ranks, start from the same parameters and take turns, so that a noisy machine
disturbs them alike.

    step      median wall time of a step, from barrier to barrier
    CPU       time.process_time of a rank in a step, mean over ranks, all its threads (gloo's too)
    received  bytes that a rank's collectives receive in a step, the largest rank: each c10d operation is counted
              where it is dispatched, at the cost of a ring (benchmarks/measure.py)
    peak      most bytes of torch's CPU allocator alive in a step, the largest rank: parameters, gradients, AdamW
              state, buckets, saved and temporary values; not RSS
    loss      after the last step; equal for all systems but for rounding
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it runs as a script

from benchmarks.measure import CountBytes, peak_bytes  # noqa: E402
from benchmarks.systems import PEERS, System, build_partir, build_single  # noqa: E402
from examples.models.gpt import GPTConfig  # noqa: E402

Build = Callable[[], System]
Row = dict[str, Any]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--partir-mesh", nargs="*", default=["4,2,1", "2,4,1", "8,1,1"], help="meshes to try")
    parser.add_argument("--memory", nargs="*", choices=["low", "fast"], default=["low"])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="turns that each system gets")
    parser.add_argument("--steps", type=int, default=3, help="steps a turn")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--timeout", type=int, default=1800, help="seconds for the whole run")
    parser.add_argument("--json", type=Path, help="file for the raw numbers")
    return parser.parse_args()


def model_config(arguments: argparse.Namespace) -> GPTConfig:
    return GPTConfig(
        vocab_size=arguments.vocabulary,
        block_size=arguments.seq,
        num_layers=arguments.layers,
        num_heads=arguments.heads,
        hidden=arguments.hidden,
    )


def builds(arguments: argparse.Namespace) -> list[Build]:
    """Return a way to build each system."""
    config = model_config(arguments)
    peers: list[Build] = [partial(PEERS[name], config) for name in arguments.peers]
    meshes = [tuple(int(size) for size in text.split(",")) for text in arguments.partir_mesh]
    return peers + [partial(build_partir, config, mesh, memory) for mesh in meshes for memory in arguments.memory]


def batch_of(arguments: argparse.Namespace, step: int) -> Tensor:
    """Return the ids `[B, S]` of a step: one of four batches that every rank and every system sees."""
    generator = torch.Generator().manual_seed(step % 4)
    return torch.randint(arguments.vocabulary, (arguments.batch, arguments.seq), generator=generator)


class Measured:
    """A system with what its steps cost on this rank."""

    system: System

    def __init__(self, build: Build, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.num_steps = 0
        self.walls: list[float] = []
        self.cpus: list[float] = []

        def prepare() -> Callable[[], object]:
            self.system = build()
            self.step()
            self.step()
            return self.step

        self.peak = peak_bytes(prepare)
        with CountBytes() as count, self.system.record() as log:
            self.step()
        if log is not None and abs(log.bytes() - count.received) > 1024:  # less is the check that ranks agree on inputs
            say(f"{self.system.name} records {log.bytes()} bytes, its c10d operations receive {count.received}")
        self.received, self.num_collectives = count.received, count.num_collectives

    def step(self) -> None:
        self.loss = self.system.step(batch_of(self.arguments, self.num_steps))
        self.num_steps += 1

    def time_step(self) -> None:
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        self.step()
        self.cpus.append(time.process_time() - cpu)
        dist.barrier()
        self.walls.append(time.perf_counter() - wall)

    def row(self) -> Row:
        """Return this system's numbers, over all ranks."""
        mine = (statistics.median(self.cpus), self.received, self.peak, float(self.loss))
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        cpus, received, peaks, losses = zip(*ranks, strict=True)
        return {
            "name": self.system.name,
            "step": statistics.median(self.walls),
            "steps": self.walls,
            "cpu": statistics.mean(cpus),
            "received": max(received),
            "collectives": self.num_collectives,
            "peak": max(peaks),
            "loss": statistics.mean(losses),
        }


def say(text: str) -> None:
    """Print a line of progress, once for all ranks."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def run_rank(rank: int, port: int, path: str, arguments: argparse.Namespace) -> None:
    """Run every system on this rank; rank 0 writes the rows to `path`."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    patience = datetime.timedelta(seconds=min(600, arguments.timeout))
    dist.init_process_group("gloo", rank=rank, world_size=arguments.ranks, timeout=patience)
    measured: list[Measured] = []
    for build in builds(arguments):
        start = time.perf_counter()
        measured.append(Measured(build, arguments))
        say(f"{measured[-1].system.name}: built and counted in {time.perf_counter() - start:.1f} s")
    for turn in range(arguments.rounds):
        for each in measured:
            for _ in range(arguments.steps):
                each.time_step()
        say(f"round {turn + 1} of {arguments.rounds}")
    rows = [each.row() for each in measured]
    if rank == 0:
        Path(path).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def time_one_process(arguments: argparse.Namespace, threads: int = 2) -> Row:
    """Time the unparallelised model in this process, before the ranks start."""
    torch.set_num_threads(threads)
    system = build_single(model_config(arguments))
    walls: list[float] = []
    cpus: list[float] = []
    for step in range(4):
        wall, cpu = time.perf_counter(), time.process_time()
        system.step(batch_of(arguments, step))
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    name = f"one process, {threads} threads"
    return {"name": name, "step": statistics.median(walls[1:]), "cpu": statistics.median(cpus[1:])}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_ranks(arguments: argparse.Namespace) -> list[Row]:
    """Start the ranks and return their rows; if one fails or the time is up, end them all and say which."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        given = (free_port(), str(path), arguments)
        context: Any = spawn(run_rank, given, arguments.ranks, join=False)
        deadline = time.monotonic() + arguments.timeout
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > deadline:
                    alive = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
                    raise SystemExit(f"ranks {alive} had not finished after {arguments.timeout} s")
        except ProcessRaisedException as error:
            raise SystemExit(f"rank {error.error_index} failed:\n{error.msg}") from None
        except ProcessExitedException as error:
            raise SystemExit(f"rank {error.error_index} died: {error}") from None
        finally:
            for process in context.processes:
                process.kill()
        return json.loads(path.read_text())


def print_table(single: Row, rows: list[Row], arguments: argparse.Namespace) -> None:
    """Print one row a system; ratios are to FSDP2, or to the first system where FSDP2 was left out."""
    base = next((row for row in rows if row["name"] == "FSDP2"), rows[0])

    def cell(row: Row, key: str, form: str, unit: float = 1) -> str:
        return format(row[key] if unit == 1 else row[key] / unit, form) if key in row else ""

    def ratio(row: Row, key: str) -> str:
        return f"{row[key] / base[key]:.2f}" if key in row else ""

    sizes = f"GPT, {arguments.layers} layers of {arguments.hidden}, batch {arguments.batch} x {arguments.seq}"
    ranks = f"{arguments.ranks} gloo ranks on {os.cpu_count()} cores"
    table = Table(title=f"{sizes}, vocabulary {arguments.vocabulary}; {ranks}; ratios to {base['name']}")
    table.add_column("system")
    for title in ("step s", "ratio", "CPU s", "received MiB", "ratio", "collectives", "peak MiB", "ratio", "loss"):
        table.add_column(title, justify="right")
    for row in [single, *rows]:
        table.add_row(
            row["name"],
            cell(row, "step", ".2f"),
            ratio(row, "step"),
            cell(row, "cpu", ".2f"),
            cell(row, "received", ".1f", 2**20),
            ratio(row, "received"),
            cell(row, "collectives", "d"),
            cell(row, "peak", ".0f", 2**20),
            ratio(row, "peak"),
            cell(row, "loss", ".5f"),
        )
    Console(width=120).print(table)
    ours = [row for row in rows if row["name"].startswith("partir")]
    if ours:
        best = min(ours, key=lambda row: row["step"])
        print(f"best of partir: {best['name']}, {base['step'] / best['step']:.2f} times as fast as {base['name']}")


def main() -> None:
    arguments = parse_arguments()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the ranks inherit it: no line for every profile
    single = time_one_process(arguments)
    rows = run_ranks(arguments)
    print_table(single, rows, arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps([single, *rows], indent=1))


if __name__ == "__main__":
    main()
