"""The example models do what their docstrings say, before partir touches them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.models.bert import BERT, BERTConfig
from examples.models.gpt import GPT, GPTConfig
from examples.models.llama import Llama, LlamaConfig

B, S, V = 3, 12, 50
SIZES: dict[str, Any] = {"vocab_size": V, "block_size": 16, "num_layers": 2, "num_heads": 4, "hidden": 32}


def make(name: str) -> nn.Module:
    if name == "gpt":
        return GPT(GPTConfig(**SIZES, dropout=0.1))
    if name == "bert":
        return BERT(BERTConfig(**SIZES, dropout=0.1))
    return Llama(LlamaConfig(**SIZES, num_kv_heads=2, mlp_hidden=48))


def inputs(name: str, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(V, (B, S), generator=generator)
    given = {"labels": ids.clone()}
    if name == "bert":
        given["attention_mask"] = (torch.arange(S) < torch.tensor([[12], [9], [5]])).long()
        given["token_types"] = (torch.arange(S) >= 4).long().expand(B, S).contiguous()
    return {key: value.to(device) for key, value in {"ids": ids, **given}.items()}


NAMES = ["gpt", "bert", "llama"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = make(name).to(dtype)
    loss = model(**inputs(name))
    loss.backward()
    assert loss.shape == () and loss.dtype == dtype
    assert abs(loss.item() - math.log(V)) < 0.3  # a fresh model knows nothing
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_without_labels_the_logits_come_back(name: str) -> None:
    given = inputs(name)
    del given["labels"]
    assert make(name)(**given).shape == (B, S, V)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", NAMES)
def test_exports(name: str, device: str) -> None:
    with torch.device(device):
        model = make(name)
    given = inputs(name, device)
    program = torch.export.export(model, (given.pop("ids"),), given, strict=False)
    targets = {str(node.target) for node in program.graph.nodes}
    assert {"aten.scaled_dot_product_attention.default", "aten.cross_entropy_loss.default"} <= targets


@pytest.mark.parametrize("name", NAMES)
def test_a_model_made_on_meta_can_be_filled(name: str) -> None:
    expected = make(name)
    with torch.device("meta"):
        model = make(name)
    model.to_empty(device="cpu")
    for module in (expected, model):
        torch.manual_seed(2)
        module.reset_parameters()  # pyright: ignore[reportCallIssue]
        module.eval()
    given = inputs(name)
    torch.testing.assert_close(model(**given), expected(**given))
    assert len(list(model.parameters())) == len(list(expected.parameters()))  # tied weights are tied again


@pytest.mark.parametrize("name", NAMES)
def test_a_label_of_minus_100_does_not_count(name: str) -> None:
    model = make(name).eval()
    given = inputs(name)
    given["labels"][:, 6:] = -100
    loss = model(**given)
    labels = given.pop("labels")
    shift = 0 if name == "bert" else 1
    logits = model(**given)[:, : 6 - shift]
    expected = nn.functional.cross_entropy(logits.reshape(-1, V), labels[:, shift:6].reshape(-1))
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_attention_is_causal(name: str) -> None:
    model = make(name).eval()
    ids = inputs(name)["ids"]
    changed = ids.clone()
    changed[:, 8:] = (ids[:, 8:] + 1) % V
    torch.testing.assert_close(model(ids)[:, :8], model(changed)[:, :8])
    assert not torch.allclose(model(ids)[:, 8:], model(changed)[:, 8:])


def test_bert_does_not_look_at_padding() -> None:
    model = make("bert").eval()
    given = inputs("bert")
    del given["labels"]
    logits = model(**given)
    padding = given["attention_mask"] == 0
    given["ids"] = torch.where(padding, 7, given["ids"])
    torch.testing.assert_close(model(**given)[~padding], logits[~padding])


def test_llama_sees_relative_positions_only() -> None:
    """Rotated queries and keys have products that depend on the distance between their positions."""
    from examples.models.llama import rotary_tables, rotate

    cos_SK, sin_SK = rotary_tables(LlamaConfig(**SIZES, num_kv_heads=2))
    q_SK, k_SK = (rotate(torch.randn(8).expand(16, 8), cos_SK, sin_SK) for _ in range(2))
    scores_SS = q_SK @ k_SK.T
    torch.testing.assert_close(scores_SS[1:, 1:], scores_SS[:-1, :-1])


@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_that_is_too_long(name: str) -> None:
    with pytest.raises(ValueError, match="a sequence of 17 is longer than block_size 16"):
        make(name)(torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.parametrize("config", [GPTConfig, BERTConfig])
def test_hidden_that_the_heads_do_not_divide(config: Any) -> None:
    with pytest.raises(ValueError, match="hidden 30 is not divisible by num_heads 4"):
        config(hidden=30, num_heads=4)


def test_llama_heads_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="num_heads 4 is not divisible by num_kv_heads 3"):
        LlamaConfig(hidden=64, num_heads=4, num_kv_heads=3)
