"""The product: on every mesh the loss, outputs, gradients and trained parameters of one device, in float64."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import partir
from examples.models.bert import BERT, BERTConfig
from examples.models.gpt import GPT, GPTConfig
from examples.models.llama import Llama, LlamaConfig
from partir import equivalence
from partir.equivalence import relative_difference
from partir.errors import VerifyError
from partir.mesh import Mesh
from partir.passes import pipeline
from partir.passes.trace import Traced, trace

BATCH, SEQUENCE, VOCABULARY, HIDDEN, HEADS = 48, 6, 48, 96, 48
MESHES = [
    (1, 1, 1),
    (8, 1, 1),
    (1, 8, 1),
    (1, 1, 8),
    (2, 2, 2),
    (4, 2, 1),
    (2, 3, 2),
    (1, 4, 3),
    (1, 2, 4),
    (3, 2, 2),
    (2, 1, 4),
    (2, 2, 1, 2),
]
SOME = ((1, 1, 8), (2, 2, 2), (2, 3, 2), (1, 4, 3), (2, 2, 1, 2))
EVERY = [
    sizes
    for ranks in (1, 2, 4, 6, 8, 12, 16)
    for sizes in itertools.product(range(1, ranks + 1), repeat=3)
    if sizes[0] * sizes[1] * sizes[2] == ranks
]


def gpt() -> tuple[nn.Module, dict[str, Tensor]]:
    model = GPT(GPTConfig(vocab_size=VOCABULARY, block_size=48, num_layers=2, num_heads=HEADS, hidden=HIDDEN, dropout=0.0))
    return model, {"ids": tokens(), "labels": tokens()}


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    model = BERT(BERTConfig(vocab_size=VOCABULARY, block_size=48, num_layers=1, num_heads=HEADS, hidden=HIDDEN, dropout=0.0))
    masked = torch.rand(BATCH, SEQUENCE, generator=torch.Generator().manual_seed(1)) < 0.4
    mask = torch.arange(SEQUENCE) < torch.arange(1, BATCH + 1).remainder(SEQUENCE).add(1).unsqueeze(1)
    kinds = (torch.arange(SEQUENCE) >= 3).long().expand(BATCH, SEQUENCE).contiguous()
    return model, {"ids": tokens(), "attention_mask": mask.long(), "token_types": kinds, "labels": tokens().masked_fill(~masked, -100)}


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    config = LlamaConfig(
        vocab_size=VOCABULARY, block_size=48, num_layers=1, num_heads=HEADS, num_kv_heads=24, hidden=2 * HIDDEN, mlp_hidden=HIDDEN
    )
    return Llama(config), {"ids": tokens(), "labels": tokens()}


def hf_gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=48, n_embd=HIDDEN, n_layer=1, n_head=HEADS, bos_token_id=0, eos_token_id=0,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    ids = tokens()
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, dict[str, Tensor]]], float, float]] = {
    # name: (make, tolerance of one step, tolerance after five); Hugging Face's loss casts logits to float32
    "gpt": (gpt, 1e-10, 1e-9),
    "bert": (bert, 1e-10, 1e-9),
    "llama": (llama, 1e-10, 1e-9),
    "hf_gpt2": (hf_gpt2, 1e-5, 1e-5),
}


def loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


def train(model: nn.Module, inputs: dict[str, Tensor], steps: int) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return the first loss, the first gradients and the parameters after AdamW steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    first: tuple[Tensor, dict[str, Tensor]] | None = None
    for _ in range(steps):
        loss = loss_of(model(**inputs))
        optimizer.zero_grad()
        loss.backward()
        first = first or (loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    assert first is not None
    return *first, {name: p.detach().clone() for name, p in model.named_parameters()}


_trained: dict[str, tuple[nn.Module, dict[str, Tensor], tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]]] = {}


def reference(name: str) -> tuple[nn.Module, dict[str, Tensor], tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]]:
    """Return a fresh copy of the model, its inputs, and what one device makes of it."""
    if name not in _trained:
        torch.manual_seed(0)
        model, inputs = MODELS[name][0]()
        model.double().train()
        _trained[name] = model, inputs, train(copy.deepcopy(model), inputs, 5)
    model, inputs, result = _trained[name]
    return copy.deepcopy(model), inputs, result


_traced: dict[str, Traced] = {}


def traced_once(name: str, *call: Any) -> Traced:
    """Return the model's trace: meshes do not change it, and torch takes a third of a compilation for it."""
    if name not in _traced:
        _traced[name] = trace(*call)
    return _traced[name]


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    scale = 1e-6 * max(float(value.abs().max()) for value in expected.values())
    return max(relative_difference(found[name], expected[name], scale) for name in expected)


