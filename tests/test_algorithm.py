"""The 3-D algorithm on chains of bias-free linears: bytes and blocks are those of the paper, on any mesh.

Everything expected here is written out by hand from the law (arXiv 2105.14450), without partir's own layouts:
C[m, n] = A[m, k] B[k, n] gathers A along y and B along x, and reduce-scatters C along z; the next product has y and z exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn

from partir.layout import Layout
from partir.mesh import Mesh
from partir.passes.pipeline import Compiled
from partir.runtime.record import CommunicationLog, record_communication
from partir.runtime.simulated import SimulatedProgram
from tests.compiled import compile_model, moves, run, whole_tensors

ROWS = 48
WIDTHS = (24, 48, 96, 24)
MESHES = [(2, 2, 2), (4, 2, 1), (2, 3, 4), (1, 4, 1), (8, 1, 1), (1, 1, 8), (1, 1, 1)]
SHORT = [((2, 2, 2), 1), ((2, 3, 4), 1), ((2, 2, 2), 2), ((2, 3, 4), 2)]
CHAINS = [(sizes, 3) for sizes in MESHES] + SHORT
Place = dict[str, int]


@lru_cache
def chain(length: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(k, n, bias=False) for k, n in zip(WIDTHS, WIDTHS[1:])][:length]).double()
    return model, torch.randn(ROWS, WIDTHS[0], dtype=torch.float64, requires_grad=True)


@lru_cache
def compiled_chain(sizes: tuple[int, ...], length: int, memory: str) -> Compiled:
    model, x = chain(length)
    at_rest = {"input": f"f64[{ROWS}@x.y, {WIDTHS[0]}@z]"}
    return compile_model(model, (x,), sizes, at_rest, outputs="sharded", memory=memory)


def products(length: int) -> list[tuple[int, int, bool]]:
    """Return k, n and whether y and z are exchanged, for each product of a chain."""
    return [(k, n, index % 2 == 1) for index, (k, n) in enumerate(zip(WIDTHS, WIDTHS[1:]))][:length]


def expected_bytes(mesh: Mesh, length: int, memory: str) -> dict[tuple[str, str], int]:
    """Return what one rank receives, by stage and axis: ((y-1) m k + (x-1) k n + (z-1) m n) / P elements a product.

    Forward: A along y, B along x, C along z. Backward: dC along z, dA along y, dB along x; and A and B once more where only
    their shards were kept.
    """
    totals = {(stage, axis): 0 for stage in ("forward", "backward") for axis in "xyz"}
    for k, n, swapped in products(length):
        y, z = ("z", "y") if swapped else ("y", "z")
        a, b, c = (mesh[y] - 1) * ROWS * k, (mesh["x"] - 1) * k * n, (mesh[z] - 1) * ROWS * n
        for stage, again in (("forward", 1), ("backward", 2 if memory == "low" else 1)):
            for axis, elements in ((y, a * again), ("x", b * again), (z, c)):
                totals[stage, axis] += elements * 8 // mesh.size
    return totals


def run_and_count(compiled: Compiled, length: int) -> CommunicationLog:
    model, x = chain(length)
    with record_communication() as log:
        run(compiled, model, (x,))[0].square().sum().backward()
    return log


@pytest.mark.parametrize("memory", ["low", "fast"])
@pytest.mark.parametrize("sizes, length", CHAINS)
def test_bytes_received_equal_the_formula(sizes: tuple[int, ...], length: int, memory: str) -> None:
    mesh = Mesh.parse(sizes)
    log = run_and_count(compiled_chain(sizes, length, memory), length)
    expected = expected_bytes(mesh, length, memory)
    for rank in range(mesh.size):
        counted = {key: log.bytes(rank=rank, stage=key[0], axis=key[1]) for key in expected}
        assert counted == expected
        assert log.bytes(rank=rank) == sum(expected.values())


def test_the_formula_can_fail() -> None:
    """Negative control: an output gathered whole, and an input that starts whole, move other bytes."""
    mesh, (model, x) = Mesh.parse((2, 2, 2)), chain(1)
    expected = sum(expected_bytes(mesh, 1, "low").values())
    for inputs, outputs in (({"input": "f64[48@x.y, 24@z]"}, "whole"), ({}, "sharded")):
        compiled = compile_model(model, (x,), (2, 2, 2), inputs, outputs=outputs)
        assert run_and_count(compiled, 1).bytes(rank=0) != expected


def cut(whole: Tensor, place: Place, mesh: Mesh, *dims: str) -> Tensor:
    """Return a rank's block: dim d split over the axes of dims[d], the first letter the major one."""
    for dim, axes in enumerate(dims):
        part, parts = 0, 1
        for axis in axes:
            part, parts = part * mesh[axis] + place[axis], parts * mesh[axis]
        size = whole.shape[dim] // parts
        whole = whole.narrow(dim, part * size, size)
    return whole


