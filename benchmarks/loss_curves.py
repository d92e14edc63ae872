"""One model, one text, the same training on every mesh: is the loss the same at every step?

    python -m benchmarks.loss_curves          # writes docs/loss_curves.md and docs/loss_curves.svg

A GPT learns the source of Python's own standard library, byte by byte, with AdamW, warm-up, clipping and dropout: eagerly under
`partir.same_randomness`, on simulated meshes, and on 8 gloo ranks. A run that is in the folder --runs is not made again. The control is
eager with the last bit of one number of one parameter changed: what training itself makes of a bit. (At a rate of 3e-3 it makes 8e-5 of it
in 200 steps, and no two ways to add up the same numbers would agree to 1e-5; at 1e-3 it leaves it what it is.)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import partir
from examples.models.gpt import GPT, GPTConfig

ROOT = Path(__file__).resolve().parent.parent
SEED, RATE, WARM_UP, CLIP, BATCH, SEQUENCE = 0, 1e-3, 20, 1.0, 8, 32
CONFIG = GPTConfig(block_size=SEQUENCE, num_layers=2, num_heads=4, hidden=32, dropout=0.1)
STEPS = {"float32": 200, "float64": 20}
ALLOWED = {"float32": 1e-5, "float64": 1e-10}


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        name: as the table has it.
        mesh: None for eager.
        ranks: processes; 1 simulates the mesh.
        nudged: the control.
    """

    name: str
    mesh: tuple[int, ...] | None
    ranks: int = 1
    nudged: bool = False

    def file(self, dtype: str) -> str:
        """Name the file of its losses."""
        mesh = "eager" if self.mesh is None else "x".join(map(str, self.mesh))
        return f"{mesh}-{self.ranks}-{dtype}{'-nudged' if self.nudged else ''}.json"


RUNS = (
    Run("one device, eager", None),
    Run("(2, 2, 2) simulated", (2, 2, 2)),
    Run("(4, 1, 2) simulated", (4, 1, 2)),
    Run("data 2 x (2, 2, 1) simulated", (2, 2, 2, 1)),
    Run("(2, 2, 2) on 8 gloo ranks", (2, 2, 2), 8),
    Run("control: one bit changed, eager", None, nudged=True),
)


