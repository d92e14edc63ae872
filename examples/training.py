"""What `train_gpt.py` trains on and with: text, batches, a model with its optimizer, and the loop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

import partir


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def read_corpus() -> Tensor:
    """Return the source text of the standard library as bytes, int64 `[N]`."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = bytearray(b"\n".join(file.read_bytes() for file in files))
    return torch.frombuffer(text, dtype=torch.uint8).long()


def draw_batches(corpus: Tensor, first: int, steps: int, batch: int, seq: int) -> Iterator[Tensor]:
    """Yield the batches of ids `[batch, seq]` from step `first` to `steps`, the same on every rank and in every run."""
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        starts = torch.randint(len(corpus) - seq, (batch, 1), generator=generator)
        if step >= first:
            yield corpus[starts + torch.arange(seq)]


@dataclass
class Trainee:
    """A model with its optimizer and the losses so far.

    Args:
        name: to print.
        model: takes ids and labels, returns a loss, or an object that has one.
        lr: learning rate of AdamW.
        clip: the largest norm of all gradients; 0 leaves them.
        accumulate: micro-batches of a step.
        eager: draw the random numbers that the parallelized model draws.
    """

    name: str
    model: nn.Module
    lr: float
    clip: float = 0.0
    accumulate: int = 1
    eager: bool = False
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr)
        self.calls = 0

    def step(self, ids: Tensor) -> None:
        loss = sum(self.backward(part) for part in ids.chunk(self.accumulate))
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss))

    def backward(self, ids: Tensor) -> float:
        """Add the gradients of one micro-batch; return its share of the loss."""
        with partir.same_randomness(torch.initial_seed(), self.calls) if self.eager else nullcontext():
            result = self.model(ids, labels=ids)
        self.calls += 1
        loss = getattr(result, "loss", result) / self.accumulate
        loss.backward()
        return loss.item()


def train(trainees: list[Trainee], batches: Iterator[Tensor], first: int, steps: int, device: torch.device) -> Iterator[int]:
    """Give every trainee the same batches, with a progress bar and ten lines of losses; yield the number of each step made."""
    bar = tqdm(batches, initial=first, total=steps, unit="step", disable=not is_first_rank())
    for step, ids in enumerate(bar, start=first + 1):
        for trainee in trainees:
            trainee.step(ids.to(device))
        losses = {trainee.name: f"{trainee.losses[-1]:.6f}" for trainee in trainees}
        bar.set_postfix(losses, refresh=False)
        if is_first_rank() and (step == first + 1 or step % max(1, steps // 10) == 0):
            bar.write(f"step {step:4d}   " + "   ".join(f"{name} {loss}" for name, loss in losses.items()))
        yield step


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
    if not steps:
        print("no step was left to make: give more --steps than the checkpoint has")
        return
    print(f"{steps} steps in {seconds:.1f} s")
    for trainee in trainees:
        print(f"{trainee.name}: loss {trainee.losses[0]:.4f} -> {trainee.losses[-1]:.4f}")
    if len(trainees) == 2:
        differences = [abs(a - b) for a, b in zip(trainees[0].losses, trainees[1].losses, strict=True)]
        print(f"largest difference of the two losses in {steps} steps: {max(differences):.2e}")
