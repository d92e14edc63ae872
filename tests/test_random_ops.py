"""Ops that draw: on every mesh what eager calls draw under `same_randomness`, in the forward and in the backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import partir
from examples.models.gpt import GPT, GPTConfig
from partir.errors import PartirError, RuleError, TraceError
from partir.module import parallelized

SHAPE = (4, 8, 6, 24)
aten = torch.ops.aten


def unread(x: Tensor) -> Tensor:
    torch.rand(3)
    F.dropout(x, 0.3)
    return F.dropout(x, 0.3)


def put_out(x: Tensor) -> Tensor:
    return F.dropout(x, 1.0) + F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False) + F.dropout(x, 0.25)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "dropouts that draw nothing": put_out,
    "results that nobody reads": unread,
    "native_dropout": lambda x: aten.native_dropout(x, 0.3, True)[0],
    "native_dropout's mask": lambda x: x * aten.native_dropout(x, 0.3, True)[1],
    "feature dropout": lambda x: F.dropout2d(x, 0.3),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "feature alpha dropout": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3, is_causal=True),
    "attention, grouped": lambda x: F.scaled_dot_product_attention(x, x[:, :4], x[:, :4], dropout_p=0.3, enable_gqa=True),
    "rand": lambda x: x * torch.rand(SHAPE, dtype=x.dtype),
    "randn": lambda x: x * torch.randn(SHAPE),
    "rand_like": lambda x: x * torch.rand_like(x),
    "rand_like in half": lambda x: x * torch.rand_like(x, dtype=torch.bfloat16),
    "randn_like": lambda x: x * torch.randn_like(x),
    "randint": lambda x: x * torch.randint(5, SHAPE) + torch.randint(-3, 5, SHAPE),
    "randint_like": lambda x: x * torch.randint_like(x, 5) + torch.randint_like(x, -3, 5),
    "random_": lambda x: x * torch.empty_like(x).random_(7) + torch.empty_like(x).random_(-3, 5),
    "uniform_": lambda x: x * torch.empty_like(x).uniform_(-1, 3),
    "normal_": lambda x: x * torch.empty_like(x).normal_(1, std=3),
    "normal": lambda x: x * torch.normal(0.5, 2.0, SHAPE) + torch.normal(x, 2.0) + torch.normal(1.0, x.exp()) + torch.normal(x, x.exp()),
    "exponential_": lambda x: x * torch.empty_like(x).exponential_(lambd=3),
    "gumbel softmax": lambda x: F.gumbel_softmax(x),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()),
    "bernoulli of one p": lambda x: x * torch.bernoulli(x.detach(), p=0.3),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_() + x * torch.empty_like(x).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda x: x * torch.empty_like(x).bernoulli_(x.sigmoid()),
}


class Draws(nn.Module):
    """Every draw of a row of them, on one weight."""

    def __init__(self, *draws: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draws = draws
        self.weight = nn.Parameter(torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(draw(x * self.weight) for draw in self.draws)


def step(model: nn.Module, weights: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs and the gradient of the second call."""
    x = torch.ones(SHAPE, dtype=torch.float64)
    model(x)
    outputs = model(x)
    model.zero_grad()
    torch.stack([(output * weights).sum() for output in outputs]).sum().backward()
    return *(output.detach() for output in outputs), gradient_of(model)


def gradient_of(model: nn.Module) -> Tensor:
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    return parameter.grad


def weights() -> Tensor:
    return torch.linspace(0.5, 1.5, 4 * 8 * 6 * 24, dtype=torch.float64).view(SHAPE)


@pytest.fixture(scope="module")
def eager() -> tuple[Tensor, ...]:
    with partir.same_randomness(7):
        return step(Draws(*DRAWS.values()), weights())


def assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for name, mine, theirs in zip([*DRAWS, "the gradient"], found, expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12), name


@pytest.mark.parametrize(("mesh", "memory"), [((2, 2, 2), "low"), pytest.param((1, 4, 1), "fast", marks=pytest.mark.slow)])
def test_every_op_draws_as_eager(eager: tuple[Tensor, ...], mesh: tuple[int, ...], memory: str) -> None:
    torch.manual_seed(7)
    assert_close(step(partir.parallelize(Draws(*DRAWS.values()), mesh, memory=memory), weights()), eager)


