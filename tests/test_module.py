"""The parallelized module in one process: in place, names kept, compiled once a signature, errors."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from partir.api import full_state_dict, parallelize
from partir.errors import MeshError, PartirError
from partir.module import ParallelModule, parallelized
from partir.parallelized import Parallelized
from tests.module_checks import TwoLinears

MESH = (2, 2, 2)


class PairLoss(nn.Module):
    """Returns a dict and tells apart two inputs that may be one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.table(ids)
        logits = hidden @ self.table.weight.t()
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def num_programs(model: nn.Module) -> int:
    return len(parallelized(model)._programs)  # pyright: ignore[reportPrivateUsage]


def test_in_place_and_returned() -> None:
    model = TwoLinears()
    keys, names, parameters = list(model.state_dict()), [n for n, _ in model.named_parameters()], list(model.parameters())
    result = parallelize(model, MESH)
    assert result is model and isinstance(model, TwoLinears) and isinstance(model, ParallelModule)
    assert type(model).__name__ == "PartirTwoLinears"
    assert inspect.signature(model.forward) == inspect.signature(TwoLinears().forward)
    x = torch.randn(16, 16)
    model(x).sum().backward()
    assert list(model.state_dict()) == keys and [n for n, _ in model.named_parameters()] == names
    assert all(p is q and p.grad is not None for p, q in zip(model.parameters(), parameters, strict=True))


def test_equals_eager_and_trains() -> None:
    torch.manual_seed(0)
    twin = TwoLinears().double()
    model = parallelize(copy.deepcopy(twin), MESH)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    x = torch.randn(16, 16, dtype=torch.float64)
    for _ in range(3):
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_one_program_a_signature() -> None:
    model = parallelize(TwoLinears(), MESH, torch.randn(16, 16))
    assert num_programs(model) == 1
    model(torch.randn(16, 16))
    assert num_programs(model) == 1
    model(torch.randn(16, 16), 2.0)
    assert num_programs(model) == 2
    with torch.no_grad():
        first = model(torch.ones(16, 16), 2.0)
    assert num_programs(model) == 3 and not first.requires_grad
    model.eval()
    torch.testing.assert_close(model(torch.ones(16, 16), 2.0), first)
    assert num_programs(model) == 4
    model(torch.randn(8, 16))
    model.first.weight.requires_grad_(False)
    model(torch.randn(8, 16)).sum().backward()
    assert num_programs(model) == 6
    assert model.first.weight.grad is None and model.second.weight.grad is not None


def test_one_tensor_given_twice_is_two_inputs() -> None:
    twin = PairLoss()
    model = parallelize(copy.deepcopy(twin), MESH)
    ids, labels = torch.arange(16).view(8, 2), torch.arange(16).flip(0).view(8, 2)
    for given in (ids, labels):
        expected = twin(ids, labels=given)
        result = model(ids, labels=given)
        torch.testing.assert_close(result["loss"], expected["loss"])
        torch.testing.assert_close(result["logits"], expected["logits"])
    assert num_programs(model) == 1


def test_deepcopy_and_pickle() -> None:
    model = parallelize(TwoLinears(), MESH)
    x = torch.randn(16, 16)
    expected = model(x)
    twin = copy.deepcopy(model)
    assert type(twin) is type(model) and torch.equal(twin(x), expected) and num_programs(twin) == 1
    with torch.no_grad():
        twin.first.weight.zero_()
    assert torch.equal(model(x), expected) and not torch.equal(twin(x), expected)
    loaded = cast(nn.Module, pickle.loads(pickle.dumps(model)))
    assert type(loaded) is type(model) and num_programs(loaded) == 0 and torch.equal(loaded(x), expected)


def test_state_dicts_load_both_ways() -> None:
    twin = TwoLinears()
    model = parallelize(TwoLinears(), MESH)
    model.load_state_dict(twin.state_dict())
    x = torch.randn(16, 16)
    torch.testing.assert_close(model(x), twin(x))
    other = TwoLinears()
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(p, full_state_dict(model)[name]) for name, p in other.state_dict().items())


def test_hooks_of_the_module_run_around_the_program() -> None:
    model = parallelize(TwoLinears(), MESH)
    seen: list[tuple[int, ...]] = []
    model.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    model(torch.randn(16, 16))
    assert seen == [(16, 16)]


def test_a_failed_compilation_leaves_the_module_usable() -> None:
    model = parallelize(TwoLinears(), MESH)
    with pytest.raises(PartirError):
        model(torch.randn(16, 17))
    assert isinstance(model, ParallelModule)
    assert model(torch.randn(16, 16)).shape == (16, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": "tiny"}, "memory='tiny' is not understood; choose from 'low', 'fast', or a number of bytes, \"40GB\"."),
        ({"outputs": "none"}, "outputs='none' is not understood; choose from 'auto', 'whole', 'sharded'."),
        ({"check_inputs": "often"}, "check_inputs='often' is not understood"),
    ],
)
def test_options_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PartirError, match=message):
        parallelize(TwoLinears(), MESH, **change)


