"""Predicted and measured step time: 8 gloo ranks on this machine, every (x, y, z), two models, after `calibrate`.

    python benchmarks/predicted_time.py --out docs/time.md      # about 5 minutes on 2 cores

The ranks measure the machine first; nothing is fitted to the steps. All meshes and models live in the same ranks and take turns, so
that a noisy machine disturbs them alike. A step is forward and backward from barrier to barrier. Each repeat gives each mesh one
time; Spearman's rho is of the median over all repeats, and of each repeat alone for its spread.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it runs as a script

from benchmarks.peers import free_port, say  # noqa: E402
from examples.models.gpt import GPT, GPTConfig  # noqa: E402
from examples.models.llama import Llama, LlamaConfig  # noqa: E402
from partir import parallelize  # noqa: E402
from partir.hardware import hardware_text  # noqa: E402
from partir.mesh import Mesh  # noqa: E402
from partir.module import parallelized  # noqa: E402
from partir.options import Options  # noqa: E402
from partir.passes import pipeline  # noqa: E402
from partir.runtime.calibrate import calibrate_world  # noqa: E402
from partir.timing import step_seconds  # noqa: E402

Record = dict[str, Any]
Case = tuple[str, tuple[int, int, int]]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="steps of a mesh in one repeat; the least is kept")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each figure of the calibration")
    parser.add_argument("--timeout", type=float, default=480, help="seconds for the whole run")
    parser.add_argument("--json", type=Path, help="file for the raw numbers")
    parser.add_argument("--read", type=Path, nargs="+", help="report on files that --json has written, and run nothing")
    parser.add_argument("--out", type=Path, help="a Markdown file to write")
    return parser.parse_args(arguments)


def make_gpt(options: argparse.Namespace) -> nn.Module:
    sizes: dict[str, Any] = {"hidden": options.hidden, "num_layers": options.layers, "block_size": options.seq}
    return GPT(GPTConfig(num_heads=8, **sizes))


def make_llama(options: argparse.Namespace) -> nn.Module:
    sizes: dict[str, Any] = {"hidden": options.hidden, "num_layers": options.layers, "block_size": options.seq}
    return Llama(LlamaConfig(num_heads=8, num_kv_heads=8, mlp_hidden=3 * options.hidden, **sizes))


MODELS = {"gpt": make_gpt, "llama": make_llama}


def meshes(ranks: int) -> list[tuple[int, int, int]]:
    """Return every (x, y, z) of this many ranks."""
    return [(x, y, ranks // x // y) for x in range(1, ranks + 1) for y in range(1, ranks + 1) if ranks % (x * y) == 0]


def make_ids(options: argparse.Namespace) -> torch.Tensor:
    return torch.randint(256, (options.batch, options.seq), generator=torch.Generator().manual_seed(0))


def compile_ahead(options: argparse.Namespace) -> dict[Case, pipeline.Compiled]:
    """Compile every model for every mesh, in the process from which the ranks are forked: 8 ranks need not do it 8 times."""
    ids, compiled = make_ids(options), {}
    for name in options.models:
        model = MODELS[name](options)
        for mesh in meshes(options.ranks):
            compiled[name, mesh] = pipeline.compile_program(model, (ids,), {"labels": ids}, Mesh.parse(mesh), Options())
    return compiled


class Trial:
    """One model on one mesh, in this rank."""

    def __init__(self, case: Case, compiled: pipeline.Compiled, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.name, self.mesh = case
        pipeline.compile_program = lambda *args, **kwargs: compiled
        self.model = parallelize(MODELS[self.name](options), mesh=self.mesh)
        self.ids = make_ids(options)
        self.seconds: list[float] = []
        self.step()

    def step(self) -> float:
        """Run one step and return its seconds, of the slowest rank."""
        dist.barrier()
        start = time.perf_counter()
        self.model(self.ids, labels=self.ids).backward()
        dist.barrier()
        elapsed = time.perf_counter() - start
        self.model.zero_grad()
        return elapsed

    def record(self, hardware: Any) -> Record:
        (program,) = parallelized(self.model).programs()
        time_of = step_seconds(program, hardware)
        predicted = {"compute": time_of.compute, "exposed": time_of.exposed, "predicted": time_of.seconds}
        return {"model": self.name, "mesh": self.mesh, "seconds": self.seconds, **predicted}


def run_rank(rank: int, port: int, path: str, options: argparse.Namespace, ahead: dict[Case, pipeline.Compiled]) -> None:
    """Calibrate, then run every model on every mesh; rank 0 writes the records to `path`."""
    torch.set_num_threads(1)
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(options.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **local}
    patience = datetime.timedelta(seconds=options.timeout)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks, timeout=patience)
    start = time.perf_counter()
    hardware = calibrate_world("this machine", options.seconds)
    say(f"calibrated in {time.perf_counter() - start:.0f} s")
    trials: list[Trial] = []
    for case, compiled in ahead.items():
        trials.append(Trial(case, compiled, options))
        say(f"{case} is ready after {time.perf_counter() - start:.0f} s")
    for _ in range(options.repeats):
        for trial in trials:
            trial.seconds.append(min(trial.step() for _ in range(options.steps)))
        say(f"a repeat ended after {time.perf_counter() - start:.0f} s")
    if rank == 0:
        records = [trial.record(hardware) for trial in trials]
        sizes = {key: value for key, value in vars(options).items() if isinstance(value, (int, float))}
        Path(path).write_text(json.dumps({"profile": hardware_text(hardware), "records": records, "sizes": sizes}))
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(options: argparse.Namespace) -> Record:
    """Start the ranks and return what they found; if one fails or the time is up, end them all and say which."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.json"
        given = (free_port(), str(path), options, compile_ahead(options))
        context: Any = start_processes(run_rank, given, options.ranks, join=False, start_method="fork")
        deadline = time.monotonic() + options.timeout
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > deadline:
                    alive = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
                    raise SystemExit(f"ranks {alive} had not finished after {options.timeout} s")
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise SystemExit(f"rank {error.error_index} failed: {error}") from None
        finally:
            for process in context.processes:
                process.kill()
        return json.loads(path.read_text())


