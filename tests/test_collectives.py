"""Collectives as torch ops: kernels, fake formulas and derivatives, every row of the type table."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from partir.collectives import SCHEMAS, overload, received_bytes, use_backend
from partir.errors import LayoutError, MeshError, PartirError
from partir.mesh import Mesh, use_mesh
from tests.rank_threads import Loopback, run_ranks

torch.set_num_threads(1)
MESH = Mesh.parse((2, 2, 3))
CUBE = Mesh.parse((1, 3, 3))


class Row(NamedTuple):
    """A row of the type table, with a local operand and the local result's shape."""

    op: str
    axis: str
    shape: tuple[int, ...]
    result: tuple[int, ...]
    types: str
    args: dict[str, Any] = {}


TABLE = [
    Row("all_gather", "y", (4, 3), (8, 3), "SR", {"dim": 0}),
    Row("all_gather", "z", (4, 3), (4, 9), "SR", {"dim": 1}),
    Row("all_gather", "z.x", (6, 2), (36, 2), "SR", {"dim": 0, "blocks": 3}),
    Row("all_gather_same", "y", (4, 3), (8, 3), "SI", {"dim": 0}),
    Row("all_gather_same", "z", (4, 6), (4, 18), "SI", {"dim": 1, "blocks": 2}),
    Row("reduce_scatter", "z", (6, 2), (2, 2), "PS", {"dim": 0}),
    Row("reduce_scatter", "x.y", (2, 16), (2, 4), "PS", {"dim": 1, "blocks": 2}),
    Row("all_reduce", "z", (5,), (5,), "PI"),
    Row("all_reduce", "x.z", (2, 3), (2, 3), "PI", {"op": "sum"}),
    Row("slice", "y", (6, 2), (3, 2), "IS", {"dim": 0}),
    Row("slice", "y", (6, 2), (3, 2), "RS", {"dim": 0, "varied": True}),
    Row("slice", "z.x", (2, 24), (2, 4), "RS", {"dim": 1, "blocks": 2, "varied": True}),
    Row("zero_pad", "z", (2, 4), (2, 12), "SP", {"dim": 1, "blocks": 2}),
    Row("spread", "y", (3,), (3,), "IR"),
    Row("settle", "z", (3,), (3,), "RI"),
    Row("once", "z", (3,), (3,), "RP"),
    Row("once", "y", (3,), (3,), "IP", {"varied": False}),
    Row("all_to_all", "z", (2, 6), (6, 2), "SS", {"src": 0, "dst": 1}),
    Row("all_to_all", "x.z", (4, 24), (24, 4), "SS", {"src": 0, "dst": 1, "src_blocks": 2, "dst_blocks": 4}),
    Row("all_to_all", "y", (2, 8), (2, 8), "SS", {"src": 1, "dst": 1, "src_blocks": 4}),
    Row("all_to_all", "y", (2, 8), (2, 8), "SS", {"src": 1, "dst": 1, "dst_blocks": 4}),
]
DIAGONAL = [
    Row("broadcast", "y", (2, 4), (2, 4), "OR", {"root": "z"}),
    Row("broadcast", "z", (3,), (3,), "OR", {"root": "y"}),
    Row("reduce_to", "y", (2, 4), (2, 4), "PO", {"root": "z"}),
]
COTANGENT = {"S": "S", "P": "R", "R": "P", "I": "I", "O": "O"}


def call(row: Row, t: Tensor) -> Tensor:
    return overload(row.op)(t, row.axis, **row.args)


def draw(kind: str, shape: tuple[int, ...], mesh: Mesh, row: Row, seed: int) -> list[Tensor]:
    """Draw one block a rank: the same within a group for types R and I, zero off the diagonal for an owned value."""
    axes, blocks = tuple(row.axis.split(".")), []
    for rank in range(mesh.size):
        base = mesh.group(rank, axes)[0] if kind in "RI" else rank
        generator = torch.Generator().manual_seed(1000 * seed + base)
        block = torch.randn(shape, dtype=torch.float64, generator=generator)
        blocks.append(block if kind != "O" or owns(mesh, row, rank) else torch.zeros_like(block))
    return blocks


