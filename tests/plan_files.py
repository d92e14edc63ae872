"""Plan files of the tests: saved, edited, and checked against the model on one device."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.planned import MLP, mlp, mlp_plan

planned = functools.cache(mlp_plan)


def saved(tmp_path: Path, sizes: tuple[int, ...] = (2, 2, 2)) -> Path:
    path = tmp_path / "plan.json"
    planned(sizes).save(path)
    return path


def edit(path: Path, change: Callable[[Any], object]) -> Path:
    """Edit what a file holds; a tensor stays a line."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(_as_lines(content))
    return path


def _as_lines(content: Any) -> str:
    """Write JSON as partir does, so that a test may edit parsed values."""
    parts: list[str] = []
    for key, value in content.items():
        if key in ("tensors", "collectives", "notes"):
            text = "[\n" + ",\n".join("  " + json.dumps(row) for row in value) + "\n ]" if value else "[]"
        else:
            text = json.dumps(value)
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def tensor(content: Any, name: str) -> Any:
    return next(row for row in content["tensors"] if row["name"] == name)


def set_layout(name: str, layout: str) -> Callable[[Any], None]:
    return lambda content: tensor(content, name).update(layout=layout)


def set_option(name: str, value: Any) -> Callable[[Any], None]:
    return lambda content: content["options"].update({name: value})


def fresh() -> nn.Module:
    """A model of its own with the values of `mlp`."""
    model = MLP().double()
    model.load_state_dict(mlp().state_dict())
    return model


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_right(model: nn.Module, x: torch.Tensor) -> None:
    """Check loss and gradients of a parallelized `fresh()` against one device, in float64."""
    wanted, found = gradients(mlp(), mlp()(x).pow(2).sum()), gradients(model, model(x).pow(2).sum())
    assert wanted.keys() == found.keys()
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-12, atol=1e-14) for name in wanted)
