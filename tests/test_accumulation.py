"""Accumulation: k micro-batches are one big batch, and in a block weights are gathered and gradients reduced once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partir
from examples.models.gpt import GPT, GPTConfig
from tests.kinds import Kinds, few_ids

COUNT = 4


def make(dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=48, block_size=8, num_layers=1, num_heads=4, hidden=32, dropout=dropout)).double()


def ids() -> Tensor:
    return torch.randint(0, 48, (16, 8), generator=torch.Generator().manual_seed(1))


def accumulated(model: nn.Module, block: AbstractContextManager[None], **named: Any) -> list[Tensor]:
    """Return the losses of the micro-batches, gradients of their mean being added up."""
    losses: list[Tensor] = []
    with block:
        for part in partir.micro_batches(ids(), COUNT):
            losses.append(model(part, labels=part, **named))
            (losses[-1] / COUNT).backward()
    return [loss.detach() for loss in losses]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def distance(actual: list[Tensor], expected: list[Tensor]) -> float:
    largest = max(float(e.abs().max()) for e in expected)
    return max(float((a - e).abs().max()) / largest for a, e in zip(actual, expected, strict=True))


CASES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 2, 2), {"vectors": "diagonal"}),
    ((2, 2, 1, 2), {"memory": "fast"}),
    ((1, 1, 1), {}),
]


@pytest.mark.parametrize(("mesh", "options"), CASES)
def test_micro_batches_then_a_step_equal_one_big_batch(mesh: tuple[int, ...], options: dict[str, Any]) -> None:
    """With the block and without, as one device with the whole batch; bytes are what the plan says and fewer than without."""
    model, twin = make(), make()
    part = ids()[: 16 // COUNT]
    plan = partir.plan(model, mesh, part, {"labels": part}, **options)
    twin(ids(), labels=ids()).backward()
    partir.parallelize(model, mesh, **options)
    losses: list[list[Tensor]] = []
    received: list[int] = []
    for block in (nullcontext(), partir.accumulate(model)):
        with partir.record_communication() as log:
            losses.append(accumulated(model, block))
        received.append(max(log.bytes(rank=rank) for rank in range(plan.mesh.size)))
        assert distance(gradients(model), gradients(twin)) < 1e-12
        model.zero_grad()
    assert max(float((a - b).abs()) for a, b in zip(*losses)) < 1e-12
    if options.get("vectors") != "diagonal":  # broadcasts count for the rank that receives most
        assert received == [COUNT * plan.bytes(), plan.accumulation.bytes(COUNT)]
    assert received[1] < received[0] or plan.mesh.size == 1
    assert not [c for c in plan.accumulation.each if "weight" in c.reason]


def test_what_is_held_is_stated() -> None:
    part = ids()[:4]
    plain = partir.plan(make(), (2, 2, 2), part, {"labels": part}).accumulation
    narrow = partir.plan(make().float(), (2, 2, 2), part, {"labels": part}, compute_dtype=torch.bfloat16).accumulation
    elements = sum(p.numel() if p.dim() == 1 else p.numel() // 4 for p in make().parameters())
    assert plain.weight_bytes == plain.gradient_bytes and plain.held_bytes == 2 * plain.weight_bytes
    assert 0 < plain.weight_bytes <= 8 * elements
    assert narrow.weight_bytes * 4 == plain.weight_bytes and narrow.gradient_bytes * 2 == plain.gradient_bytes
    assert "bytes before" in str(plain)


def test_random_numbers_count_calls() -> None:
    """Each micro-batch draws its own numbers: those of the same calls without the block, and of one device."""
    models = [make(0.3) for _ in range(3)]
    for model in models[:2]:
        partir.parallelize(model, (2, 2, 1))
    torch.manual_seed(7)
    losses = [accumulated(models[0], nullcontext()), accumulated(models[1], partir.accumulate(models[1]))]
    for call, part in enumerate(partir.micro_batches(ids(), COUNT)):
        with partir.same_randomness(7, call):
            loss = models[2](part, labels=part)
        (loss / COUNT).backward()
        assert abs(float(loss.detach() - losses[0][call])) < 1e-12 and abs(float(loss.detach() - losses[1][call])) < 1e-12
    assert distance(gradients(models[1]), gradients(models[2])) < 1e-12 > distance(gradients(models[0]), gradients(models[2]))
    assert len({round(float(loss), 9) for loss in losses[0]}) == COUNT


def test_every_kind_of_parameter_and_input() -> None:
    """Tied, fused, odd, frozen and unused parameters, gradients already there, hooks: as autograd does it."""
    torch.manual_seed(0)
    model = Kinds().double()
    twin = copy.deepcopy(model)
    partir.parallelize(model, (2, 4, 1))
    fired: list[str] = []
    model.qkv.weight.register_post_accumulate_grad_hook(lambda p: fired.append("qkv"))
    for each in (model, twin):
        each.norm.weight.grad = torch.ones(16, dtype=torch.float64)
    with partir.accumulate(model):
        for part in (few_ids(), few_ids() + 0, few_ids()[:4]):  # another shape is another program
            model(part).backward()
        assert model.qkv.weight.grad is None
    for part in (few_ids(), few_ids(), few_ids()[:4]):
        twin(part).backward()
    assert fired == ["qkv"] * 2  # once for each program
    assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in twin.parameters()]
    assert distance(gradients(model), gradients(twin)) < 1e-12


def test_inputs_get_their_gradients_at_once() -> None:
    model, x = nn.Linear(8, 8).double(), torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    partir.parallelize(model, (2, 2, 2))
    with partir.accumulate(model):
        model(x).square().sum().backward()
        assert x.grad is not None and distance([x.grad], [expected[0]]) < 1e-12
    assert distance(gradients(model), list(expected[1:])) < 1e-12


def test_an_output_that_the_loss_does_not_read() -> None:
    """It gives no gradient, and what only it depends on gets none."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    model, twin, x = Two().double(), Two().double(), torch.randn(8, 8, dtype=torch.float64)
    partir.parallelize(model, (2, 2, 1))
    with partir.accumulate(model):
        model(x)[1].square().sum().backward()
    twin(x)[1].square().sum().backward()
    assert model.a.weight.grad is None and distance(gradients(model), gradients(twin)) < 1e-12