def owns(mesh: Mesh, row: Row, rank: int) -> bool:
    place = mesh.coordinate(rank)
    return place[row.axis] == place[row.args["root"]]


def pair(kind: str, values: list[Tensor], cotangents: list[Tensor], group: tuple[int, ...]) -> float:
    """Pair a value with its cotangent over a group: type I counts once, all others add up over the ranks."""
    ranks = group[:1] if kind == "I" else group
    return sum(float((values[rank] * cotangents[rank]).sum()) for rank in ranks)


def has_type(kind: str, blocks: list[Tensor], mesh: Mesh, row: Row) -> bool:
    if kind == "O":
        return all(owns(mesh, row, rank) or not block.any() for rank, block in enumerate(blocks))
    if kind not in "RI":
        return True
    return all(
        torch.equal(blocks[rank], blocks[group[0]]) for group in mesh.groups(row.axis.split(".")) for rank in group
    )


@pytest.mark.parametrize("row", TABLE + DIAGONAL, ids=lambda row: f"{row.op}-{row.axis}-{row.types}")
def test_derivative_is_the_adjoint(row: Row) -> None:
    mesh = CUBE if row in DIAGONAL else MESH
    before, after = row.types
    values = draw(before, row.shape, mesh, row, seed=1)
    cotangents = draw(COTANGENT[after], row.result, mesh, row, seed=2)

    def rank_step(rank: int) -> tuple[Tensor, Tensor]:
        t = values[rank].clone().requires_grad_()
        result = call(row, t)
        (grad,) = torch.autograd.grad(result, t, cotangents[rank])
        return result.detach(), grad

    steps = run_ranks(mesh, rank_step)
    results, grads = [step[0] for step in steps], [step[1] for step in steps]
    assert all(result.shape == row.result for result in results)
    assert has_type(after, results, mesh, row)
    assert has_type(COTANGENT[before], grads, mesh, row)
    for group in mesh.groups(row.axis.split(".")):
        forward, backward = pair(after, results, cotangents, group), pair(before, values, grads, group)
        assert forward == pytest.approx(backward, rel=1e-12, abs=1e-12)


def test_adjoint_check_notices_a_wrong_type() -> None:
    """Negative control: gathered as S->I, the derivative must not be a reduce-scatter."""
    row = Row("all_gather", "y", (4, 3), (8, 3), "SI", {"dim": 0})
    with pytest.raises(AssertionError):
        test_derivative_is_the_adjoint(row)


@pytest.mark.parametrize("row", TABLE + DIAGONAL, ids=lambda row: f"{row.op}-{row.axis}-{row.types}")
def test_opcheck(row: Row) -> None:
    mesh = CUBE if row in DIAGONAL else MESH
    # Test AOT with fixed shapes: local shapes are numbers in every program.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    with use_mesh(mesh), use_backend(Loopback(mesh)):
        t = torch.randn(row.shape, dtype=torch.float64, requires_grad=True)
        torch.library.opcheck(overload(row.op), (t, row.axis), row.args, test_utils=checks)


@pytest.mark.parametrize("row", TABLE + DIAGONAL, ids=lambda row: f"{row.op}-{row.axis}-{row.types}")
def test_size_one_is_a_copy(row: Row) -> None:
    mesh = Mesh.parse((1, 1, 1))
    with use_mesh(mesh), use_backend(Loopback(mesh)):
        t = torch.randn(row.shape)
        result = call(row, t)
    assert torch.equal(result, t)
    assert result.data_ptr() != t.data_ptr()


