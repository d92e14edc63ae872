"""The simulated runtime: the same numbers as one device, the blocks and the bytes of three_d.md."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from partir.blocks import shard
from partir.collectives import current_backend
from partir.errors import PartirError, VerifyError
from partir.mesh import Mesh
from partir.passes.differentiate import differentiate
from partir.program import Program
from partir.runtime.record import record_communication
from partir.runtime.run_lockstep import LockstepGraph
from partir.runtime.simulated import SimulatedProgram
from tests.hand_lowered import HandLowered, aten, mlp

MESHES = [(2, 2, 2), (1, 4, 1), (2, 3, 2), (1, 1, 1), (4, 1, 2), (2, 2, 2, 2)]
MEMORY = ["low", "fast"]


def compile_by_hand(hand: HandLowered, results: Sequence[tuple[Node, str]], memory: Any = "low") -> SimulatedProgram:
    module, inputs, outputs = hand.finish(results)
    derived = differentiate(module, hand.mesh, inputs, outputs, memory)
    takes = zip(outputs, derived.differentiable, strict=True)
    outputs = tuple(replace(slot, differentiable=differentiable) for slot, differentiable in takes)
    program = Program(hand.mesh, memory, inputs, outputs, derived.forward, derived.backward, derived.num_outputs)
    return SimulatedProgram(program, check_ranks=True)


def random_inputs(simulated: SimulatedProgram) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors: list[Tensor] = []
    for slot in simulated.program.inputs:
        if slot.dtype.is_floating_point:
            tensors.append(
                torch.randn(slot.shape, dtype=slot.dtype, generator=generator).requires_grad_(slot.differentiable)
            )
        else:
            tensors.append(torch.randint(0, 24, slot.shape, generator=generator))
    return tensors


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    scale = 1e-6 * max(float(tensor.detach().abs().max()) for tensor in expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert float((one - other).detach().abs().max()) <= 1e-12 * max(float(other.detach().abs().max()), scale)


def compile_mlp(sizes: Sequence[int], memory: str) -> SimulatedProgram:
    hand = mlp(Mesh.parse(tuple(sizes)))
    whole = list(hand.graph.nodes)[-1]
    return compile_by_hand(hand, [(whole, "f64[]"), (hand.named["y"], "f64[48@x.y, 24@z]")], memory)


def eager_mlp(x: Tensor, first: Tensor, bias: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.nn.functional.gelu(x @ first.T + bias) @ second.T
    return (y * y).mean(), y


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("sizes", MESHES)
def test_mlp_equals_eager(sizes: tuple[int, ...], memory: str) -> None:
    simulated = compile_mlp(sizes, memory)
    inputs = random_inputs(simulated)
    expected = eager_mlp(*inputs)
    actual = simulated(*inputs)
    assert_same(actual, expected)
    gradients = torch.autograd.grad(actual[0] + actual[1].sin().sum(), inputs)
    assert_same(gradients, torch.autograd.grad(expected[0] + expected[1].sin().sum(), inputs))


def test_one_tangent_alone_and_twice() -> None:
    simulated = compile_mlp((2, 2, 2), "low")
    inputs = random_inputs(simulated)
    loss, _ = simulated(*inputs)
    expected = torch.autograd.grad(eager_mlp(*inputs)[0], inputs)
    assert_same(torch.autograd.grad(loss, inputs, retain_graph=True), expected)
    assert_same(torch.autograd.grad(loss, inputs), expected)


def test_without_gradients() -> None:
    simulated = compile_mlp((2, 2, 2), "low")
    inputs = random_inputs(simulated)
    with torch.no_grad():
        outputs = simulated(*inputs)
    assert not outputs[0].requires_grad
    assert_same(outputs, [output.detach() for output in eager_mlp(*inputs)])


def chain(mesh: Mesh, memory: str) -> SimulatedProgram:
    """Three bias-free linears, 48 rows, widths 24, 48, 96 and 24."""
    hand = HandLowered(mesh)
    c, widths, state = hand.input("x", "f64[48@x.y, 24@z]", "input"), (24, 48, 96, 24), "y"
    for index, (inner, columns) in enumerate(zip(widths, widths[1:], strict=False)):
        other = "z" if state == "y" else "y"
        weight = hand.input(f"fc{index}.weight", f"f64[{columns}@{state}.x, {inner}@{other}]")
        c, state = hand.linear(c, weight, state), other
    return compile_by_hand(hand, [(c, "f64[48@x.z, 24@y]")], memory)


def formula_bytes(mesh: Mesh, gathered_again: bool) -> tuple[int, int]:
    """three_d.md: a product receives ((y-1) m k + (x-1) k n + (z-1) m n) / P elements."""
    forward = backward = 0
    y, z, m = mesh["y"], mesh["z"], 48
    for k, n in ((24, 48), (48, 96), (96, 24)):
        a, b, c = (y - 1) * m * k, (mesh["x"] - 1) * k * n, (z - 1) * m * n
        forward += a + b + c
        backward += a + b + c + (a + b if gathered_again else 0)
        y, z = z, y
    return forward * 8 // mesh.size, backward * 8 // mesh.size


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 4, 1), (2, 3, 2), (4, 1, 2), (1, 1, 1)])
def test_bytes_received_equal_the_formula(sizes: tuple[int, ...], memory: str) -> None:
    mesh = Mesh.parse(sizes)
    simulated = chain(mesh, memory)
    inputs = random_inputs(simulated)
    with record_communication() as log:
        simulated(*inputs)[0].sum().backward()
    forward, backward = formula_bytes(mesh, memory == "low")
    for rank in range(mesh.size):
        assert log.bytes(rank=rank, stage="forward") == forward
        assert log.bytes(rank=rank, stage="backward") == backward
    assert {event.axis for event in log.events} == set(mesh.split_axes())
    before = len(log.events)
    simulated(*inputs)
    assert len(log.events) == before


def test_blocks_are_those_of_the_paper() -> None:
    mesh = Mesh.parse((2, 3, 2))
    simulated = chain(mesh, "low")
    inputs = random_inputs(simulated)
    run = simulated.run_blocks(*inputs)
    result = simulated(*inputs)[0].detach()
    for rank in range(mesh.size):
        place = mesh.coordinate(rank)
        i, j, l = place["x"], place["y"], place["z"]  # noqa: E741
        rows, inner = (i * 3 + j) * 8, l * 12
        assert torch.equal(run.inputs["x"][rank], inputs[0][rows : rows + 8, inner : inner + 12])
        rows, inner = (j * 2 + i) * 8, l * 12
        assert torch.equal(run.inputs["fc0.weight"][rank], inputs[1][rows : rows + 8, inner : inner + 12])
        rows, columns = (i * 2 + l) * 12, j * 8
        assert torch.equal(run.outputs["output_0"][rank], result[rows : rows + 12, columns : columns + 8])


@pytest.mark.parametrize("sizes", MESHES[:5])
def test_low_memory_saves_shards(sizes: tuple[int, ...]) -> None:
    """Saved are A at rest for each product (inputs apart) and the weights' own shards: 1/P of each."""
    mesh = Mesh.parse(sizes)
    run = chain(mesh, "low").run_blocks(*random_inputs(chain(mesh, "low")))
    fast = chain(mesh, "fast").run_blocks(*random_inputs(chain(mesh, "fast")))
    for rank in range(mesh.size):
        assert sum(run.saved_bytes(rank).values()) == 48 * (48 + 96) * 8 // mesh.size
        if mesh.size > 1:
            assert sum(fast.saved_bytes(rank).values()) > sum(run.saved_bytes(rank).values())