def test_calls_without_gradient_run_as_ever() -> None:
    model = partir.parallelize(nn.Linear(8, 8), (2, 1, 1))
    with partir.accumulate(model), torch.no_grad():
        model(torch.ones(8, 8))
    assert model.weight.grad is None


def _nested(model: nn.Module) -> None:
    with partir.accumulate(model), partir.accumulate(model):
        pass


def _changed(model: nn.Module) -> None:
    with partir.accumulate(model):
        model(torch.ones(8, 8)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).param_groups[0]["params"][0].data.add_(1)
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        model(torch.ones(8, 8))


def _late(model: nn.Module) -> None:
    with partir.accumulate(model):
        loss = model(torch.ones(8, 8)).sum()
    loss.backward()


def _fails(model: nn.Module) -> None:
    with partir.accumulate(model):
        model(torch.ones(8, 8)).sum().backward()
        raise partir.PartirError("stop")


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (_nested, "Linear is accumulating already"),
        (_changed, "weight was changed while its gathered value is kept. Step the optimizer after the block"),
        (_late, "came after its block: gradients are reduced at its end"),
        (_fails, "stop"),
    ],
)
def test_misuse_is_an_error_and_the_model_stays_usable(misuse: Callable[[nn.Module], None], message: str) -> None:
    model = partir.parallelize(nn.Linear(8, 8), (2, 2, 1))
    with pytest.raises(partir.PartirError, match=message):
        misuse(model)
    assert model.weight.grad is None
    with partir.accumulate(model):
        model(torch.ones(8, 8)).sum().backward()
    assert model.weight.grad is not None and float(model.weight.grad.sum()) == 8 * 64
