"""Local ops: lookups in a split dim, and the index of each element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from partir.blocks import gather, shard
from partir.collectives import use_backend
from partir.layout import Layout
from partir.local_ops import (
    check_index,
    global_index,
    masked_embedding,
    masked_gather,
    masked_index_select,
)
from partir.mesh import Mesh, use_mesh
from tests.rank_threads import Loopback

torch.set_num_threads(1)
ops: Any = torch.ops.partir
ONE = Mesh.parse((1, 1, 1))
LAYOUTS = [
    ("f64[12@x.y, 18@z]", (2, 3, 3)),
    ("f64[12@z.x, 18@y]", (2, 3, 2)),
    ("f64[(3*4@y)@x, (3@z*6)] ~data", (2, 2, 3)),
    ("f64[(3*4@y)@x, 18@z]", (3, 2, 2)),
    ("f64[12@x, 18] +y ~z", (2, 2, 2)),
]


def each_rank(mesh: Mesh, function: Any) -> list[Any]:
    """Call `function(rank)` as every rank in turn: local ops ask only for coordinates."""
    results: list[Any] = []
    for rank in range(mesh.size):
        with use_mesh(mesh), use_backend(Loopback(mesh, rank)):
            results.append(function(rank))
    return results


def on_one_device(function: Any) -> Any:
    return each_rank(ONE, lambda rank: function())[0]


@pytest.mark.parametrize("axes, sizes", [("y", (1, 4, 1)), ("y.x", (2, 2, 1)), ("x", (1, 1, 1))])
@pytest.mark.parametrize("padding_idx", [-1, 0, 5])
def test_embedding_sums_to_the_whole_lookup(axes: str, sizes: tuple[int, ...], padding_idx: int) -> None:
    mesh = Mesh.parse(sizes)
    weight = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    ids, tangent = torch.tensor([[0, 5, 7], [5, 2, 3]]), torch.randn(2, 3, 3, dtype=torch.float64)
    whole = torch.ops.aten.embedding(weight, ids, padding_idx)
    (expected,) = torch.autograd.grad(whole, weight, tangent)
    layout = Layout.parse(f"f64[8@{axes}, 3]")

    def rank_step(rank: int) -> tuple[Tensor, Tensor]:
        rows = shard(weight.detach(), layout, mesh, rank).clone().requires_grad_()
        found = masked_embedding(rows, ids, axes, 8, padding_idx)
        return found, torch.autograd.grad(found, rows, tangent)[0]

    steps = each_rank(mesh, rank_step)
    assert torch.equal(torch.stack([found for found, _ in steps]).sum(0), whole)
    torch.testing.assert_close(gather([grad for _, grad in steps], layout, mesh), expected, rtol=1e-14, atol=1e-14)


def test_gather_and_index_select_sum_to_the_whole_lookup() -> None:
    mesh, layout = Mesh.parse((2, 2, 1)), Layout.parse("f64[3, 8@y.x]")
    x = torch.randn(3, 8, dtype=torch.float64)
    index, columns = torch.randint(8, (3, 5)), torch.tensor([7, 0, 3])

    def rank_step(rank: int) -> tuple[Tensor, Tensor]:
        block = shard(x, layout, mesh, rank)
        return masked_gather(block, 1, index, "y.x", 8), masked_index_select(block, -1, columns, "y.x", 8)

    steps = each_rank(mesh, rank_step)
    assert torch.equal(torch.stack([step[0] for step in steps]).sum(0), torch.gather(x, 1, index))
    assert torch.equal(torch.stack([step[1] for step in steps]).sum(0), x[:, columns])


@pytest.mark.parametrize("bad", [-1, 8])
def test_index_outside_the_whole_dim_is_an_index_error(bad: int) -> None:
    mesh, rows = Mesh.parse((1, 4, 1)), torch.ones(2, 3)
    good = torch.tensor([0, 7])
    for lookup in (
        lambda ids: masked_embedding(rows, ids, "y", 8),
        lambda ids: masked_gather(rows[:, 0], 0, ids, "y", 8),
        lambda ids: masked_index_select(rows, 0, ids, "y", 8),
    ):
        assert each_rank(mesh, lambda rank, lookup=lookup: lookup(good))[0].shape[0] == 2
        with pytest.raises(IndexError, match=f"index {bad} is out of range: a dim of size 8 has indices 0 to 7"):
            each_rank(mesh, lambda rank, lookup=lookup: lookup(torch.tensor([3, bad])))


def test_check_index_is_a_sound_op() -> None:
    torch.library.opcheck(check_index, (torch.tensor([[0, 3]]), 4))
    assert check_index(torch.empty(0, dtype=torch.int64), 4).shape == (0,)


def test_local_ops_trace_to_graphs_without_ranks() -> None:
    with FakeTensorMode(), use_mesh(Mesh.parse((2, 2, 2))):
        x = torch.empty(3, 4, requires_grad=True)
        assert masked_embedding(x, torch.empty(5, 6, dtype=torch.int64), "y.z", 12).shape == (5, 6, 4)


@pytest.mark.parametrize("text, sizes", LAYOUTS)
def test_global_index_numbers_the_whole_tensor(text: str, sizes: tuple[int, ...]) -> None:
    mesh, layout = Mesh.parse(sizes), Layout.parse(text)
    settled = Layout("i64", layout.dims)
    blocks = each_rank(mesh, lambda rank: global_index(layout, torch.device("cpu")))
    assert torch.equal(gather(blocks, settled, mesh), torch.arange(216).view(12, 18))