@pytest.mark.parametrize("op, result", [("all_gather_bucket", (8, 3)), ("reduce_scatter_bucket", (2, 3))])
def test_bucket_equals_its_single_collectives(op: str, result: tuple[int, ...]) -> None:
    single = overload(op.removesuffix("_bucket"))

    def rank_step(rank: int) -> None:
        torch.manual_seed(0)
        ts = [torch.randn(4, 3).add(rank).requires_grad_(), torch.randn(2).mul(rank).requires_grad_()]
        together, alone = overload(op)(ts, "y"), [single(t, "y", 0) for t in ts]
        weights = [torch.randn(out.shape) + rank for out in alone]
        grads = torch.autograd.grad([*together], ts, weights)
        expected = torch.autograd.grad(alone, ts, weights)
        assert together[0].shape == result
        for got, want in zip([*together, *grads], [*alone, *expected], strict=True):
            assert torch.equal(got, want)

    run_ranks(MESH, rank_step)


def test_maximum_has_no_gradient() -> None:
    def rank_step(rank: int) -> tuple[bool, float]:
        t = torch.tensor(float(rank), requires_grad=True)
        result = overload("all_reduce")(t, "z", "max")
        return result.requires_grad, float(result)

    assert run_ranks(MESH, rank_step) == [(False, 3.0 * (rank // 3) + 2) for rank in range(12)]


def test_coordinate_is_the_row_major_index_over_the_axes_given() -> None:
    def rank_step(rank: int) -> int:
        return int(overload("coordinate")("z.x", torch.device("cpu")))

    assert run_ranks(MESH, rank_step) == [MESH.index(rank, ("z", "x")) for rank in range(12)]


def test_sums_are_bitwise_equal_on_all_ranks() -> None:
    def rank_step(rank: int) -> Tensor:
        torch.manual_seed(rank)
        return overload("all_reduce")(torch.randn(1000), "x.y.z")

    results = run_ranks(MESH, rank_step)
    assert all(torch.equal(result, results[0]) for result in results)


def test_fake_formulas_need_a_mesh_and_no_backend() -> None:
    with FakeTensorMode(), use_mesh(MESH):
        for row in TABLE + DIAGONAL:
            assert call(row, torch.empty(row.shape)).shape == row.result
        assert overload("coordinate")("x", torch.device("cpu")).dtype == torch.int64
    with FakeTensorMode(), pytest.raises(MeshError, match="outside a mesh"):
        overload("all_gather")(torch.empty(2), "y", 0)


def test_kernels_without_backend_say_so() -> None:
    with pytest.raises(PartirError, match="partir::all_gather was called on real tensors and no communication"):
        overload("all_gather")(torch.ones(2), "y", 0)


def test_size_that_does_not_divide() -> None:
    with FakeTensorMode(), use_mesh(MESH):
        assert overload("slice")(torch.empty(6), "z", 0).shape == (2,)
        with pytest.raises(LayoutError, match=r"partir::slice along z: dim 0 of local size 8 is not divisible into"):
            overload("slice")(torch.empty(8), "z", 0)


BYTES = {
    "all_gather": 3 * 24 * 8,
    "all_gather_same": 3 * 24 * 8,
    "reduce_scatter": 3 * 6 * 8,
    "all_to_all": 3 * 6 * 8,
    "all_reduce": 2 * 3 * 6 * 8,
    "broadcast": 24 * 8,
    "reduce_to": 3 * 24 * 8,
    "all_gather_bucket": 3 * 24 * 8,
    "reduce_scatter_bucket": 3 * 6 * 8,
}


@pytest.mark.parametrize("op", SCHEMAS)
def test_received_bytes(op: str) -> None:
    shape: Any = [(4, 4), (8,)] if op.endswith("bucket") else (6, 4)
    assert received_bytes(op, shape, torch.float64, 4) == BYTES.get(op, 0)
    assert received_bytes(op, shape, torch.float64, 1) == 0


def test_all_reduce_bytes_count_whole_chunks() -> None:
    assert received_bytes("all_reduce", (5,), torch.float32, 4, op="max") == 2 * 3 * 2 * 4
    with pytest.raises(ValueError, match="'gather' is not a collective"):
        received_bytes("gather", (5,), torch.float32, 4)
