"""Choosing a mesh: suggestions against plans compiled for their meshes, folded layers, budgets and orders."""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import partir
import partir.mesh_search
import partir.suggest
from examples.models.gpt import GPT, GPTConfig
from partir.errors import PartirError
from partir.hardware import load_hardware
from partir.mesh import AXES, Mesh
from partir.mesh_search import Estimate, Search
from partir.options import Options
from partir.passes import pipeline
from partir.passes.fold_layers import fold_layers
from partir.passes.same_program import is_same_program
from partir.passes.trace import trace
from partir.suggest import factorisations
from partir.suggestions import Suggestion, Suggestions


def gpt(num_layers: int = 5, vocabulary: int = 64, heads: int = 4) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    with torch.device("meta"):
        config = GPTConfig(vocab_size=vocabulary, block_size=16, num_layers=num_layers, num_heads=heads, hidden=8 * heads)
        ids = torch.zeros(8, 16, dtype=torch.long)
        return GPT(config), (ids,), {"labels": ids.clone()}


def folded() -> Any:
    """Layers are left out of small traces too."""
    return mock.patch.object(partir.mesh_search, "SMALL", 0)


@lru_cache
def suggested() -> Suggestions:
    model, args, kwargs = gpt()
    with folded():
        return partir.suggest_mesh(model, 4, args, kwargs, by="bytes", axes=("x", "y", "z"), sure=None)


def test_every_mesh_is_there_in_both_modes() -> None:
    found = {(one.mesh, one.mode) for one in suggested()}
    assert found == {(mesh.sizes, mode) for mesh in factorisations(4, ("x", "y", "z")) for mode in ("low", "fast")}
    assert all(one.exact for one in suggested())


@pytest.mark.parametrize("mesh", [(1, 2, 2), *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ((4, 1, 1), (1, 4, 1)))])
def test_bytes_and_memory_are_those_of_the_plan_with_all_its_layers(mesh: tuple[int, ...]) -> None:
    model, args, kwargs = gpt()
    for one in suggested():
        if one.mesh == mesh:
            plan = partir.plan(model, mesh, args, kwargs, memory=one.mode)
            assert one.bytes == plan.bytes()
            assert one.memory == pytest.approx(plan.cost().peak_memory(), rel=0.1)


def test_sizes_that_nothing_divides_are_padded_as_the_plan_pads_them() -> None:
    model, args, kwargs = gpt(num_layers=1, vocabulary=37, heads=6)
    found = partir.suggest_mesh(model, 4, args, kwargs, by="bytes", axes=("y", "z"), modes=("low",), sure=None)
    for one in found:
        assert one.bytes == partir.plan(model, one.mesh, args, kwargs).bytes()


