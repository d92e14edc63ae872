"""Evaluation: programs without a backward that keep nothing, between training calls, in inference mode too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import partir
from partir.module import parallelized
from tests.generation import model_to_generate, prompt
from tests.rank_memory import evaluation_bytes, step_bytes

MODES: list[Callable[[], AbstractContextManager[Any]]] = [torch.no_grad, torch.inference_mode]
MESH = (2, 2, 1)


class Dropped(nn.Module):
    """A batch norm and dropout: training and evaluation differ, and training writes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.dropout(self.norm(self.first(x)), 0.5, self.training))


def worst(model: nn.Module, twin: nn.Module, x: Tensor) -> float:
    return float((model(x) - twin(x)).detach().abs().max())


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_evaluation_first_then_training_and_back(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    """What an evaluation compiled, or made, serves training; neither changes the other."""
    torch.manual_seed(0)
    twin = Dropped().double()
    model = partir.parallelize(copy.deepcopy(twin), MESH)
    x = torch.randn(8, 16, dtype=torch.float64)
    for step in range(2):
        model.eval()
        twin.eval()
        with mode():
            y = model(x)
            assert not y.requires_grad and y.grad_fn is None
            assert worst(model, twin, x) < 1e-12
        model.train()
        twin.train()
        with partir.same_randomness(torch.initial_seed(), calls=parallelized(model).calls):
            expected = twin(x)
        found = model(x)
        assert float((found - expected).detach().abs().max()) < 1e-12, step
        found.square().mean().backward()
        expected.square().mean().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert float((cast(Tensor, p.grad) - cast(Tensor, q.grad)).abs().max()) < 1e-12
    evaluated, trained = parallelized(model).programs()
    assert evaluated.backward is None and trained.backward is not None
    assert len(evaluated.forward.graph.output_node().args[0]) == evaluated.num_outputs == 1  # pyright: ignore[reportArgumentType]


def test_what_inference_mode_made_can_be_trained_on() -> None:
    """On one device torch refuses to save such a tensor; here the call takes a copy."""
    twin = model_to_generate()
    model = copy.deepcopy(twin)
    with torch.inference_mode():
        model = partir.parallelize(model, MESH, prompt())
        ids = prompt()
    assert ids.is_inference()
    model(ids, labels=ids).backward()
    twin(prompt(), labels=prompt()).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert float((cast(Tensor, p.grad) - cast(Tensor, q.grad)).abs().max()) < 1e-12


class ReadsTheMode(nn.Module):
    """A forward that asks whether gradients are recorded."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if torch.is_grad_enabled() else x * 3


def test_inference_mode_is_traced_as_no_grad() -> None:
    model = partir.parallelize(ReadsTheMode(), (2, 1, 1))
    for mode in MODES:
        with mode():
            assert torch.equal(model(torch.ones(4)), torch.full((4,), 3.0))
    assert torch.equal(model(torch.ones(4)), torch.full((4,), 2.0))
    assert len(parallelized(model).programs()) == 2


def test_eval_alone_keeps_gradients() -> None:
    """As on one device: `eval()` turns dropout off, `no_grad` turns gradients off."""
    model = partir.parallelize(model_to_generate(), MESH)
    assert not model.training
    model(prompt(), labels=prompt()).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("mesh", [(2, 2, 1), (1, 2, 2)])
def test_the_memory_of_an_evaluation(mesh: tuple[int, ...]) -> None:
    """Nothing is saved, the peak is below that of training, and it is the predicted one."""
    with torch.device("meta"):
        model, ids = model_to_generate().float(), torch.zeros(8, 16, dtype=torch.long)
    trained = partir.plan(model, mesh, (ids, ids))
    with torch.inference_mode():
        plan = partir.plan(model, mesh, (ids, ids))
    assert plan.program.backward is None and plan.document.saved == 0 and trained.document.saved > 0
    held = {kind: plan.cost().value(amount) for kind, amount in plan.cost().memory.items()}
    assert held["saved activations"] == held["gradients"] == held["optimizer"] == 0
    measured = evaluation_bytes(plan.program)
    assert sum(held.values()) == pytest.approx(measured, rel=0.1)
    assert measured < 0.75 * step_bytes(trained.program)
