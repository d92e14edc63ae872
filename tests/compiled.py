"""Compile small models for tests of the compiler, and find the tensors that their programs take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from examples.models.gpt import GPT, GPTConfig
from partir.graph import collective_name, is_collective
from partir.layout import Layout
from partir.mesh import Mesh
from partir.options import Options
from partir.passes.pipeline import Compiled, compile_program
from partir.passes.trace import flatten_inputs
from partir.runtime.simulated import SimulatedProgram


def compile_model(
    model: nn.Module, args: Sequence[Any], sizes: Sequence[int], inputs: Mapping[str, str] | None = None, **options: Any
) -> Compiled:
    """Compile ``model(*args)`` on a mesh; ``inputs``: layouts in text of inputs that arrive as blocks."""
    layouts = {name: Layout.parse(text) for name, text in (inputs or {}).items()}
    return compile_program(model, tuple(args), {}, Mesh.parse(tuple(sizes)), Options(**options), None, layouts)


def whole_tensors(compiled: Compiled, model: nn.Module, args: Sequence[Any]) -> list[Tensor]:
    """Return the whole tensor of each input slot of a compiled program."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    given = iter(flatten_inputs(tuple(args), {})[0])
    values: list[Any] = []
    for slot in compiled.traced.slots:
        values.append(slot.value if slot.kind == "constant" else state[slot.name] if slot.name in state else next(given))
    seeds = len(compiled.program.inputs) - len(values)
    return values + [torch.tensor([1, 0])] * seeds


def run(compiled: Compiled, model: nn.Module, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Run a compiled program on every rank; differentiable."""
    return SimulatedProgram(compiled.program, check_ranks=True)(*whole_tensors(compiled, model, args))


def moves(graph: torch.fx.GraphModule) -> list[tuple[str, str]]:
    """Return ``(op, axis)`` for each collective of a graph, in order."""
    return [(collective_name(n), str(n.args[1] if len(n.args) > 1 else n.kwargs["axis"])) for n in graph.graph.nodes if is_collective(n)]


GPT_HIDDEN, GPT_BATCH, GPT_SEQUENCE = 48, 48, 4


@lru_cache
def gpt(layers: int) -> tuple[GPT, tuple[Tensor, Tensor]]:
    """Return a GPT in float64 whose sizes divide on every mesh of the tests, and its arguments; made once."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=48, block_size=48, num_layers=layers, num_heads=12, hidden=GPT_HIDDEN)
    ids = torch.randint(0, 48, (GPT_BATCH, GPT_SEQUENCE))
    return GPT(config).double(), (ids, ids)


@lru_cache
def compiled_gpt(sizes: tuple[int, ...], memory: str, layers: int) -> Compiled:
    """Return the training step of ``gpt(layers)``, compiled once for all test files."""
    model, args = gpt(layers)
    return compile_model(model, args, sizes, memory=memory)