def check(name: str, mesh: tuple[int, ...], memory: str = "low", vectors: str = "balanced") -> None:
    model, inputs, (loss, gradients, parameters) = reference(name)
    _, one_step, five_steps = MODELS[name]
    with mock.patch.object(pipeline, "trace", partial(traced_once, name)):
        partir.parallelize(model, mesh=mesh, memory=memory, vectors=vectors)
        found_loss, found_gradients, found_parameters = train(model, inputs, 5)
    assert relative_difference(found_loss, loss) <= one_step
    assert worst(found_gradients, gradients) <= one_step
    assert worst(found_parameters, parameters) <= five_steps


@pytest.mark.parametrize(("name", "mesh"), [("gpt", mesh) for mesh in MESHES], ids=str)
def test_a_model_trains_as_on_one_device(name: str, mesh: tuple[int, ...]) -> None:
    check(name, mesh)


@pytest.mark.parametrize("mesh", [mesh if mesh in SOME else pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES], ids=str)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt"])
def test_other_models_train_as_on_one_device(name: str, mesh: tuple[int, ...]) -> None:
    check(name, mesh)


@pytest.mark.parametrize("name", ["gpt", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "gpt")])
def test_a_model_trains_as_on_one_device_on_64_ranks(name: str) -> None:
    check(name, (4, 4, 4), memory="fast")


@pytest.mark.parametrize("mesh", [(1, 2, 2), (2, 2, 2), (1, 3, 3)], ids=str)
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_vectors_on_the_diagonal(name: str, mesh: tuple[int, ...]) -> None:
    check(name, mesh, vectors="diagonal")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", EVERY, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_mesh(name: str, mesh: tuple[int, ...]) -> None:
    check(name, mesh)


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_and_outputs(name: str) -> None:
    """Without labels, in eval mode and under no_grad: the outputs are whole and those of one device."""
    model, inputs, _ = reference(name)
    inputs = {key: value for key, value in inputs.items() if key != "labels"}
    model.eval()
    with torch.no_grad():
        expected = model(**inputs)
        partir.parallelize(model, mesh=(2, 3, 2))
        found = model(**inputs)
    if not isinstance(expected, Tensor):
        assert type(found) is type(expected)
        expected, found = expected.logits, found.logits
    assert relative_difference(found, expected) <= 1e-10


def test_dropout_is_the_same_on_every_mesh() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=48, block_size=48, num_layers=1, num_heads=12, hidden=48, dropout=0.2)).double()
    ids = tokens()
    losses: list[list[float]] = []
    for mesh in [(1, 1, 1), (2, 2, 2), (1, 4, 3)]:
        torch.manual_seed(7)
        twin = partir.parallelize(copy.deepcopy(model), mesh=mesh)
        losses.append([float(twin(ids, ids)) for _ in range(3)])
    assert len(set(losses[0])) == 3, "each call draws other numbers"
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-12)


def test_verify_reports_and_names_the_first_difference() -> None:
    model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
    x = torch.randn(24, 12)
    report = partir.verify(model, (2, 2, 2), x)
    assert report.worst <= 1e-10 and set(report.gradients) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert report.mesh == Mesh.parse((2, 2, 2)) and "0.weight" in str(report)
    with pytest.raises(VerifyError, match=r"differs from one device's by .* more than"):
        partir.verify(model, (2, 2, 2), x, tolerance=-1.0)


class FloatNorm(nn.Module):
    """A part that stays in float32, as the norms of Hugging Face's Llama do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        squares = self.linear(x).float().pow(2).mean(-1, keepdim=True)
        return x * squares.rsqrt().to(x.dtype)


def test_verify_tells_rounding_of_parts_in_float32_from_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = FloatNorm(), torch.randn(24, 12)
    with pytest.raises(VerifyError) as error:
        partir.verify(model, (2, 2, 2), x)
    text = str(error.value)
    assert "This is a bug" not in text and re.search(r"\d of the \d+ calls of the model, first aten.to.dtype at ", text)
    assert "compute in float32 though verify converts it: such a difference is what float32 rounds (its epsilon is 1.2e-07)" in text
    assert "Allow for that with a tolerance of 8e-06" in text
    assert partir.verify(model, (2, 2, 2), x, tolerance=8e-6).worst > 1e-10
    monkeypatch.setattr(equivalence, "ROUNDINGS", 1e-4)  # as if the difference were larger than rounding
    with pytest.raises(VerifyError, match="This is a bug in partir or in a rule"):
        partir.verify(model, (2, 2, 2), x)


def test_mesh_forms() -> None:
    """A dict, and a mesh with a data axis, mean what they say."""
    model = nn.Linear(8, 8)
    for mesh in ({"x": 2, "y": 2, "z": 1}, {"data": 2, "y": 2}, (2, 1, 2, 1)):
        partir.verify(model, mesh, torch.randn(8, 8))
