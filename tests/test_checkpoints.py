"""`torch.utils.checkpoint` inside a user's model keeps its meaning: what it encloses is computed again, gradients are equal."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import partir
from partir.module import parallelized
from partir.passes.node_facts import is_view
from tests.rank_memory import step_bytes

BATCH, HIDDEN = 32, 16


class Layer(nn.Module):
    """An MLP with dropout and a residual, checkpointed or not."""

    def __init__(self, how: bool | None, dropout: float) -> None:
        super().__init__()
        self.how, self.dropout = how, dropout
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def inside(self, x: Tensor) -> Tensor:
        h = nn.functional.dropout(torch.tanh(self.up(self.norm(x))), self.dropout, self.training)
        return x + self.down(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) if self.how is None else cast(Any, checkpoint)(self.inside, x, use_reentrant=self.how)


class Layers(nn.Module):
    """Three layers and a loss."""

    def __init__(self, how: bool | None, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(Layer(how, dropout) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def model_of(how: bool | None, dropout: float = 0.0) -> Layers:
    torch.manual_seed(0)
    return Layers(how, dropout).double()


def rows() -> Tensor:
    return torch.randn(BATCH, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> list[Tensor]:
    model(rows()).backward()
    return [cast(Tensor, p.grad) for p in model.parameters()]


@pytest.mark.parametrize("memory", ["low", "fast"])
@pytest.mark.parametrize("how", [True, False])
def test_what_it_encloses_is_not_kept(how: bool, memory: str) -> None:
    """Kept are the inputs of the layers, and what the first linear and the loss need; the peak falls, as predicted."""
    plain, plan = (partir.plan(model_of(each), (2, 2, 1), rows(), memory=memory) for each in (None, how))
    assert plan.document.saved < 0.45 * plain.document.saved
    results: Any = plan.program.forward.graph.output_node().args[0]
    assert not any("tanh" in node.name for node in results)
    again = [node.name for node in cast(Any, plan.program.backward).graph.nodes if node.meta.get("again") and not is_view(node)]
    assert sum("tanh" in name for name in again) == 3
    measured = step_bytes(plan.program)
    assert measured < step_bytes(plain.program)
    held = sum(plan.cost().value(amount) for kind, amount in plan.cost().memory.items() if kind != "optimizer")
    assert held == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("mesh", [(2, 2, 1), (1, 2, 2)])
def test_gradients_are_those_of_one_device(mesh: tuple[int, ...]) -> None:
    twin = model_of(False)
    model = partir.parallelize(copy.deepcopy(twin), mesh)
    for found, expected in zip(gradients(model), gradients(twin), strict=True):
        assert float((found - expected).abs().max()) < 1e-14


@pytest.mark.parametrize("rng", ["exact", "fast"])
def test_dropout_is_drawn_again_as_it_was(rng: str) -> None:
    """As without a checkpoint: the same numbers in the forward and, made again, in the backward."""
    plain = partir.parallelize(model_of(None, 0.4), (2, 2, 1), rng=rng)
    model = partir.parallelize(model_of(False, 0.4), (2, 2, 1), rng=rng)
    for found, expected in zip(gradients(model), gradients(plain), strict=True):
        assert float((found - expected).abs().max()) < 1e-14
    (program,) = parallelized(model).programs()
    results: Any = program.forward.graph.output_node().args[0]
    assert not any(node.meta["val"].dtype == torch.bool for node in results)


class Nested(nn.Module):
    """A checkpoint around two, one of which returns a view of what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def inner(self, x: Tensor) -> Tensor:
        return self.one(x).tanh().view(-1, HIDDEN)

    def outer(self, x: Tensor) -> Tensor:
        return self.other(cast(Any, checkpoint)(self.inner, x, use_reentrant=False)).tanh().mT

    def forward(self, x: Tensor) -> Tensor:
        return cast(Any, checkpoint)(self.outer, x * 2, use_reentrant=False).exp().sum()


def test_a_checkpoint_in_another() -> None:
    torch.manual_seed(0)
    twin = Nested().double()
    model = partir.parallelize(copy.deepcopy(twin), (2, 2, 1))
    for found, expected in zip(gradients(model), gradients(twin), strict=True):
        assert float((found - expected).abs().max()) < 1e-12
    plan = partir.plan(twin, (2, 2, 1), rows())
    results: Any = plan.program.forward.graph.output_node().args[0]
    assert sum("tanh" in node.name for node in results) == 1  # what leaves the outer one


class Attention(nn.Module):
    """Causal attention and a top-k, both ops of several results, in a checkpoint of a whole block."""

    def __init__(self, how: bool | None) -> None:
        super().__init__()
        self.how, self.qkv, self.out = how, nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def inside(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(*x.shape[:2], 4, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.out(mixed) * mixed.topk(2, dim=-1).values.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.inside(x) if self.how is None else cast(Any, checkpoint)(self.inside, x, use_reentrant=self.how)
        return x.square().mean()


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 1)])
@pytest.mark.parametrize("how", [True, False])
def test_attention_inside_is_made_again(how: bool, mesh: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    eager, x = Attention(None).double(), torch.randn(8, 6, HIDDEN, dtype=torch.float64, requires_grad=True)
    model = Attention(how).double()
    model.load_state_dict(eager.state_dict())
    model = partir.parallelize(model, mesh)
    loss, expected = model(x), eager(x)
    assert torch.allclose(loss, expected, rtol=1e-12)
    inputs = [torch.autograd.grad(value, [x, *of.parameters()]) for value, of in ((loss, model), (expected, eager))]
    for got, want in zip(*inputs, strict=True):
        assert torch.allclose(got, want, atol=1e-12)
    program = parallelized(model).programs()[0]
    targets = [str(node.target) for node in cast(Any, program.backward).graph.nodes if "scaled_dot_product" in str(node.target)]
    assert len([target for target in targets if "backward" not in target]) == 2, "each block's attention is made again in the backward"


def test_torch_is_as_it_was_after_a_trace() -> None:
    before = torch.utils.checkpoint.CheckpointFunction, torch.utils.checkpoint._checkpoint_without_reentrant_generator  # pyright: ignore
    partir.plan(model_of(True), (2, 1, 1), rows())
    assert before == (torch.utils.checkpoint.CheckpointFunction, torch.utils.checkpoint._checkpoint_without_reentrant_generator)  # pyright: ignore
