"""A small model with all that a checkpoint has to get right: fused and tied parameters, odd sizes, buffers, dropout."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import partir

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A fused attention block on a tied embedding; counts its calls in one buffer, and has another that is not saved."""

    def __init__(self, words: int = 37, hidden: int = 24, dropout: float = 0.2) -> None:
        super().__init__()
        self.words = nn.Embedding(words, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, words, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("unsaved", torch.ones(3), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2))) * cast(Tensor, self.scale)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def made(seed: int, **changed: Any) -> Block:
    torch.manual_seed(seed)
    return Block(**changed).double()


def set_buffers(model: Any) -> None:
    """Do for a model on meta what only `__init__` does."""
    model.scale.fill_(1)
    model.unsaved.fill_(1)


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    draw = [torch.randint(37, (2, 4, 8), generator=generator) for _ in range(count)]
    return [(pair[0], pair[1]) for pair in draw]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Sequence[Batch]) -> list[float]:
    losses: list[float] = []
    for ids, labels in data:
        optimizer.zero_grad()
        loss = model(ids, labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def parallel(mesh: Any, seed: int, **options: Any) -> tuple[Block, torch.optim.Optimizer]:
    """Return a model on a mesh and its optimizer, compiled for the batches; `seed` makes its values."""
    model = made(seed)
    model = partir.parallelize(model, mesh, batches(1)[0], **options)
    return model, adamw(model)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return every parameter, buffer and moment, whole, by name. Every rank must call it."""
    found = {name: partir.full_tensor(t).clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = partir.full_tensor(value, like=parameter).clone()
    return found


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def shared_folder(name: str) -> Path:
    """Return a folder that the ranks of a test and the test itself know."""
    assert name and "/" not in name and not name.startswith("."), name
    return shared_root() / name


def shared_root() -> Path:
    parent = multiprocessing.parent_process()
    return Path(tempfile.gettempdir()) / f"partir-tests-{os.getpid() if parent is None else parent.pid}"


def remove_shared_folders() -> None:
    root = shared_root()
    assert root.name.startswith("partir-tests-"), root
    shutil.rmtree(root, ignore_errors=True)
