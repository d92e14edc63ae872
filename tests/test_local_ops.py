"""Local ops: lookups in a split dim and random numbers, the same on every mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from partir.blocks import gather, shard
from partir.collectives import use_backend
from partir.layout import Layout
from partir.local_ops import (
    check_index,
    dropout,
    global_index,
    masked_embedding,
    masked_gather,
    masked_index_select,
    random_mask,
    random_normal,
    random_uniform,
)
from partir.mesh import Mesh, use_mesh
from tests.rank_threads import Loopback

torch.set_num_threads(1)
ops: Any = torch.ops.partir
ONE = Mesh.parse((1, 1, 1))
SEED = torch.tensor([1234, 5])
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
        seed, x = torch.empty(2, dtype=torch.int64), torch.empty(3, 4, requires_grad=True)
        assert masked_embedding(x, torch.empty(5, 6, dtype=torch.int64), "y.z", 12).shape == (5, 6, 4)
        assert dropout(x, 0.1, seed, 3, "f32[6@x, 8@z]").shape == (3, 4)


@pytest.mark.parametrize("text, sizes", LAYOUTS)
def test_global_index_numbers_the_whole_tensor(text: str, sizes: tuple[int, ...]) -> None:
    mesh, layout = Mesh.parse(sizes), Layout.parse(text)
    settled = Layout("i64", layout.dims)
    blocks = each_rank(mesh, lambda rank: global_index(layout, torch.device("cpu")))
    assert torch.equal(gather(blocks, settled, mesh), torch.arange(216).view(12, 18))


@pytest.mark.parametrize("text, sizes", LAYOUTS)
@pytest.mark.parametrize("draw", [random_uniform, random_normal])
def test_random_numbers_are_the_same_on_every_mesh(draw: Any, text: str, sizes: tuple[int, ...]) -> None:
    mesh, layout = Mesh.parse(sizes), Layout.parse(text)
    blocks = each_rank(mesh, lambda rank: draw(SEED, 7, text, torch.float64))
    whole = on_one_device(lambda: draw(SEED, 7, "f64[12, 18]", torch.float64))
    for rank, block in enumerate(blocks):
        assert torch.equal(block, shard(whole, Layout("f64", layout.dims), mesh, rank))


BIG = "f64[500, 400]"


def uniform(seed: Tensor = SEED, site: int = 0, text: str = BIG, dtype: torch.dtype = torch.float64) -> Tensor:
    return on_one_device(lambda: random_uniform(seed, site, text, dtype))


def test_uniform_numbers_are_uniform() -> None:
    numbers = uniform().flatten()
    assert 0 <= float(numbers.min()) and float(numbers.max()) < 1
    assert float(numbers.mean()) == pytest.approx(1 / 2, abs=5 * (1 / 12 / 200_000) ** 0.5)
    assert float(numbers.var()) == pytest.approx(1 / 12, abs=1e-3)
    # Chi-square over 256 cells: mean 255, standard deviation 22.6.
    counts = torch.histc(numbers, 256, 0, 1)
    assert 150 < float(((counts - 781.25) ** 2 / 781.25).sum()) < 375


@pytest.mark.parametrize("lag", [1, 2, 3, 400, 401])
def test_uniform_numbers_are_not_correlated(lag: int) -> None:
    numbers = uniform().flatten() - 0.5
    assert abs(float((numbers[lag:] * numbers[:-lag]).mean()) * 12) < 5 / 200_000**0.5


def test_neighbouring_sites_calls_and_seeds_are_independent() -> None:
    drawn = [uniform(torch.tensor([seed, call]), site) for seed in (0, 1) for call in (0, 1) for site in (0, 1)]
    drawn.append(uniform(torch.tensor([-1, 0])))
    correlations = torch.corrcoef(torch.stack([numbers.flatten() for numbers in drawn]))
    assert float((correlations - torch.eye(9)).abs().max()) < 5 / 200_000**0.5


def test_every_bit_is_fair() -> None:
    bits = (uniform() * 2**53).long()
    for place in range(53):
        assert float(((bits >> place) & 1).double().mean()) == pytest.approx(0.5, abs=5 * 0.5 / 200_000**0.5)


def test_normal_numbers_are_normal() -> None:
    numbers = on_one_device(lambda: random_normal(SEED, 0, BIG, torch.float64)).flatten()
    moments = [float((numbers**power).mean()) for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.05)
    assert bool(numbers.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_dtypes_get_the_leading_bits(dtype: torch.dtype) -> None:
    wide, narrow = uniform(), uniform(dtype=dtype)
    assert narrow.dtype == dtype
    assert float(narrow.max()) < 1
    gap = wide - narrow.double()
    assert 0 <= float(gap.min()) and float(gap.max()) < {torch.float32: 2**-24, torch.float16: 2**-11}.get(dtype, 2**-8)
    with pytest.raises(ValueError, match=r"dtype is one of .*, got torch.int64"):
        uniform(dtype=torch.int64)


@settings(max_examples=20, deadline=None)
@given(st.floats(0, 1))
def test_mask_keeps_where_uniform_is_at_least_p(p: float) -> None:
    text = "f64[30, 20]"
    keep = on_one_device(lambda: random_mask(SEED, 3, text, p))
    assert torch.equal(keep, uniform(site=3, text=text) >= p)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dropout_scales_and_saves_a_bool_mask_only(p: float, dtype: torch.dtype) -> None:
    x, saved = torch.ones(500, 400, dtype=dtype, requires_grad=True), []

    def save(t: Tensor) -> Tensor:
        saved.append(t.dtype)
        return t

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        dropped = on_one_device(lambda: dropout(x, p, SEED, 1, BIG))
    assert saved == [torch.bool]
    assert float(dropped.detach().mean()) == pytest.approx(float(p < 1), abs=0.02)
    mask = on_one_device(lambda: random_mask(SEED, 1, BIG, p))
    assert torch.equal(dropped != 0, mask)
    (grad,) = torch.autograd.grad(dropped.sum(), x)
    assert torch.equal(grad, dropped.detach())


@pytest.mark.parametrize("p", [-0.1, 1.5])
def test_dropout_probability(p: float) -> None:
    with pytest.raises(ValueError, match=f"dropout probability is between 0 and 1, got {p}"):
        on_one_device(lambda: dropout(torch.ones(2), p, SEED, 0, "f32[2]"))
