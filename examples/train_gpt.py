"""Train a byte-level GPT on the source of Python's own standard library, over a mesh of ranks.

    python examples/train_gpt.py --mesh 2,2,2 --compare                              # all 8 ranks in this process
    torchrun --nproc-per-node 8 examples/train_gpt.py --mesh 2,2,2 --compare         # 8 processes

The only line that knows of the mesh is `partir.parallelize(model, mesh=...)`.
"""

from __future__ import annotations

import argparse
import copy
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from models.gpt import GPT, GPTConfig
from torch import Tensor, nn
from tqdm import tqdm

import partir


def parse_mesh(text: str) -> tuple[int, ...] | str:
    """Parse `2,2,2`; partir itself says what is wrong with the sizes."""
    try:
        return text if text == "auto" else tuple(int(size) for size in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes such as 2,2,2") from None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=parse_mesh, default=(2, 2, 2), help="sizes x,y,z or data,x,y,z, or auto (default: 2,2,2)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--memory", choices=["low", "fast"], default="low", help="keep shards, or what was gathered")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--compare", action="store_true", help="train the single-device twin beside it")
    parser.add_argument("--out", type=Path, help="folder for plan.txt, graph.dot, graph.svg and loss.png")
    return parser.parse_args()


def start_distributed() -> torch.device:
    """Join the process group that torchrun describes, if there is one; return this process's device."""
    local_rank = os.environ.get("LOCAL_RANK")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(local_rank or 0))
        torch.cuda.set_device(device)
    if local_rank is not None:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def read_corpus() -> Tensor:
    """Return the source text of the standard library as bytes, int64 `[N]`."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = bytearray(b"\n".join(file.read_bytes() for file in files))
    return torch.frombuffer(text, dtype=torch.uint8).long()


def draw_batches(corpus: Tensor, steps: int, batch: int, seq: int) -> Iterator[Tensor]:
    """Yield `steps` batches of ids `[batch, seq]`, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(corpus) - seq, (batch, 1), generator=generator)
        yield corpus[starts + torch.arange(seq)]


@dataclass
class Trainee:
    """A model with its optimizer and the losses so far; an eager one is to draw what the parallelized one draws."""

    name: str
    model: nn.Module
    lr: float
    eager: bool = False
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr)

    def step(self, ids: Tensor) -> None:
        with partir.same_randomness(torch.initial_seed(), len(self.losses)) if self.eager else nullcontext():
            loss = self.model(ids, labels=ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


def train(trainees: list[Trainee], batches: Iterator[Tensor], steps: int, device: torch.device) -> None:
    """Give every trainee the same batches, with a progress bar and ten lines of losses."""
    bar = tqdm(batches, total=steps, unit="step", disable=not is_first_rank())
    for step, ids in enumerate(bar, start=1):
        for trainee in trainees:
            trainee.step(ids.to(device))
        losses = {trainee.name: f"{trainee.losses[-1]:.6f}" for trainee in trainees}
        bar.set_postfix(losses, refresh=False)
        if is_first_rank() and (step == 1 or step % max(1, steps // 10) == 0):
            bar.write(f"step {step:4d}   " + "   ".join(f"{name} {loss}" for name, loss in losses.items()))


def write_plan(plan: partir.Plan, folder: Path) -> None:
    """Write the plan's text and the communication graph, as svg too where graphviz is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.txt").write_text(f"{plan}\n")
    graph = folder / "graph.dot"
    graph.write_text(f"{plan.dot()}\n")
    if shutil.which("dot"):
        subprocess.run(["dot", "-Tsvg", str(graph), "-o", str(graph.with_suffix(".svg"))], check=True)


def draw_losses(trainees: list[Trainee], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for trainee, style in zip(trainees, ("-", "--"), strict=False):
        axes.plot(range(1, len(trainee.losses) + 1), trainee.losses, style, label=trainee.name)
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title="GPT on the standard library's source")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def report(trainees: list[Trainee], seconds: float) -> None:
    steps = len(trainees[0].losses)
    print(f"{steps} steps in {seconds:.1f} s")
    for trainee in trainees:
        print(f"{trainee.name}: loss {trainee.losses[0]:.4f} -> {trainee.losses[-1]:.4f}")
    if len(trainees) == 2:
        differences = [abs(a - b) for a, b in zip(trainees[0].losses, trainees[1].losses, strict=True)]
        print(f"largest difference of the two losses in {steps} steps: {max(differences):.2e}")


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    mesh = arguments.mesh
    corpus = read_corpus()
    batches = draw_batches(corpus, arguments.steps, arguments.batch, arguments.seq)

    torch.manual_seed(0)
    config = GPTConfig(
        block_size=arguments.seq,
        num_layers=arguments.layers,
        num_heads=arguments.heads,
        hidden=arguments.hidden,
        dropout=arguments.dropout,
    )
    model = GPT(config).to(device, getattr(torch, arguments.dtype))
    twin = copy.deepcopy(model) if arguments.compare and is_first_rank() else None
    if is_first_rank():
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"{size:,} parameters, {len(corpus):,} bytes of source, mesh {mesh}, {device}")
    if arguments.out is not None and is_first_rank():
        ids = torch.zeros(arguments.batch, arguments.seq, dtype=torch.long, device=device)
        write_plan(partir.plan(model, mesh, (ids,), {"labels": ids.clone()}, memory=arguments.memory), arguments.out)

    model = partir.parallelize(model, mesh=mesh, memory=arguments.memory)
    trainees = [Trainee(f"mesh {mesh}", model, arguments.lr)]
    if twin is not None:
        trainees.append(Trainee("one device", twin, arguments.lr, eager=True))

    start = time.perf_counter()
    train(trainees, batches, arguments.steps, device)
    if not is_first_rank():
        return
    report(trainees, time.perf_counter() - start)
    if arguments.out is not None:
        draw_losses(trainees, arguments.out / "loss.png")
        print("written: " + ", ".join(str(path) for path in sorted(arguments.out.iterdir())))


def main() -> None:
    arguments = parse_arguments()
    device = start_distributed()
    try:
        run(arguments, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
