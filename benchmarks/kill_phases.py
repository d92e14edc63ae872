"""What ranks do while one of them is killed: `benchmarks.kill_ranks` runs a phase by its name.

A phase says "ready" once it has done its work a first time, and goes on until an error ends it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import partir
from examples.models.gpt import GPT, GPTConfig

Say = Callable[[str], None]


def mesh_of_world() -> tuple[int, ...]:
    """Return a mesh of all ranks, split over two axes where their number is even."""
    size = dist.get_world_size()
    return (2, size // 2, 1) if size % 2 == 0 else (size, 1, 1)


def train(rank: int, say: Say, folder: Path) -> None:
    """Compile, then take steps with clipping: everything that a step may be doing when a rank dies."""
    torch.manual_seed(0)
    model = partir.parallelize(GPT(GPTConfig(vocab_size=64, block_size=8, num_layers=1, num_heads=2, hidden=16)), mesh_of_world())
    say("parallelized")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(64, (8, 8), generator=torch.Generator().manual_seed(0))
    for step in itertools.count():
        loss = model(ids, labels=ids)
        say(f"forward {step + 1}")
        loss.backward()
        say(f"backward {step + 1}")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        say(f"step {step + 1}" if step else "ready")


def clip(rank: int, say: Say, folder: Path) -> None:
    """Clip the gradients of one step, again and again, with torch's own function: its collectives are DTensor's."""
    torch.manual_seed(0)
    model = partir.parallelize(torch.nn.Linear(16, 16), mesh_of_world())
    model(torch.randn(8, 16)).sum().backward()
    for step in itertools.count():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        say(f"clipped {step + 1}" if step else "ready")


PHASES: dict[str, Callable[[int, Say, Path], None]] = {"step": train, "clip": clip}