def test_saved_blocks_are_freed() -> None:
    simulated = chain(Mesh.parse((2, 2, 2)), "low")
    inputs = random_inputs(simulated)
    loss = simulated(*inputs)[0].sum()

    def alive() -> int:
        gc.collect()
        return sum(type(item) is Tensor for item in gc.get_objects())

    before = alive()
    loss.backward()
    assert alive() < before


def test_a_parameter_changed_between_forward_and_backward_is_noticed() -> None:
    simulated = chain(Mesh.parse((2, 1, 1)), "low")
    inputs = random_inputs(simulated)
    loss = simulated(*inputs)[0].sum()
    with torch.no_grad():
        inputs[2].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_wrong_inputs_are_refused() -> None:
    simulated = chain(Mesh.parse((2, 2, 2)), "low")
    inputs = random_inputs(simulated)
    with pytest.raises(PartirError, match="takes 4 tensors, 1 were given"):
        simulated(inputs[0])
    with pytest.raises(PartirError, match=r"x: the program was compiled for torch.float64 \[48, 24\], got"):
        simulated(inputs[0].float(), *inputs[1:])


def test_a_missing_reduction_is_noticed() -> None:
    for missing in (False, True):
        hand = HandLowered(Mesh.parse((2, 2, 2)))
        x = hand.input("x", "f64[48@x.y, 24@z]", "input")
        total = hand.call(aten.sum.default, x)
        whole = hand.call("all_reduce", total, "x.y" if missing else "x.y.z")
        simulated = compile_by_hand(hand, [(whole, "f64[]")])
        inputs = random_inputs(simulated)
        if missing:
            with pytest.raises(VerifyError, match="output_0: .* ranks 0 and 1 .* hold the same block"):
                simulated(*inputs)
        else:
            assert_same(simulated(*inputs), [inputs[0].sum().detach()])


