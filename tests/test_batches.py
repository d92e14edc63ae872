"""What of a batch a rank needs: slices, samplers, and programs that are given blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, SequentialSampler

import partir
from partir.batches import batch_axes
from partir.layout import Layout
from partir.mesh import Mesh
from partir.options import Options
from partir.passes.pipeline import Compiled, compile_program
from partir.runtime.simulated import SimulatedProgram
from tests.gpt_on_tokens import make_gpt, tokens


@pytest.mark.parametrize(("mesh", "axes"), [((2, 2, 2, 1), ("data", "x")), ((1, 2, 2), ())])
def test_slices_are_what_the_first_call_reads(mesh: tuple[int, ...], axes: tuple[str, ...]) -> None:
    plan = partir.plan(make_gpt(), mesh, tokens(), {"labels": tokens()})
    assert batch_axes(plan.compiled, plan.mesh) == (axes, 8)
    slices = [partir.batch_slice(plan, rank) for rank in range(plan.mesh.size)]
    covered = {index for part in slices for index in range(8)[part]}
    assert covered == set(range(8)) and len({(s.start, s.stop) for s in slices}) == plan.mesh.extent(axes)
    assert partir.batch_slice(plan) == slice(0, 8)


def test_a_sampler_gives_each_rank_its_part_of_every_batch() -> None:
    plan = _linear_plan()
    batches = BatchSampler(SequentialSampler(range(20)), 8, drop_last=True)
    samplers = [partir.BatchSliceSampler(batches, plan, rank) for rank in range(4)]
    assert len(samplers[0]) == 2 and list(samplers[1]) == [[2, 3], [10, 11]]
    together = [[index for part in batch for index in part] for batch in zip(*samplers)]
    assert together == list(batches)


@pytest.mark.parametrize("mesh", [(2, 2, 2, 1), pytest.param((4, 1, 1, 2), marks=pytest.mark.slow)])
def test_a_program_given_blocks_equals_one_given_the_whole_batch(mesh: tuple[int, ...]) -> None:
    """The graph that the ranks run where each passes its own samples: loss and gradients are those of the whole batch."""
    ids, ranks = tokens(), Mesh.parse(mesh)
    whole = compile_program(make_gpt(), (ids,), {"labels": ids.clone()}, ranks, Options())
    axes, size = batch_axes(whole, ranks)
    blocks = Layout.parse(f"i64[{size}@{'.'.join(axes)}, 8]")
    given = compile_program(make_gpt(), (ids,), {"labels": ids.clone()}, ranks, Options(), None, {"ids": blocks, "labels": blocks})
    layouts = {slot.name: slot.layout for slot in given.program.inputs}
    assert str(layouts["ids"]) == str(layouts["labels"]) == str(blocks)
    assert batch_axes(given, ranks) == (axes, size)
    (loss, grads), (expected, others) = _loss_and_gradients(whole), _loss_and_gradients(given)
    assert abs(float(loss - expected)) < 1e-12
    assert max(float((a - b).abs().max()) for a, b in zip(grads, others, strict=True)) < 1e-12


def _loss_and_gradients(compiled: Compiled) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model = make_gpt()
    values = dict(model.named_parameters())
    program = compiled.program
    tensors = [values[slot.name] if slot.kind == "parameter" else tokens() for slot in program.inputs]
    loss = SimulatedProgram(program, check_ranks=True)(*tensors)[0]
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def test_simulated_the_same_script_passes_whole_batches() -> None:
    model = partir.parallelize(nn.Linear(16, 16), {"data": 2, "x": 2}, torch.empty(8, 16))
    batch = {"x": torch.ones(8, 16), "names": ["a"]}
    assert partir.from_local_batch(model, batch) is batch
    assert partir.batch_slice(model, batch_size=12) == slice(0, 12)


def test_micro_batches_are_equal_parts() -> None:
    parts = partir.micro_batches({"x": torch.arange(6.0), "y": [torch.arange(12).view(6, 2)], "scale": 2.0}, 3)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert parts[2]["y"][0].tolist() == [[8, 9], [10, 11]] and parts[1]["scale"] == 2.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partir.micro_batches(torch.ones(10, 2), 4), "a batch of 10 samples does not divide into 4 equal parts"),
        (lambda: partir.micro_batches(torch.ones(10, 2), 0), "does not divide into 0 equal parts: .* Choose from 1, 2, 5, 10."),
        (lambda: partir.micro_batches(torch.ones(10, 2), 2.0), r"the number of parts is 2.0, a float; give an integer"),  # pyright: ignore
        (lambda: partir.micro_batches([torch.ones(4), torch.ones(6)], 2), r"share their first dim; theirs are \[4, 6\]"),
        (lambda: partir.batch_slice(partir.parallelize(nn.Linear(2, 2), (1, 1, 1))), "Linear is not compiled yet"),
        (lambda: partir.batch_slice(_linear_plan(), 4), "rank 4 is not of mesh .* 0 to 3"),
        (lambda: partir.batch_slice(_linear_plan(), 0, 6), "a batch of 6 samples is not divisible by data.x=4"),
    ],
)
def test_bad_input(call: Callable[[], object], message: str) -> None:
    with pytest.raises(partir.PartirError, match=message):
        call()


def _linear_plan() -> partir.Plan:
    return partir.plan(nn.Linear(16, 16), {"data": 2, "x": 2}, torch.empty(8, 16))