class Turns(nn.Module):
    """One product a layer: its input lies along y and z in turns, so that two layers repeat, not one."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(32, 64), nn.Linear(64, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x).square().mean()


@pytest.mark.parametrize("num_layers", [7, pytest.param(8, marks=pytest.mark.slow)])
def test_layers_laid_out_in_turns_are_folded_two_by_two(num_layers: int) -> None:
    model, x = Turns(num_layers).to("meta"), torch.empty(64, 32, device="meta")
    with folded():
        found = partir.suggest_mesh(model, 16, x, sure=None, axes=("x", "y", "z"), modes=("low",))
    assert not found.rejected
    for one in found:
        if one.mesh in ((2, 4, 2), (2, 2, 4)):
            plan = partir.plan(model, one.mesh, x)
            assert one.exact and one.bytes == plan.bytes()
            assert one.seconds == pytest.approx(plan.time("dgx-h100").seconds, rel=0.05)


SOME = ("x", "y", "z")


@pytest.mark.parametrize(("axes", "mode"), [(SOME, "low"), *(pytest.param(AXES, mode, marks=pytest.mark.slow) for mode in ("low", "fast"))])
def test_a_program_of_more_axes_stands_for_a_mesh_that_lacks_some(axes: tuple[str, ...], mode: str) -> None:
    """Bytes, seconds and memory of meshes of one to three axes: those of a plan compiled for each, but for a constant made again."""
    model, args, kwargs = gpt(num_layers=1)
    found = partir.suggest_mesh(model, 4, args, kwargs, axes=axes, modes=(mode,), sure=None)
    assert found.compiled < len(found) and all(one.exact for one in found)
    for one in found:
        plan = partir.plan(model, one.mesh, args, kwargs, memory=mode)
        assert (one.mesh, one.bytes) == (one.mesh, plan.bytes())
        assert one.memory == pytest.approx(plan.cost().peak_memory(), rel=0.01), one.mesh
        assert one.seconds == pytest.approx(plan.time("dgx-h100").seconds, rel=5e-3), one.mesh


def test_a_program_in_which_an_op_runs_in_another_way_does_not_stand_for_a_mesh() -> None:
    model, args, kwargs = gpt(num_layers=1)
    options, profile = Options(), load_hardware("dgx-h100")
    search = Search(model, args, kwargs, options, ("low",), profile)
    search.run([Mesh.parse((2, 2, 2))])
    (template,) = search.templates
    assert template.mesh == Mesh.parse((2, 2, 2, 2))
    for sizes, same in (((1, 2, 2), True), ((2, 2, 2), True), ((4, 4, 4), False), ((2, 2, 1), False), ((2, 1, 2), False)):
        mesh = Mesh.parse(sizes)
        laid_out = pipeline.lay_out(search.folded.traced, mesh, options, pipeline.factorise(search.folded.traced))
        assert is_same_program(template.low, laid_out, mesh) == same, sizes
        assert bool(template.other_forms(mesh.split_axes())) == (1 in sizes[1:])
    turned = pipeline.lay_out(search.folded.traced, Mesh.parse((2, 1, 2)), options, pipeline.factorise(search.folded.traced))
    assert not is_same_program(template.low, turned, Mesh.parse((1, 2, 2)))  # laid out for another mesh


def test_a_padded_dim_that_is_only_summed_over_is_a_symbol_too() -> None:
    model, x = nn.Sequential(nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 5)).to("meta"), torch.empty(9, 7, device="meta")
    for one in partir.suggest_mesh(model, 6, x, by="bytes", axes=("x", "z"), modes=("low",), sure=None):
        assert one.exact and one.bytes == partir.plan(model, one.mesh, x).bytes()


def test_small_models_are_computed_exactly() -> None:
    """On odd sizes a program of other axes says little: 7 channels are padded along two ranks and whole along six."""
    model, x = nn.Sequential(nn.Conv2d(3, 7, 3), nn.ReLU(), nn.Conv2d(7, 5, 3)).to("meta"), torch.empty(5, 3, 9, 9, device="meta")
    found = partir.suggest_mesh(model, 6, x, axes=("x", "z"), modes=("fast",), memory="1GB", outputs="sharded")
    assert all(one.exact for one in found) and {one.mesh for one in found} == {(1, 1, 6), (2, 1, 3), (3, 1, 2), (6, 1, 1)}
    for one in found:
        plan = partir.plan(model, one.mesh, x, memory="fast", outputs="sharded")
        assert (one.bytes, one.memory) == (plan.bytes(), plan.cost().peak_memory())


def test_numbers_beyond_64_bits() -> None:
    model, rows = nn.Linear(2**14, 2**16, bias=False, device="meta"), torch.empty(2**33, 2**14, device="meta")
    (one,) = partir.suggest_mesh(model, 2, rows, axes=("x",), modes=("low",), memory="1000000TB", outputs="sharded")
    plan = partir.plan(model, one.mesh, rows, outputs="sharded")
    assert one.seconds == pytest.approx(plan.time("dgx-h100").seconds, rel=1e-6)
    assert one.memory == pytest.approx(plan.cost().peak_memory(), rel=1e-12)


def test_the_dtype_of_computation_is_that_of_the_plan() -> None:
    model, x = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to("meta"), torch.empty(32, 64, device="meta")
    chosen: dict[str, Any] = {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    for one in partir.suggest_mesh(model, 4, x, by="bytes", axes=("y", "z"), modes=("low",), **chosen):
        assert one.exact and one.bytes == partir.plan(model, one.mesh, x, **chosen).bytes()
    with pytest.raises(PartirError, match="compute_dtype=torch.int8 is not understood"):
        partir.suggest_mesh(model, 4, x, compute_dtype=torch.int8)


@pytest.mark.parametrize("by", ["bytes", pytest.param("time", marks=pytest.mark.slow), pytest.param("memory", marks=pytest.mark.slow)])
def test_the_best_of_the_estimates_is_the_best_of_all(by: str) -> None:
    model, args, kwargs = gpt(num_layers=1)
    chosen: dict[str, Any] = {"axes": ("x", "y", "z"), "modes": ("fast",), "by": by}
    with mock.patch.object(partir.suggest, "EFFORT", 0):
        found = partir.suggest_mesh(model, 8, args, kwargs, sure=1, **chosen)
    assert found[0].exact and not all(one.exact for one in found)
    every = partir.suggest_mesh(model, 8, args, kwargs, sure=None, **chosen)
    assert (found[0].mesh, found[0].bytes, found[0].memory) == (every[0].mesh, every[0].bytes, every[0].memory)


def test_the_least_of_an_estimate_is_no_more_than_the_plan() -> None:
    """Of meshes that are laid out as one program, but whose layer norms and look-ups run in another way."""
    model, args, kwargs = gpt(num_layers=1)
    meshes = list(factorisations(4, ("x", "y", "z")))
    search = Search(model, args, kwargs, Options(), ("fast",), load_hardware("dgx-h100"))
    search.run(meshes)
    seen = {mesh for mesh in meshes if search.look_closer(mesh)}
    assert not any(search.look_closer(mesh) for mesh in meshes)  # nothing is new
    open_ones = [one for one in search.run(meshes) if not one.suggestion.exact and Mesh.parse(one.suggestion.mesh) in seen]
    assert len(search.templates) == 1 and open_ones
    for one in open_ones:
        plan = partir.plan(model, one.suggestion.mesh, args, kwargs, memory="fast")
        assert one.least_bytes <= plan.bytes() == one.suggestion.bytes
        assert 0.5 * one.suggestion.seconds < one.least_seconds <= plan.time("dgx-h100").seconds
        assert one.least_memory <= plan.cost().peak_memory()


def test_an_axis_that_does_not_divide_leaves_parameters_whole() -> None:
    model, x = nn.Linear(36, 20, bias=False, device="meta"), torch.empty(12, 36, device="meta")
    search = Search(model, (x,), {}, Options(outputs="sharded"), ("low",), load_hardware("dgx-h100"), axes=("y",))
    search.run([Mesh.parse((1, 2, 1))])
    (template,) = search.templates
    for ranks, more in ((2, 0), (3, 2 * (20 * 36 * 4 // 3) * 4), (5, 0), (10, 0)):  # of the weight, its gradient and two moments
        mesh = Mesh.parse((1, ranks, 1))
        assert template.replicated("low", mesh, template.relaxed(mesh, {})) == more, ranks


def test_an_estimate_that_may_fit_is_not_left_out_unseen() -> None:
    """It holds 50 bytes if every size divides and 400 if none does: between those a budget does not decide without a look."""
    one = Estimate(Suggestion((1, 3, 1), "low", 0, 0.0, 400, exact=False), 0, 0.0, 50)
    near = {budget: partir.suggest._is_near(one, budget) for budget in (40, 60, 399, 450, 600)}  # pyright: ignore[reportPrivateUsage]
    assert near == {40: False, 60: True, 399: True, 450: True, 600: False}


def test_a_table_that_is_sent_again_is_not_one_that_is_gathered() -> None:
    """A tied table: along z alone its one message is not sent again for the backward, and vectors are gathered in one."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, 8)
            self.norm, self.other = nn.LayerNorm(8), nn.LayerNorm(8)
            self.inner = nn.Linear(8, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = self.other(self.inner(self.norm(self.table(ids))))
            return nn.functional.linear(hidden, self.table.weight).log_softmax(-1).mean()

    model, ids = Tied().to("meta"), torch.zeros(4, 8, dtype=torch.long, device="meta")
    for one in partir.suggest_mesh(model, 2, ids, by="bytes", sure=None):
        assert (one.exact, one.bytes) == (True, partir.plan(model, one.mesh, ids, memory=one.mode).bytes()), one


def test_a_copy_of_gathered_weights_is_made_again_where_they_are_gathered() -> None:
    """Experts as an einsum copy their weights: along data alone nothing was gathered, and the copy is kept for the backward."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate = nn.Parameter(torch.empty(4, 16, 32)), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("bsh,ehf->bsef", self.gate(x), self.up).square().mean()

    model, x = Experts().to("meta"), torch.empty(8, 4, 16, device="meta")
    for one in partir.suggest_mesh(model, 4, x, axes=("data", "y", "z"), modes=("low",), sure=None):
        plan = partir.plan(model, one.mesh, x)
        assert one.exact and one.bytes == plan.bytes()
        assert one.memory == pytest.approx(plan.cost().peak_memory(), rel=2e-3), one


def test_the_order_is_that_of_what_is_asked_for() -> None:
    received = [one.bytes for one in suggested()]
    assert received == sorted(received)
    assert suggested()[0].bytes < suggested()[-1].bytes


def test_a_budget_rejects_and_says_why() -> None:
    memory = sorted(one.memory for one in suggested())
    model, args, kwargs = gpt()
    chosen: dict[str, Any] = {"axes": ("y",), "modes": ("low", "fast"), "sure": None}
    both = partir.suggest_mesh(model, 4, args, kwargs, **chosen)
    small, large = sorted(one.memory for one in both)
    found = partir.suggest_mesh(model, 4, args, kwargs, memory=(small + large) // 2, **chosen)
    assert [one.memory for one in found] == [small]
    assert [one.memory for one in found.rejected] == [large]
    assert "more than" in found.rejected[0].why and "rejected" in str(found)
    with pytest.raises(PartirError, match=r'fits into 1 kB a rank: the closest is mesh=\(1, 4, 1\), memory="low" with .* Give more'):
        partir.suggest_mesh(model, 4, args, kwargs, memory="1kB", **chosen)
    assert memory[0] > 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"by": "luck"}, "by has 'luck'; choose from 'time', 'bytes', 'memory'"),
        ({"axes": ("w",)}, "axes has 'w'; choose from 'data', 'x', 'y', 'z'"),
        ({"modes": ("slow",)}, "modes has 'slow'; choose from 'low', 'fast'"),
        ({"memory": "much"}, 'write "40GB"'),
        ({"hardware": "abacus"}, "abacus"),
    ],
)
def test_what_means_nothing_is_refused(more: dict[str, Any], message: str) -> None:
    model, args, kwargs = gpt(num_layers=1)
    with pytest.raises(PartirError, match=message):
        partir.suggest_mesh(model, 4, args, kwargs, **more)


def test_layers_that_repeat_are_left_out() -> None:
    traced = trace(*gpt(num_layers=6))
    folded = fold_layers(traced)
    assert folded.counts == {"blocks.2": 3}
    assert len(folded.traced.graph_module.graph.nodes) < len(traced.graph_module.graph.nodes)
    kept = [slot.name for slot in folded.traced.slots if slot.name.endswith("fc1.weight")]
    assert kept == [f"blocks.{number}.mlp.fc1.weight" for number in range(4)]


def test_layers_that_differ_are_kept() -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=number % 2 == 0) for number in range(6)))
    traced = trace(nn.Sequential(layers), (torch.zeros(4, 8),))
    assert fold_layers(traced).traced is traced


@pytest.mark.slow
def test_layers_that_are_frozen_have_the_plans_bytes_and_seconds() -> None:
    model, args, kwargs = partly_frozen()
    with folded():
        found = partir.suggest_mesh(model, 2, args, kwargs, by="bytes", axes=("x", "y"), modes=("low",), sure=None)
    for one in found:
        plan = partir.plan(model, one.mesh, args, kwargs)
        assert one.bytes == plan.bytes()
        assert one.seconds == pytest.approx(plan.time("dgx-h100").seconds, rel=5e-3)


def partly_frozen() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model, args, kwargs = gpt(num_layers=8)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("token", "position", "blocks.0.", "blocks.1.", "blocks.2.")))
    return model, args, kwargs


def test_layers_that_are_frozen_do_not_stand_for_trained_ones() -> None:
    model, args, kwargs = partly_frozen()
    assert fold_layers(trace(model, args, kwargs)).counts == {"blocks.5": 2}  # the first that is trained hands no gradient on


def test_a_product_on_its_best_mesh_is_at_the_bound() -> None:
    model = nn.Linear(4096, 16384, bias=False, device="meta")
    rows = torch.empty(8192, 4096, device="meta")
    with torch.no_grad():  # the bound is for an A that is stored once: the input arrives in blocks
        plan, cube = (
            partir.plan(model, mesh, rows, outputs="sharded", pin={"input": "f[m@x.y, k@z]"}) for mesh in ((4, 8, 2), (4, 4, 4))
        )
    assert plan.limit().ratio == pytest.approx(1.0)
    assert plan.limit().products[0].best == (4, 8, 2)
    assert cube.limit().ratio == pytest.approx(1.235, abs=1e-3)