def ranking(values: Sequence[float]) -> list[float]:
    """Return the place of each value, equal values sharing theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the correlation of two rankings."""
    return statistics.correlation(ranking(one), ranking(other))


def report(runs: Sequence[Record]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield "# Predicted and measured step time"
    yield ""
    yield "Written by `python benchmarks/predicted_time.py --out docs/time.md`. In each run its own ranks measured the machine first, and"
    yield "nothing is fitted to the steps. memory=\"low\", one thread a rank."
    yield ""
    yield "Short messages all cost about the same, so that meshes differ by little more than the noise of a shared machine where a model"
    yield "moves little; the more it moves, the better the order is predicted."
    yield ""
    for run in runs:
        sizes = run["sizes"]
        yield f"{sizes['ranks']} gloo ranks on {os.cpu_count()} cores: layers {sizes['layers']}, hidden {sizes['hidden']},"
        yield f"batch {sizes['batch']}, sequence {sizes['seq']}, {sizes['repeats']} repeats; {sizes['seconds']} s a figure of the profile"
        yield f"(`--seq {sizes['seq']} --seconds {sizes['seconds']}`)."
        yield ""
        for name in dict.fromkeys(record["model"] for record in run["records"]):
            yield from model_lines(name, [record for record in run["records"] if record["model"] == name])
        yield from ("The profile:", "", "```toml", run["profile"].rstrip(), "```", "")


def model_lines(name: str, records: Sequence[Record]) -> Iterator[str]:
    medians = [statistics.median(record["seconds"]) for record in records]
    predicted = [record["predicted"] for record in records]
    each = [spearman(predicted, turn) for turn in zip(*(record["seconds"] for record in records))]
    best = records[medians.index(min(medians))]
    place = 1 + sorted(predicted).index(best["predicted"])
    yield f"## {name}"
    yield ""
    rho = spearman(predicted, medians)
    yield f"Spearman's rho {rho:.2f} over {len(records)} meshes; of single repeats {min(each):.2f} to {max(each):.2f}."
    among = "in" if place <= 3 else "not in"
    yield f"The measured best, {tuple(best['mesh'])}, is number {place} of the predicted, {among} the top 3."
    ratios = [measured / seconds for measured, seconds in zip(medians, predicted)]
    yield f"Measured over predicted: {min(ratios):.2f} to {max(ratios):.2f}."
    yield ""
    yield "| mesh | measured s | least | most | predicted s | compute | messages |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for median, record in sorted(zip(medians, records), key=lambda pair: pair[0]):
        spread = f"{min(record['seconds']):.3f} | {max(record['seconds']):.3f}"
        parts = f"{record['predicted']:.3f} | {record['compute']:.3f} | {record['exposed']:.3f}"
        yield f"| {tuple(record['mesh'])} | {median:.3f} | {spread} | {parts} |"
    yield ""


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)  # a process that is forked may hold no threads
    runs = [json.loads(path.read_text()) for path in options.read] if options.read else [run_ranks(options)]
    if options.json:
        options.json.write_text(json.dumps(runs[0], indent=1))
    text = "\n".join(report(runs))
    print(text, end="")
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