def assert_blocks(column: Sequence[Tensor], whole: Tensor, mesh: Mesh, *dims: str) -> None:
    for rank, block in enumerate(column):
        torch.testing.assert_close(block, cut(whole, mesh.coordinate(rank), mesh, *dims), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", MESHES)
def test_blocks_held_are_the_papers(sizes: tuple[int, ...]) -> None:
    """A_ijl, B_lji (stored transposed: jil) and C_ilj, 1/P on each rank; in a swapped product j and l change places."""
    mesh, (model, x) = Mesh.parse(sizes), chain(3)
    compiled = compiled_chain(sizes, 3, "low")
    held = SimulatedProgram(compiled.program).run_blocks(*whole_tensors(compiled, model, (x,)))
    weights = [parameter.detach() for parameter in model.parameters()]
    c0 = x.detach() @ weights[0].T
    c1 = c0 @ weights[1].T
    assert_blocks(held.inputs["input"], x.detach(), mesh, "xy", "z")
    assert_blocks(held.inputs["0.weight"], weights[0], mesh, "yx", "z")
    assert_blocks(held.inputs["1.weight"], weights[1], mesh, "zx", "y")
    assert_blocks(held.inputs["2.weight"], weights[2], mesh, "yx", "z")
    assert_blocks(held.outputs["output[0]"], c1 @ weights[2].T, mesh, "xz", "y")
    sizes_of = held.saved_bytes(0)
    first, second = (held.saved[name] for name in sorted(sizes_of, key=lambda name: sizes_of[name]))
    assert_blocks(first, c0, mesh, "xz", "y")
    assert_blocks(second, c1, mesh, "xy", "z")
    for rank in range(mesh.size):
        assert sum(held.saved_bytes(rank).values()) == (c0.nbytes + c1.nbytes) // mesh.size


@pytest.mark.parametrize("sizes", MESHES[:3])
def test_gradient_blocks_are_the_papers(sizes: tuple[int, ...]) -> None:
    mesh, (model, x) = Mesh.parse(sizes), chain(3)
    compiled = compiled_chain(sizes, 3, "low")
    simulated = SimulatedProgram(compiled.program)
    saved = simulated.run_blocks(*whole_tensors(compiled, model, (x,))).saved
    pull = torch.linspace(-1, 1, ROWS * WIDTHS[-1], dtype=torch.float64).view(ROWS, -1)
    blocks = simulated.gradient_blocks(list(saved.values()), [pull])
    expected = torch.autograd.grad(model(x), [x, *model.parameters()], pull)
    for name, whole, dims in zip(
        ("input", "0.weight", "1.weight", "2.weight"), expected, (("xy", "z"), ("yx", "z"), ("zx", "y"), ("yx", "z")), strict=True
    ):
        assert_blocks(blocks[name], whole, mesh, *dims)


def test_block_names_on_a_cube() -> None:
    """Read in torch's own dim order: a Linear's weight is stored [out, in], so the paper's B_lji reads jil."""
    program = compiled_chain((2, 2, 2), 1, "low").program
    layouts = {slot.name: slot.layout for slot in (*program.inputs, *program.outputs)}
    assert [(layouts[name].block, layouts[name].direction) for name in ("input", "0.weight", "output[0]")] == [
        ("ijl", "y"),
        ("jil", "x"),
        ("ilj", "z"),
    ]


@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 3, 4), (4, 2, 1)])
def test_forward_is_algorithm_1_and_the_derived_backward_algorithm_2(sizes: tuple[int, ...]) -> None:
    """dA = dC B^T gathers dC along z and B along x, scatters along y; dB = A^T dC gathers A along y, shares dC, scatters along x."""
    mesh = Mesh.parse(sizes)
    program = compiled_chain(sizes, 1, "low").program
    assert program.backward is not None
    real = mesh.split_axes()
    forward = [("all_gather", "y"), ("all_gather", "x"), ("reduce_scatter", "z")]
    backward = [("all_gather", "z"), ("all_gather", "y"), ("reduce_scatter", "x"), ("all_gather", "x"), ("reduce_scatter", "y")]
    assert moves(program.forward) == [move for move in forward if move[1] in real]
    assert sorted(moves(program.backward)) == sorted(move for move in backward if move[1] in real)


def test_fast_memory_keeps_what_was_gathered() -> None:
    """The backward of Algorithm 2 with gathered A and B kept: only dC is gathered."""
    program = compiled_chain((2, 2, 2), 1, "fast").program
    assert program.backward is not None
    assert sorted(moves(program.backward)) == [("all_gather", "z"), ("reduce_scatter", "x"), ("reduce_scatter", "y")]


def test_rows_of_two_dims_move_the_same_bytes() -> None:
    """[batch, sequence, hidden]: rows are batch and sequence; only batch is split."""
    mesh, (model, _) = Mesh.parse((2, 2, 2)), chain(3)
    x = torch.randn(12, 4, 24, dtype=torch.float64, requires_grad=True)
    compiled = compile_model(model, (x,), (2, 2, 2), {"input": "f64[12@x.y, 4, 24@z]"}, outputs="sharded")
    with record_communication() as log:
        run(compiled, model, (x,))[0].sum().backward()
    assert compiled.program.outputs[0].layout == Layout.parse("f64[12@x.z, 4, 24@y]")
    expected = expected_bytes(mesh, 3, "low")
    assert {key: log.bytes(rank=5, stage=key[0], axis=key[1]) for key in expected} == expected


def test_a_pinned_input_rests_where_the_law_wants_it() -> None:
    """A pin in place of blocks that arrive: the same program."""
    (model, x) = chain(1)
    pinned = compile_model(model, (x,), (2, 2, 2), pin={"input": "f[48@x.y, 24@z]"}, outputs="sharded")
    assert pinned.program.texts["lowered"] == compiled_chain((2, 2, 2), 1, "low").program.texts["lowered"]
