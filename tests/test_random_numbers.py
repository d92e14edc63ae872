"""Random numbers: by element the same on every mesh, by block the same on ranks that hold the same; both fair."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from partir.blocks import shard
from partir.layout import Layout
from partir.mesh import Mesh
from partir.random_numbers import ByBlock, ByIndex, Numbers, generate, seed_tensor
from partir.random_ops import dropout
from tests.test_local_ops import LAYOUTS, each_rank, on_one_device

CPU = torch.device("cpu")
BIG = "f64[500, 400]"
SEED = torch.tensor([1234, 5])
KINDS = ("bits", "uniform", "normal", "chosen")


def by_index(text: str = BIG, site: int = 0, seed: Tensor = SEED) -> ByIndex:
    return ByIndex(seed, site, Layout.parse(text), CPU)


def by_block(text: str = BIG, site: int = 0, seed: Tensor = SEED) -> ByBlock:
    return ByBlock(seed, site, Layout.parse(text), CPU)


def draw(kind: str, numbers: Numbers) -> Tensor:
    if kind == "bits":
        return numbers.bits()
    return numbers.chosen(0.3) if kind == "chosen" else getattr(numbers, kind)(torch.float64)


@pytest.mark.parametrize("text, sizes", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_by_index_is_the_same_on_every_mesh(kind: str, text: str, sizes: tuple[int, ...]) -> None:
    mesh, layout = Mesh.parse(sizes), Layout.parse(text)
    blocks = each_rank(mesh, lambda rank: draw(kind, by_index(text)))
    whole = on_one_device(lambda: draw(kind, by_index("f64[12, 18]")))
    for rank, block in enumerate(blocks):
        assert torch.equal(block, shard(whole, Layout("f64", layout.dims), mesh, rank))


@pytest.mark.parametrize("text, sizes", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_by_block_is_the_same_on_ranks_that_hold_the_same(kind: str, text: str, sizes: tuple[int, ...]) -> None:
    mesh, layout = Mesh.parse(sizes), Layout.parse(text)
    blocks = each_rank(mesh, lambda rank: draw(kind, by_block(text)))
    held = [mesh.index(rank, layout.split_axes) for rank in range(mesh.size)]
    for one, other in itertools.combinations(range(mesh.size), 2):
        assert torch.equal(blocks[one], blocks[other]) == (held[one] == held[other])
    again = each_rank(mesh, lambda rank: draw(kind, by_block(text)))
    assert all(map(torch.equal, blocks, again)), "a second run, as the backward makes it, draws the same"


def test_by_block_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    on_one_device(lambda: by_block().bits())
    assert torch.equal(torch.get_rng_state(), state)


def test_generate_is_a_sound_op() -> None:
    for kind, dtype in zip(KINDS, (torch.int64, torch.float32, torch.float64, torch.bool)):
        torch.library.opcheck(generate, (torch.tensor(3), kind, [4, 5], dtype, CPU, 0.5))


@pytest.mark.parametrize("make", [by_index, by_block])
def test_uniform_numbers_are_uniform(make: Any) -> None:
    numbers = on_one_device(lambda: make().uniform(torch.float64)).flatten()
    assert 0 <= float(numbers.min()) and float(numbers.max()) < 1
    assert float(numbers.mean()) == pytest.approx(1 / 2, abs=5 * (1 / 12 / 200_000) ** 0.5)
    assert float(numbers.var()) == pytest.approx(1 / 12, abs=1e-3)
    # Chi-square over 256 cells: mean 255, standard deviation 22.6.
    counts = torch.histc(numbers, 256, 0, 1)
    assert 150 < float(((counts - 781.25) ** 2 / 781.25).sum()) < 375


@pytest.mark.parametrize("lag", [1, 2, 3, 400, 401])
def test_uniform_numbers_are_not_correlated(lag: int) -> None:
    numbers = on_one_device(lambda: by_index().uniform(torch.float64)).flatten() - 0.5
    assert abs(float((numbers[lag:] * numbers[:-lag]).mean()) * 12) < 5 / 200_000**0.5


@pytest.mark.parametrize("make", [by_index, by_block])
def test_neighbouring_sites_calls_and_seeds_are_independent(make: Any) -> None:
    seeds = [seed_tensor(seed, call) for seed in (0, 1) for call in (0, 1)]
    drawn = [on_one_device(lambda s=s, k=k: make(BIG, k, s).uniform(torch.float64)) for s in seeds for k in (0, 1)]
    drawn.append(on_one_device(lambda: make(BIG, 0, seed_tensor(2**64 - 1, 0)).uniform(torch.float64)))
    correlations = torch.corrcoef(torch.stack([numbers.flatten() for numbers in drawn]))
    assert float((correlations - torch.eye(9)).abs().max()) < 5 / 200_000**0.5


def test_blocks_of_one_value_are_independent() -> None:
    blocks = each_rank(Mesh.parse((2, 2, 2)), lambda rank: by_block("f64[800@x.y, 500@z]").uniform(torch.float64))
    correlations = torch.corrcoef(torch.stack([block.flatten() for block in blocks]))
    assert float((correlations - torch.eye(8)).abs().max()) < 5 / 50_000**0.5


@pytest.mark.parametrize("make", [by_index, by_block])
def test_every_bit_is_fair(make: Any) -> None:
    bits = on_one_device(lambda: make().bits())
    for place in range(53):
        assert float(((bits >> place) & 1).double().mean()) == pytest.approx(0.5, abs=5 * 0.5 / 200_000**0.5)


@pytest.mark.parametrize("make", [by_index, by_block])
def test_normal_numbers_are_normal(make: Any) -> None:
    numbers = on_one_device(lambda: make().normal(torch.float64)).flatten()
    moments = [float((numbers**power).mean()) for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.05)
    assert bool(numbers.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_dtypes_get_the_leading_bits(dtype: torch.dtype) -> None:
    wide, narrow = (on_one_device(lambda kind=kind: by_index().uniform(kind)) for kind in (torch.float64, dtype))
    assert narrow.dtype == dtype
    assert float(narrow.max()) < 1
    gap = wide - narrow.double()
    assert 0 <= float(gap.min()) and float(gap.max()) < {torch.float32: 2**-24, torch.float16: 2**-11}.get(dtype, 2**-8)
    for make in (by_index, by_block):
        with pytest.raises(ValueError, match=r"dtype is one of .*, got torch.int64"):
            on_one_device(lambda make=make: make().uniform(torch.int64))


@settings(max_examples=20, deadline=None)
@given(st.floats(0, 1))
def test_chosen_is_where_uniform_is_below(probability: float) -> None:
    numbers = by_index("f64[30, 20]", 3)
    chosen = on_one_device(lambda: numbers.chosen(probability))
    assert torch.equal(chosen, on_one_device(lambda: numbers.uniform(torch.float64)) < probability)


@pytest.mark.parametrize("rng", ["exact", "fast"])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dropout_scales_and_saves_a_bool_mask_only(dtype: torch.dtype, p: float, rng: str) -> None:
    x, saved = torch.ones(500, 400, dtype=dtype, requires_grad=True), []

    def save(t: Tensor) -> Tensor:
        saved.append(t.dtype)
        return t

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        dropped = on_one_device(lambda: dropout(x, p, True, seed=SEED, site=1, layout=BIG, device=CPU, rng=rng))
    assert saved == [torch.bool]
    deviation = (p / max(1 - p, 0.1) / 200_000) ** 0.5
    assert float(dropped.detach().mean()) == pytest.approx(float(p < 1), abs=5 * deviation + 1e-6)
    (grad,) = torch.autograd.grad(dropped.sum(), x)
    assert torch.equal(grad, dropped.detach())


@pytest.mark.parametrize("make", [by_index, by_block])
@pytest.mark.parametrize("probability", [-0.1, 1.5])
def test_a_probability(probability: float, make: Any) -> None:
    with pytest.raises(ValueError, match=f"a probability is between 0 and 1, got {probability}"):
        on_one_device(lambda: make().chosen(probability))
