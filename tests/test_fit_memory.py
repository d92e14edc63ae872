"""A budget of bytes: it is kept, what it leads to has equal gradients, and an impossible one is an error with numbers."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

import partir
from examples.models.gpt import GPT, GPTConfig
from partir.cost.held import peak_bytes
from partir.errors import PartirError, PlanError
from partir.module import parallelized
from partir.quantities import spell_bytes
from tests.rank_memory import step_bytes

CASES = [((2, 2, 1), 0.85), ((1, 2, 2), 0.9)]
SLOW = [(mesh, part) for mesh in ((2, 2, 2), (4, 1, 1), (2, 1, 2, 1), (2, 3, 1)) for part in (0.95, 0.88)]
EVERY = [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@cache
def gpt(dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=48, block_size=16, num_layers=1, num_heads=6, hidden=24, dropout=dropout)).double()


def tokens() -> Tensor:
    return torch.randint(0, 48, (24, 16), generator=torch.Generator().manual_seed(1))


@cache
def plan_of(mesh: tuple[int, ...], memory: str | int) -> partir.Plan:
    return partir.plan(gpt(), mesh, (tokens(), tokens()), memory=memory)


@cache
def peak_of(mesh: tuple[int, ...], memory: str | int) -> int:
    return peak_bytes(plan_of(mesh, memory).program)


@pytest.mark.parametrize(("mesh", "part"), EVERY)
def test_the_predicted_peak_fits_and_is_what_a_rank_holds(mesh: tuple[int, ...], part: float) -> None:
    budget = int(peak_of(mesh, "fast") * part)
    plan = plan_of(mesh, budget)
    assert peak_of(mesh, budget) <= budget < peak_of(mesh, "fast")
    assert peak_of(mesh, budget) == plan.cost().peak_memory()
    assert plan.document.saved < plan_of(mesh, "fast").document.saved
    assert f"predicted peak {spell_bytes(peak_of(mesh, budget))}" in plan.notes[0]
    held = sum(plan.cost().value(amount) for kind, amount in plan.cost().memory.items() if kind != "optimizer")
    assert held == pytest.approx(step_bytes(plan.program), rel=0.1)


@pytest.mark.parametrize(("mesh", "part"), EVERY)
def test_loss_and_gradients_are_those_of_one_device(mesh: tuple[int, ...], part: float) -> None:
    twin = copy.deepcopy(gpt())
    model = partir.parallelize(copy.deepcopy(twin), mesh, memory=int(peak_of(mesh, "fast") * part))
    loss, expected = model(tokens(), labels=tokens()), twin(tokens(), labels=tokens())
    loss.backward()
    expected.backward()
    assert abs(float(loss.detach() - expected.detach())) < 1e-12
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert float((cast(Tensor, p.grad) - cast(Tensor, q.grad)).abs().max()) < 1e-12, name
    assert len(parallelized(model).programs()) == 1


@pytest.mark.slow
def test_dropout_made_again_draws_the_same() -> None:
    """The smallest budget that fits computes nearly everything again, masks too."""
    model, twin = copy.deepcopy(gpt(0.3)), copy.deepcopy(gpt(0.3))
    with pytest.raises(PartirError) as error:
        partir.plan(model, (2, 2, 1), (tokens(), tokens()), memory=1000)
    least = int(str(error.value).partition("(")[2].partition(" bytes")[0].replace(",", ""))
    budget = partir.parallelize(model, (2, 2, 1), memory=least)
    fast = partir.parallelize(twin, (2, 2, 1), memory="fast")
    for each in (budget, fast):
        each(tokens(), labels=tokens()).backward()
    for p, q in zip(budget.parameters(), fast.parameters(), strict=True):
        assert float((cast(Tensor, p.grad) - cast(Tensor, q.grad)).abs().max()) < 1e-12


def test_what_a_budget_is_and_is_not() -> None:
    assert plan_of((2, 2, 1), "1GB").document.saved == plan_of((2, 2, 1), "fast").document.saved
    message = r"no choice of what to keep fits into 1 kB on each rank: the closest needs .* bytes\) at its peak, parameters and AdamW's"
    with pytest.raises(PartirError, match=message):
        partir.plan(gpt(), (2, 2, 1), (tokens(), tokens()), memory="1kB")
    for wrong in ("much", "0", "-1GB", "4 parsec"):
        with pytest.raises(PartirError, match='is not understood; choose from \'low\', \'fast\', or a number of bytes, "40GB"'):
            partir.plan(gpt(), (2, 2, 1), (tokens(), tokens()), memory=wrong)


def test_a_model_whose_budget_does_not_fit_stays_usable() -> None:
    model = copy.deepcopy(gpt())
    with pytest.raises(PartirError, match="no choice of what to keep fits"):
        partir.parallelize(model, (2, 2, 1), (tokens(), tokens()), memory="1kB")
    assert type(model) is GPT
    model(tokens(), labels=tokens()).backward()


def test_a_saved_plan_keeps_its_budget(tmp_path: Path) -> None:
    mesh, path = (2, 2, 1), tmp_path / "plan.json"
    budget = int(peak_of(mesh, "fast") * 0.85)
    plan = plan_of(mesh, budget)
    plan.save(path)
    document = partir.Plan.load(path)
    assert document.settings.memory == str(budget) and document.notes[:3] == plan.notes[:3]
    again = partir.plan(gpt(), example_inputs=(tokens(), tokens()), plan=path)
    assert again.document.saved == plan.document.saved and not again.diff(plan)
    text = path.read_text().replace(json.dumps(str(budget)), '"fast"', 1)
    path.write_text(text)
    assert partir.plan(gpt(), example_inputs=(tokens(), tokens()), plan=path).document.saved == plan_of(mesh, "fast").document.saved
    path.write_text(text.replace('"memory": "fast"', '"memory": "a lot"'))
    with pytest.raises(PlanError, match='"a lot"; choose from "low", "fast", or a number of bytes, "40GB"'):
        partir.Plan.load(path)