def test_another_seed_or_call_draws_other_numbers(eager: tuple[Tensor, ...]) -> None:
    with partir.same_randomness(8):
        other = step(Draws(*DRAWS.values()), weights())
    with partir.same_randomness(7, calls=1):
        later = step(Draws(*DRAWS.values()), weights())
    for name, one, two, three in zip(DRAWS, eager, other, later):
        assert not torch.equal(one, two) and not torch.equal(one, three), name


def test_fast_is_statistically_the_same(eager: tuple[Tensor, ...]) -> None:
    """Sums over 4608 elements of whatever was drawn, within 6 of their standard deviations (feature masks have 32 elements)."""
    torch.manual_seed(7)
    found = step(partir.parallelize(Draws(*DRAWS.values()), (2, 2, 2), rng="fast"), weights())
    for name, mine, theirs in zip(DRAWS, found, eager):
        assert not torch.equal(mine, theirs), name
        count = 32 if "feature" in name else mine.numel()
        deviation = float(torch.stack([mine, theirs]).var()) ** 0.5
        assert abs(float(mine.mean() - theirs.mean())) < 6 * deviation * (2 / count) ** 0.5, name


@pytest.mark.parametrize("memory", ["low", "fast"])
def test_fast_draws_the_same_in_the_backward(memory: str) -> None:
    """The gradient of a sum of dropouts of w is what the forward multiplied w with."""
    model = partir.parallelize(Draws(DRAWS["dropout"]), (2, 2, 2), rng="fast", memory=memory)
    for _ in range(2):
        model.zero_grad()
        (out,) = model(torch.ones(SHAPE, dtype=torch.float64))
        out.sum().backward()
        assert torch.equal(gradient_of(model) * model.weight.detach(), out.detach())


def test_fast_differs_by_call_seed_and_site() -> None:
    model = partir.parallelize(Draws(DRAWS["dropout"], DRAWS["dropout"]), (2, 2, 2), rng="fast")
    x = torch.ones(SHAPE, dtype=torch.float64)
    torch.manual_seed(1)
    first = [*model(x), *model(x)]
    torch.manual_seed(2)
    parallelized(model).calls = 0
    kept = torch.stack([(out != 0).double().flatten() for out in [*first, *model(x)]])
    assert float((torch.corrcoef(kept) - torch.eye(6)).abs().max()) < 5 / kept.shape[1] ** 0.5
    torch.manual_seed(1)
    parallelized(model).calls = 0
    assert all(map(torch.equal, model(x), first))


@pytest.mark.parametrize(
    ("draw", "op"),
    [
        (lambda x: x[:, torch.randperm(8)], "randperm"),
        (lambda x: torch.multinomial(x.flatten(0, 2).softmax(-1), 2) + x.sum(), "multinomial"),
        (lambda x: x * torch.poisson(x.detach().exp()), "poisson"),
        (lambda x: x * torch.empty_like(x).random_(), "random"),
        (lambda x: x * torch.empty_like(x).cauchy_(), "cauchy"),
    ],
)
def test_an_op_that_cannot_be_drawn_by_element(draw: Callable[[Tensor], Tensor], op: str) -> None:
    law = rf"aten\.{op}\.default draws random numbers, and partir cannot draw them element by element.*use one of: bernoulli, dropout"
    x = torch.ones(SHAPE, dtype=torch.float64)
    with pytest.raises(RuleError, match=rf"test_random_ops\.py:\d+: {law}"):
        partir.parallelize(Draws(draw), (1, 1, 1), x)
    with partir.same_randomness(0), pytest.raises(PartirError, match=law):
        Draws(draw)(x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x * torch.randint(2**60, SHAPE), r"0 < high - low <= 2\*\*53, got low=0, high=1152921504606846976"),
        (lambda x: x * torch.bernoulli(x, 1.5), r"between 0 and 1, got 1.5|p to be in \[0, 1\], but got p=1.5"),
    ],
)
def test_arguments_that_cannot_be_drawn(call: Callable[[Tensor], Tensor], message: str) -> None:
    x = torch.ones(SHAPE, dtype=torch.float64)
    with pytest.raises((PartirError, ValueError, RuntimeError), match=message):
        partir.parallelize(Draws(call), (1, 1, 1), x)
    with partir.same_randomness(0), pytest.raises((PartirError, ValueError, RuntimeError), match=message):
        Draws(call)(x)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda x, g: x * torch.rand(8, 8, generator=g), "`rand` draws from a torch.Generator"),
        (lambda x, g: x * torch.empty(8, 8).normal_(generator=g), "`normal_` draws from a torch.Generator"),
        (lambda x, g: x * torch.empty(8, 8).random_(0, 4, generator=g), "`random_` draws from a torch.Generator"),
        (lambda x, g: x * torch.manual_seed(3).initial_seed(), "torch.manual_seed inside forward"),
    ],
)
def test_streams_of_numbers_are_refused_with_the_users_line(draw: Callable[[Tensor, torch.Generator], Tensor], message: str) -> None:
    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(1)

        def forward(self, x: Tensor) -> Tensor:
            return draw(x, self.generator)

    before = torch.get_rng_state()
    with pytest.raises(TraceError, match=r"test_random_ops\.py:\d+: .*" + message):
        partir.parallelize(Stream(), (2, 1, 1), torch.ones(8, 8))
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_drawn_outside_of_modules_or_from_a_generator_stays() -> None:
    model, x = Draws(lambda x: x * torch.rand(SHAPE, generator=torch.Generator().manual_seed(3))), torch.ones(SHAPE)
    torch.manual_seed(4)
    expected = torch.rand(3), torch.randperm(5), model(x)[0]
    torch.manual_seed(4)
    with partir.same_randomness(0):
        found = torch.rand(3), torch.randperm(5), model(x)[0]
    assert all(map(torch.equal, found, expected))


