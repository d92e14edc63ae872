"""What a rank holds: 1/P of every matrix, of its gradient, and of every activation with a hidden, head or vocabulary dim.

Bytes of live storages, not of the process. A GPT of realistic proportions: hidden 256, sequence 64.
"""

from __future__ import annotations

import math
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from examples.models.gpt import GPT, GPTConfig
from partir.layout import Layout
from partir.mesh import Mesh
from partir.passes.pipeline import Compiled
from partir.runtime.simulated import RunBlocks, SimulatedProgram
from tests.compiled import compile_model, whole_tensors

BATCH, SEQUENCE, HIDDEN, HEADS, VOCABULARY = 8, 64, 256, 16, 1024
WIDE = {HIDDEN, 3 * HIDDEN, 4 * HIDDEN, VOCABULARY, HEADS, HIDDEN // HEADS}
CASES = [(2, 2, 2), (4, 2, 1)]


@lru_cache
def model_and_ids() -> tuple[GPT, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    return GPT(GPTConfig(VOCABULARY, SEQUENCE, num_layers=1, num_heads=HEADS, hidden=HIDDEN)), (ids, ids)


@lru_cache
def compiled(sizes: tuple[int, ...], memory: str) -> Compiled:
    model, args = model_and_ids()
    return compile_model(model, args, sizes, memory=memory)


@lru_cache
def held(sizes: tuple[int, ...], memory: str) -> RunBlocks:
    model, args = model_and_ids()
    program = compiled(sizes, memory)
    return SimulatedProgram(program.program).run_blocks(*whole_tensors(program, model, args))


def layouts_of_saved(sizes: tuple[int, ...], memory: str) -> dict[str, Layout | None]:
    """Return the layout of each saved value, None where torch's backward formulas made it."""
    nodes = {node.name: node for node in compiled(sizes, memory).program.forward.graph.nodes}
    return {name: nodes[name].meta.get("layout") for name in held(sizes, memory).saved}


@pytest.mark.parametrize("sizes", CASES)
def test_parameters_and_gradients(sizes: tuple[int, ...]) -> None:
    """Matrices exactly 1/P a rank, vectors at most 1/(x z); the gradients' storages as much."""
    mesh, (model, _) = Mesh.parse(sizes), model_and_ids()
    simulated = SimulatedProgram(compiled(sizes, "low").program)
    gradients = simulated.gradient_blocks(list(held(sizes, "low").saved.values()), [torch.ones(())])
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for rank in range(mesh.size):
            block, gradient = held(sizes, "low").inputs[name][rank], gradients[name][rank]
            assert gradient.untyped_storage().nbytes() == block.numel() * block.element_size(), name
            if parameter.dim() > 1:
                assert block.numel() * mesh.size == parameter.numel(), name
            else:
                assert block.numel() * mesh["x"] * mesh["z"] <= parameter.numel(), name


@pytest.mark.parametrize("sizes", CASES)
def test_low_memory_saves_one_in_P(sizes: tuple[int, ...]) -> None:
    """Every saved value with a hidden, head or vocabulary dim is exactly 1/P; the rest is under 5 %."""
    mesh, run = Mesh.parse(sizes), held(sizes, "low")
    layouts = layouts_of_saved(sizes, "low")
    for rank in (0, mesh.size - 1):
        bytes_of, rest = run.saved_bytes(rank), dict[str, int]()
        for name, size in bytes_of.items():
            block, layout = run.saved[name][rank], layouts[name]
            if layout is not None and WIDE.intersection(layout.shape):
                assert size * mesh.size == math.prod(layout.shape) * block.element_size(), f"{name}: {layout}"
            elif layout is None and block.dim() == 2:  # rows of all the tokens, as torch's formula of a linear keeps them
                wide = {BATCH * SEQUENCE * width * block.element_size() for width in (3 * HIDDEN, 4 * HIDDEN)}
                assert size * mesh.size in wide, name
            else:
                rest[name] = size
        rows = BATCH * SEQUENCE // mesh.size
        listed = {name: list(run.saved[name][rank].shape) for name in rest}
        assert all(run.saved[name][rank].numel() <= rows * HEADS for name in rest), listed
        assert sum(rest.values()) < 0.05 * sum(bytes_of.values()), listed
        assert len(bytes_of) - len(rest) > 10


def test_what_the_rest_is() -> None:
    """A number a row of each norm and of the loss, attention's log-sum-exp a head, and the count of labels: nothing of ids or masks."""
    run, layouts = held((2, 2, 2), "low"), layouts_of_saved((2, 2, 2), "low")
    rest = [name for name in run.saved_bytes(0) if not (layouts[name] and WIDE.intersection(layouts[name].shape))]  # pyright: ignore
    rows = BATCH * SEQUENCE // 4
    kinds = sorted(run.saved[name][0].numel() for name in rest)
    assert kinds == sorted([1, rows, rows, rows, rows, rows * HEADS // 2])


def test_fast_memory_keeps_what_was_gathered() -> None:
    """The same values, and every gathered operand of a product besides: A and B of qkv, proj, fc1, fc2 and the head."""
    low, fast = held((2, 2, 2), "low").saved_bytes(0), held((2, 2, 2), "fast").saved_bytes(0)
    layouts = layouts_of_saved((2, 2, 2), "fast")
    tokens = BATCH * SEQUENCE
    widths = [(HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN, VOCABULARY)]
    gathered = {name: size for name, size in fast.items() if name.startswith("all_gather") and len(layouts[name].dims) > 1}  # pyright: ignore
    assert sum(gathered.values()) == sum(tokens * k + k * n for k, n in widths) * 4 // 4
    assert sum(fast.values()) > 1.5 * sum(low.values())
    assert not any(name.startswith("all_gather") for name in low)


def test_a_negative_control() -> None:
    """A value that is kept whole along one axis is not 1/P: fast memory fails what low memory passes."""
    run, layouts = held((2, 2, 2), "fast"), layouts_of_saved((2, 2, 2), "fast")
    wide = {name: layout for name, layout in layouts.items() if layout is not None and WIDE.intersection(layout.shape)}
    wrong = [n for n, s in run.saved_bytes(0).items() if n in wide and s * 8 != math.prod(wide[n].shape) * 4]
    assert len(wrong) >= 10