def test_mistakes() -> None:
    model = parallelize(TwoLinears(), MESH)
    with pytest.raises(PartirError, match=r"PartirTwoLinears is already parallelized over \(x=2, y=2, z=2\)"):
        parallelize(model, MESH)
    with pytest.raises(MeshError, match="sizes are 1 or more"):
        parallelize(TwoLinears(), (2, 0, 2))
    patched = TwoLinears()
    patched.forward = lambda x: x  # pyright: ignore
    with pytest.raises(PartirError, match="has a forward set on the instance"):
        parallelize(patched, MESH)
    with pytest.raises(PartirError, match="Linear is not parallelized"):
        parallelized(nn.Linear(1, 1))


def test_the_call_counter_counts_calls() -> None:
    model = parallelize(TwoLinears(), MESH, torch.randn(16, 16))
    state: Parallelized = parallelized(model)
    assert state.calls == 0
    model(torch.randn(16, 16))
    assert state.calls == 1


def test_dropout_differs_by_call_and_repeats_with_the_counter() -> None:
    model = parallelize(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)), MESH)
    x = torch.ones(16, 16)
    torch.manual_seed(5)
    first, second = model(x), model(x)
    assert not torch.equal(first, second)
    parallelized(model).calls = 0
    assert torch.equal(model(x), first)
    torch.manual_seed(6)
    parallelized(model).calls = 0
    assert not torch.equal(model(x), first)


def test_buffers_are_written_back() -> None:
    twin = nn.BatchNorm1d(8)
    model = parallelize(copy.deepcopy(twin), MESH)
    x = torch.randn(16, 8)
    torch.testing.assert_close(model(x), twin(x))
    torch.testing.assert_close(model.running_mean, twin.running_mean)
    assert int(cast(Tensor, model.num_batches_tracked)) == 1


class TwoHeads(nn.Module):
    """Two linears; the loss of a caller may read one result only."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.ignored = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.read(x).sum(), self.ignored(x)


def test_what_feeds_an_ignored_output_keeps_no_gradient() -> None:
    """As on one device: an optimizer would decay a parameter whose gradient is zeros instead of None."""
    model = parallelize(TwoHeads(), (2, 2, 1))
    loss, _ = model(torch.randn(8, 8))
    loss.backward()
    assert model.read.weight.grad is not None and model.ignored.weight.grad is None
    loss, other = model(torch.randn(8, 8))
    (loss + other.sum()).backward()
    assert model.ignored.weight.grad is not None


def test_a_second_derivative_is_refused() -> None:
    model = parallelize(TwoHeads(), (2, 1, 1))
    loss, _ = model(torch.randn(8, 8))
    with pytest.raises(PartirError, match="no second derivative"):
        torch.autograd.grad(loss, [model.read.weight], create_graph=True)


@pytest.mark.parametrize("timeout", ["5", 0, -1.0, True])
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    with pytest.raises(PartirError, match="is no number of seconds above 0"):
        parallelize(TwoLinears(), MESH, timeout=timeout)


@dataclass
class Settings:
    scale: float = 1.0


class Reads(nn.Module):
    """Reads attributes of every kind in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.settings = nn.Linear(4, 4), Settings()
        self.factors, self.named, self.more, self.act = [1.0, 2.0], {"k": 1.0}, None, torch.tanh
        self.table = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.linear(x)) * self.settings.scale * self.factors[0] * self.named["k"] * self.table
        return y if self.more is None else y + self.more[0]


@pytest.mark.filterwarnings("ignore:8 programs were compiled")
def test_a_changed_attribute_makes_another_program() -> None:
    model, x = parallelize(Reads().double(), (2, 1, 1)), torch.randn(2, 4, dtype=torch.float64)
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: setattr(model.settings, "scale", 2.0),
        lambda: model.factors.__setitem__(0, 3.0),
        lambda: model.named.update(k=5.0),
        lambda: setattr(model, "more", (1.0,)),
        lambda: setattr(model, "act", lambda t: t.sigmoid()),
        lambda: setattr(model, "act", lambda t: t.sin()),
        lambda: setattr(model, "table", torch.arange(4.0, dtype=torch.float64)),
        lambda: model.linear.register_forward_hook(lambda module, args, result: result * 0 + 1),
    ]
    for number, change in enumerate(changes, start=1):
        change()
        for _ in range(2):
            assert torch.allclose(model(x), Reads.forward(model, x), atol=1e-14), number
        assert len(parallelized(model).programs()) == number


def test_attributes_that_say_nothing_make_no_other_program() -> None:
    x, model = torch.randn(2, 4), cast(Any, parallelize(Reads(), (2, 1, 1)))
    model.tags, model.itself = {"b", "a"}, [model]
    model(x)
    model.settings, model.factors, model.named, model.tags = Settings(), [1.0, 2.0], {"k": 1.0}, {"a", "b"}
    model(x)
    assert len(parallelized(model).programs()) == 1


def test_an_attribute_that_changes_at_every_call_is_named() -> None:
    x, model = torch.randn(2, 4), cast(Any, parallelize(nn.Linear(4, 4), (2, 1, 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model.count in range(8):
            model(x)
    with pytest.warns(UserWarning, match=r"8 programs were compiled for the same inputs, .*: count 8\. What forward does not read"):
        model.count = 8
        model(x)