@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 3, 2), (1, 1, 4)])
def test_bias_on_pending_sums_enters_once(sizes: tuple[int, ...]) -> None:
    hand = HandLowered(Mesh.parse(sizes))
    x = hand.input("x", "f64[48@x.y, 24@z]", "input")
    weight = hand.input("weight", "f64[36@y.x, 24@z]")
    bias = hand.input("bias", "f64[36@y]")
    gathered, whole = hand.call("all_gather", x, "y", 0), hand.call("all_gather", weight, "x", 0)
    everywhere = hand.call("spread", hand.call("spread", bias, "x"), "z")
    product = hand.call(aten.linear.default, gathered, whole, hand.call("once", everywhere, "z"))
    simulated = compile_by_hand(hand, [(hand.call("reduce_scatter", product, "z", 0), "f64[48@x.z, 36@y]")])
    inputs = random_inputs(simulated)
    expected = torch.nn.functional.linear(*inputs)
    actual = simulated(*inputs)
    assert_same(actual, [expected])
    pull = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    assert_same(torch.autograd.grad(actual, inputs, [pull]), torch.autograd.grad(expected, inputs, pull))


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 4, 1), (2, 3, 2)])
def test_embedding_over_a_split_vocabulary(sizes: tuple[int, ...]) -> None:
    """Ids whole along y, a masked lookup in this rank's rows, the partial rows reduce-scattered along y."""
    mesh = Mesh.parse(sizes)
    hand = HandLowered(mesh)
    table, ids = hand.input("table", "f64[24@y.x, 12@z]"), hand.input("ids", "i64[48@x]", "input")
    whole, rows = hand.call("all_gather", table, "x", 0), 24 // mesh["y"]
    place = hand.call("coordinate", "y", torch.device("cpu"))
    own = hand.call(aten.sub.Tensor, ids, hand.call(aten.mul.Tensor, place, rows))
    mine = hand.call(aten.logical_and.default, hand.call(aten.ge.Scalar, own, 0), hand.call(aten.lt.Scalar, own, rows))
    found = hand.call(aten.embedding.default, whole, hand.call(aten.clamp.default, own, 0, rows - 1))
    part = hand.call(aten.mul.Tensor, found, hand.call(aten.unsqueeze.default, mine, -1))
    simulated = compile_by_hand(hand, [(hand.call("reduce_scatter", part, "y", 0), "f64[48@x.y, 12@z]")])
    inputs = random_inputs(simulated)
    expected, actual = torch.nn.functional.embedding(inputs[1], inputs[0]), simulated(*inputs)
    assert_same(actual, [expected])
    pull = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    assert_same(torch.autograd.grad(actual, inputs[:1], [pull]), torch.autograd.grad(expected, inputs[:1], pull))


def test_diagonal_vectors() -> None:
    """Algorithm 7: b_ji lives on j = l, is broadcast along z and gathered along x; its gradient goes back there."""
    mesh = Mesh.parse((2, 2, 2))
    hand = HandLowered(mesh)
    c, b = hand.input("c", "f64[48@x.z, 36@y]", "input"), hand.input("b", "f64[36@y.x] on z=y")
    everywhere = hand.call("all_gather", hand.call("broadcast", b, "z", "y"), "x", 0)
    simulated = compile_by_hand(hand, [(hand.call(aten.mul.Tensor, c, everywhere), "f64[48@x.z, 36@y]")])
    inputs = random_inputs(simulated)
    expected, actual = inputs[0] * inputs[1], simulated(*inputs)
    assert_same(actual, [expected])
    pull = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    assert_same(torch.autograd.grad(actual, inputs, [pull]), torch.autograd.grad(expected, inputs, pull))
    held = simulated.run_blocks(*inputs).inputs["b"]
    assert [block.numel() > 0 for block in held] == [
        mesh.coordinate(r)["z"] == mesh.coordinate(r)["y"] for r in range(8)
    ]


def test_what_is_the_same_on_every_rank_is_computed_once() -> None:
    hand = HandLowered(Mesh.parse((2, 2, 2)))
    whole = hand.input("w", "f64[36]")
    simulated = compile_by_hand(hand, [(hand.call(aten.exp.default, whole), "f64[36]")])
    blocks = simulated.run_blocks(*random_inputs(simulated)).outputs["output_0"]
    assert all(block is blocks[0] for block in blocks)


def test_gradient_blocks_are_the_blocks_of_the_gradient() -> None:
    mesh = Mesh.parse((2, 2, 2))
    simulated = chain(mesh, "low")
    inputs = random_inputs(simulated)
    result = simulated(*inputs)[0]
    pull = torch.ones_like(result)
    saved = list(simulated.run_blocks(*inputs).saved.values())
    blocks = simulated.gradient_blocks(saved, [pull])
    expected = torch.autograd.grad(result, inputs, pull)
    for slot, gradient in zip(simulated.program.inputs, expected, strict=True):
        for rank in range(mesh.size):
            assert torch.equal(blocks[slot.name][rank], shard(gradient, slot.layout, mesh, rank))


def place_along_y(tensor: Tensor) -> Tensor:
    """A local function that asks where it runs, as masked lookups do."""
    return tensor + current_backend("test").coordinate(("y",))


def test_local_functions_know_their_rank() -> None:
    """A lowered graph, not yet traced through, runs as well."""
    mesh = Mesh.parse((1, 3, 1))
    hand = HandLowered(mesh)
    x = hand.input("x", "f64[6]")
    hand.graph.output((hand.graph.call_function(place_along_y, (x,)),))
    module = torch.fx.GraphModule(torch.nn.Module(), hand.graph)
    whole = torch.zeros(6, dtype=torch.float64)
    column = LockstepGraph(module, mesh, "forward").run([[whole] * mesh.size])[0]
    assert column is not None
    assert [int(block[0]) for block in column] == [0, 1, 2]