def test_each_module_counts_its_own_calls_also_after_a_failure() -> None:
    one, other, x = nn.Dropout(0.5), nn.Dropout(0.5), torch.ones(50)
    with partir.same_randomness(3):
        with pytest.raises(TypeError):
            one(x, x)
        second, first = one(x), other(x)
    with partir.same_randomness(3):
        assert torch.equal(one(x), first) and torch.equal(one(x), second)


def test_activation_checkpointing_is_refused() -> None:
    class Checkpointed(Draws):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return (checkpoint(lambda y: F.dropout(y * y, 0.5), x * self.weight, use_reentrant=False),)

    with partir.same_randomness(0), pytest.raises(PartirError, match="draws while the backward runs: activation checkpointing"):
        step(Checkpointed(), weights())


def test_a_module_may_be_compiled_inside() -> None:
    model, x = Draws(DRAWS["dropout"]), torch.ones(SHAPE, dtype=torch.float64)
    torch.manual_seed(5)
    with partir.same_randomness(5):
        (expected,) = model(x)
        (found,) = partir.parallelize(model, (1, 2, 1))(x)
    assert torch.equal(found, expected)


MESHES = [(1, 1, 1), (2, 2, 2), (1, 4, 1), (3, 1, 2), (2, 1, 2, 1)]


def train(model: nn.Module, steps: int, optimizer: Any = torch.optim.AdamW) -> list[float]:
    """Return the losses of training steps on random text."""
    updates = optimizer(model.parameters(), lr=1e-3)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        ids = torch.randint(0, 48, (12, 8), generator=generator)
        loss = model(ids, labels=ids)
        updates.zero_grad()
        loss.backward()
        updates.step()
        losses.append(loss.item())
    return losses


def small_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=48, block_size=8, num_layers=1, num_heads=4, hidden=48, dropout=0.2)).double()


def compare_training(meshes: list[tuple[int, ...]], steps: int, **options: Any) -> None:
    model = small_gpt()
    with partir.same_randomness(11):
        expected = train(copy.deepcopy(model), steps)
    assert len(set(expected)) == steps
    for mesh in meshes:
        torch.manual_seed(11)
        found = train(partir.parallelize(copy.deepcopy(model), mesh, **options), steps)
        assert found == pytest.approx(expected, rel=1e-10, abs=0), mesh


def test_a_gpt_with_dropout_trains_as_on_one_device() -> None:
    compare_training([(2, 2, 2)], 5)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # six trainings
def test_a_gpt_with_dropout_trains_as_on_one_device_for_50_steps() -> None:
    compare_training(MESHES, 50)


def test_a_gpt_trains_with_fast_numbers() -> None:
    """The loss after a few steps is that of other numbers within what dropout makes of it."""
    model = small_gpt()
    torch.manual_seed(11)
    fast = train(partir.parallelize(copy.deepcopy(model), (1, 2, 2), rng="fast"), 3)
    with partir.same_randomness(11):
        exact = train(model, 3)
    assert exact != fast and fast == pytest.approx(exact, rel=0.1)