def batches(steps: int) -> list[Tensor]:
    """Return ids `[BATCH, SEQUENCE]` for each step, the same in every run."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    corpus = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(SEED)
    starts = torch.randint(len(corpus) - SEQUENCE, (steps, BATCH, 1), generator=generator)
    return list(corpus[starts + torch.arange(SEQUENCE)])


def nudge(model: GPT) -> None:
    """Change the last bit of one number."""
    number = next(model.parameters()).data.view(-1)[:1]
    number.copy_(torch.nextafter(number, number + 1))


def train(mesh: tuple[int, ...] | None, dtype: str, nudged: bool) -> list[float]:
    """Train and return the loss of every step."""
    torch.manual_seed(SEED)
    model = GPT(CONFIG).to(getattr(torch, dtype))
    if nudged:
        nudge(model)
    model = model if mesh is None else partir.parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    losses: list[float] = []
    for step, ids in enumerate(batches(STEPS[dtype])):
        with partir.same_randomness(SEED, calls=step) if mesh is None else nullcontext():
            loss = model(ids, labels=ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_of(run: Run, dtype: str, folder: Path) -> list[float]:
    """Return the losses of a run, made now if they are not in the folder."""
    file = folder / run.file(dtype)
    if not file.exists():
        began = time.perf_counter()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.ranks)]
        command = command if run.ranks > 1 else [sys.executable]
        mesh = [] if run.mesh is None else ["--mesh", ",".join(map(str, run.mesh))]
        words = [*command, "-m", "benchmarks.loss_curves", "--train", dtype, *mesh, *(["--nudge"] if run.nudged else []), "--to", str(file)]
        subprocess.run(words, check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        print(f"{run.name}, {dtype}: {time.perf_counter() - began:.0f} s", flush=True)
    return json.loads(file.read_text())


def differences(losses: list[float], expected: list[float]) -> list[float]:
    """Return the relative difference of each step."""
    return [abs(loss - other) / abs(other) for loss, other in zip(losses, expected, strict=True)]


def page(results: dict[str, dict[str, list[float]]]) -> str:
    """Return docs/loss_curves.md."""
    lines = [
        "# The same loss on every mesh",
        "",
        "Written by `python -m benchmarks.loss_curves` (about 11 minutes on two cores).",
        "",
        f"A GPT of {CONFIG.num_layers} layers, hidden {CONFIG.hidden}, {CONFIG.num_heads} heads, dropout {CONFIG.dropout}, learns the "
        "source of Python's standard library, byte by",
        f"byte: batch {BATCH}, sequence {SEQUENCE}, AdamW at {RATE:g} after {WARM_UP} steps of warm-up, gradients clipped to a norm of "
        f"{CLIP:g}. Eager torch runs under",
        "`partir.same_randomness`, so that it drops what the meshes drop. The difference is relative to the eager loss. The control is",
        "eager with the last bit of one number of one parameter changed: what training itself makes of a bit.",
        "",
        "![loss and difference by step](loss_curves.svg)",
        "",
        "| run | float32: loss of step 1, 50, 100, 200 | largest difference in 200 steps (allowed 1e-5) | float64: in 20 steps (1e-10) |",
        "|---|---|---|---|",
    ]
    for run in RUNS:
        single = results["float32"].get(run.name, [])
        shown = ", ".join(f"{single[step - 1]:.6f}" for step in (1, 50, 100, 200)) if single else "not run"
        lines.append(f"| {run.name} | {shown} | {_worst(results['float32'], run)} | {_worst(results['float64'], run)} |")
    return "\n".join([*lines, ""])


def _worst(results: dict[str, list[float]], run: Run) -> str:
    """Return the largest difference and its step, and until which step it is within what is allowed."""
    if run.name not in results:
        return "not run"
    different = differences(results[run.name], results[RUNS[0].name])
    dtype = "float32" if len(different) == STEPS["float32"] else "float64"
    over = next((step for step, one in enumerate(different, start=1) if one > ALLOWED[dtype]), None)
    text = f"{max(different):.1e} at step {different.index(max(different)) + 1}"
    return text if over is None else f"{text}; over it from step {over}"


def draw(results: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw the losses, and their differences from the eager ones."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "partir"
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    eager = RUNS[0].name
    for run in RUNS:
        losses = results["float32"].get(run.name, [])
        left.plot(range(1, len(losses) + 1), losses, label=run.name, linewidth=1)
    for dtype, style in (("float32", "-"), ("float64", "--")):
        for number, run in enumerate(RUNS[1:], start=1):
            if run.name not in results[dtype]:
                continue
            different = differences(results[dtype][run.name], results[dtype][eager])
            right.plot(range(1, len(different) + 1), [max(one, 1e-17) for one in different], style, color=f"C{number}", linewidth=1)
        right.axhline(ALLOWED[dtype], color="gray", linewidth=0.6, linestyle=style)
    left.set(xlabel="step", ylabel="loss (nats a byte)")
    left.legend(fontsize=8)
    right.set(xlabel="step", ylabel="relative difference from eager", yscale="log", title="float32 solid, float64 dashed, gray: allowed")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("loss_curves"), help="folder of the losses of each run")
    parser.add_argument("--made", action="store_true", help="write the page of what is in that folder; run nothing")
    parser.add_argument("--train", choices=list(STEPS), help="make one run in this dtype, and no page")
    parser.add_argument("--mesh", help="of that run; eager without")
    parser.add_argument("--nudge", action="store_true", help="change the last bit of one number of that run's parameters")
    parser.add_argument("--to", type=Path, help="file for its losses")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.train:
        _make_one(arguments.train, arguments.mesh, arguments.nudge, arguments.to)
        return
    arguments.runs.mkdir(parents=True, exist_ok=True)
    folder = arguments.runs.resolve()
    wanted = {dtype: [run for run in RUNS if not arguments.made or (folder / run.file(dtype)).exists()] for dtype in STEPS}
    results = {dtype: {run.name: losses_of(run, dtype, folder) for run in runs} for dtype, runs in wanted.items()}
    draw(results, ROOT / "docs" / "loss_curves.svg")
    (ROOT / "docs" / "loss_curves.md").write_text(page(results))
    print(page(results))


def _make_one(dtype: str, mesh: str | None, nudged: bool, file: Path) -> None:
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group("gloo")
    losses = train(None if mesh is None else tuple(map(int, mesh.split(","))), dtype, nudged)
    if not dist.is_initialized() or dist.get_rank() == 0:
        file.write_text(json.dumps(losses))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
