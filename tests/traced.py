"""Run a traced graph on the real values of its module, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from partir.passes.trace import Traced, flatten_inputs


class Calls(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def flat_outputs(traced: Traced, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the graph; return all its outputs, new values of buffers last."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    inputs = iter(flatten_inputs(args, kwargs)[0])
    values: list[Any] = []
    for slot in traced.slots:
        values.append(next(inputs) if slot.kind == "input" else tensors.get(slot.target, slot.value))
    return traced.graph_module(*values)


def run(traced: Traced, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """Run the graph and rebuild what the module returns."""
    return traced.outputs.rebuild(flat_outputs(traced, model, args, kwargs or {})[: traced.num_outputs])


def ops(traced: Traced) -> list[str]:
    """Return the names of the ops of a traced graph, such as ``linear``."""
    calls = [node.target for node in traced.graph_module.graph.nodes if node.op == "call_function"]
    return [str(target).removeprefix("aten.").split(".")[0] for target in calls]


def worst(mine: Any, theirs: Any) -> float:
    """Return the largest relative difference between two lists of gradients."""
    scale = max(other.abs().max().item() for other in theirs)
    pairs = zip(mine, theirs, strict=True)
    return max(((a - b).abs().max() / max(b.abs().max().item(), 1e-6 * scale)).item() for a, b in pairs)
