"""Decompose: every op ends with a rule, and the result and every gradient stay those of eager torch."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import partir
from examples.models.gpt import GPT, GPTConfig
from partir import rules
from partir.errors import RuleError
from partir.passes.decompose_ops import decompose_ops
from partir.passes.torch_ops import name_of
from partir.passes.trace import Traced, trace
from tests.traced import Calls, ops, run, worst

COMPOSED = {
    *("cross_entropy_loss", "nll_loss_nd", "scaled_dot_product_attention", "rms_norm", "layer_norm", "group_norm", "einsum", "glu"),
    *("logsumexp", "var", "std", "linalg_vector_norm", "one_hot", "repeat_interleave", "constant_pad_nd", "pad", "roll", "tril"),
    *("mse_loss", "stack", "matmul", "baddbmm", "slice_scatter", "select_scatter"),
}


def has_rule(node: fx.Node) -> bool:
    return rules.find(node.target) is not None


def has_simple_rule(node: fx.Node) -> bool:
    return has_rule(node) and name_of(node.target).split("::")[1] not in COMPOSED


def real(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def check(function: Any, *args: Any) -> Traced:
    """Decompose the trace of a function and compare its value and gradients with eager."""
    model = Calls(function)
    traced = trace(model, args)
    decompose_ops(traced.graph_module, has_simple_rule)
    for node in traced.graph_module.graph.nodes:
        assert node.op != "call_function" or "getitem" in node.name or has_simple_rule(node), node.target
    mine, theirs = run(traced, model, args), function(*args)
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    leaves = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    weights = torch.linspace(0.5, 1.5, mine.numel(), dtype=mine.dtype).view(mine.shape)
    gradients = [torch.autograd.grad((value * weights).sum(), leaves) for value in (mine, theirs)]
    assert worst(*gradients) <= 1e-11
    return traced


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


WEIGHT = torch.tensor([0.2, 0.9, 0.4, 0.7, 0.5], dtype=torch.float64)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_cross_entropy(reduction: str, smoothing: float, weight: Tensor | None) -> None:
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight}
    target = torch.tensor([0, 3, -100, 2, 4, 1])
    traced = check(lambda x, y: F.cross_entropy(x, y, **options), real(6, 5), target)
    assert {"log_softmax", "gather"} <= set(ops(traced))
    check(lambda x, y: F.cross_entropy(x, y, ignore_index=1, **options), real(2, 5, 3), torch.randint(0, 5, (2, 3)))
    check(lambda x, y: F.cross_entropy(x, y.softmax(1), **options), real(2, 5, 3), real(2, 5, 3))


def test_negative_log_likelihood() -> None:
    check(lambda x, y: F.nll_loss(x.log_softmax(1), y), real(2, 5, 3, 4), torch.randint(0, 5, (2, 3, 4)))
    check(lambda x, y: F.cross_entropy(x, y), real(5), torch.tensor(2))


def test_attention() -> None:
    q, k, v, mask = real(2, 4, 6, 8), real(2, 4, 6, 8), real(2, 4, 6, 5), torch.rand(2, 1, 6, 6) > 0.4
    mask[0, 0, 2] = False
    added = torch.zeros(2, 1, 6, 6, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    attention = F.scaled_dot_product_attention
    check(lambda *a: attention(*a, is_causal=True, enable_gqa=True), q, real(2, 2, 6, 8), real(2, 2, 6, 5))
    check(attention, q, k, v, mask)
    check(attention, q, k, v, added)
    check(lambda *a: attention(*a, scale=0.3), q, k, v)


def test_attention_with_dropout_is_explicit() -> None:
    model = Calls(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5, is_causal=True))
    traced = trace(model, (real(2, 4, 6, 8),))
    decompose_ops(traced.graph_module, has_simple_rule)
    assert "dropout" in ops(traced) and "scaled_dot_product_attention" not in ops(traced)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, w: F.rms_norm(x, (5,), w), [(6, 5), (5,)]),
        (lambda x, w: F.layer_norm(x, (5,), w), [(6, 5), (5,)]),
        (lambda x, w: F.group_norm(x, 2, w), [(3, 4, 5), (4,)]),
        (lambda x: F.batch_norm(x, None, None, training=True), [(4, 3)]),
        (F.mse_loss, [(3, 4), (3, 4)]),
        (F.l1_loss, [(3, 4), (3, 4)]),
        (F.smooth_l1_loss, [(3, 4), (3, 4)]),
        (F.huber_loss, [(3, 4), (3, 4)]),
        (lambda a, b: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean"), [(3, 4), (3, 4)]),
        (lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid()), [(3, 4), (3, 4)]),
        (lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid()), [(3, 4), (3, 4)]),
        (F.poisson_nll_loss, [(3,), (3,)]),
        (F.triplet_margin_loss, [(2, 4), (2, 4), (2, 4)]),
        (lambda a, b: torch.einsum("bhid,bhjd->bhij", a, b), [(2, 3, 4, 5), (2, 3, 6, 5)]),
        (lambda a, b: torch.tensordot(a, b, 1), [(4, 3), (3, 2)]),
        (lambda a, b: a @ b, [(2, 3, 4, 5), (3, 5, 2)]),
        (lambda a, b: a @ b, [(5,), (2, 5, 3)]),
        (torch.baddbmm, [(2, 4, 5), (2, 4, 3), (2, 3, 5)]),
        (torch.addcmul, [(3, 4), (3, 4), (3, 4)]),
        (lambda x: x.logsumexp(-1), [(3, 4)]),
        (lambda x: x.std(-1) + x.var(-1, correction=0), [(3, 4)]),
        (lambda x: F.normalize(x, dim=-1), [(3, 4)]),
        (F.cosine_similarity, [(3, 4), (3, 4)]),
        (F.glu, [(3, 4)]),
        (torch.tril, [(4, 4)]),
        (lambda x: F.pad(x, (1, -1, 0, 2), value=0.5), [(3, 4)]),
        (lambda x: x.repeat_interleave(3, 1), [(2, 4, 5)]),
        (lambda x: x.roll((1, -2), (0, 1)), [(3, 4)]),
        (lambda a, b: torch.stack([a, b], 1), [(2, 3), (2, 3)]),
        (lambda x: x.movedim(0, -1).swapaxes(0, 1), [(2, 3, 4)]),
        (lambda x: F.mish(x) + F.gelu(x) + F.silu(x) + F.elu(x) + F.softplus(x) + F.hardswish(x), [(4,)]),
        (lambda x: F.dropout2d(x, 0.0) + F.alpha_dropout(x, 0.5, False) + F.dropout(x, 0.5, False), [(2, 3, 4, 5)]),
    ],
)
def test_other_ops(function: Any, shapes: list[tuple[int, ...]]) -> None:
    check(function, *(real(*shape) for shape in shapes))


def writes(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:3] = x[:, :2] * 2
    y[0] += 1
    y[:, 0:5:2] = x[:, :3]
    return y * x


def test_scatters_of_in_place_writes() -> None:
    check(writes, real(4, 6))


def test_one_hot() -> None:
    check(lambda ids, w: F.one_hot(ids, 7) * w, torch.randint(0, 7, (3,)), real(3, 7))


def test_what_does_nothing_is_gone() -> None:
    empty = torch.empty(0, dtype=torch.float64)
    traced = check(lambda x: F.dropout(torch.cat([empty, x.to(x.dtype)]), 0.1, training=False), real(3))
    assert ops(traced) == []


def test_layers_keep_lines_and_names_and_a_second_time_changes_nothing() -> None:
    model = GPT(GPTConfig(vocab_size=48, block_size=16, num_layers=2, num_heads=4, hidden=32, dropout=0.1)).train()
    ids = torch.zeros(2, 16, dtype=torch.long)
    traced = trace(model, (ids, ids))
    decompose_ops(traced.graph_module, has_simple_rule)
    softmax = [node for node in traced.graph_module.graph.nodes if node.name.startswith("softmax")]
    modules = [list(node.meta["nn_module_stack"].values())[-1][0] for node in softmax]
    assert modules == ["blocks.0.attn", "blocks.1.attn"]
    assert all("gpt.py" in node.meta["stack_trace"] for node in softmax)
    before = str(traced.graph_module.graph)
    decompose_ops(traced.graph_module, has_simple_rule)
    assert str(traced.graph_module.graph) == before


@torch.library.custom_op("partir_test::scale", mutates_args=())
def scale(x: Tensor, factor: float, weight: Tensor | None = None) -> Tensor:
    return x * factor


@scale.register_fake
def _(x: Tensor, factor: float, weight: Tensor | None = None) -> Tensor:
    return torch.empty_like(x)


class Scales(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scale(x, 2.0)


def test_an_op_without_a_rule_is_an_error_that_holds_the_rule() -> None:
    traced = trace(Scales(), (torch.ones(3),))
    law = "partir_test.scale.default has no rule for this call, and no decomposition into ops that have one"
    with pytest.raises(RuleError, match=re.escape(law)) as caught:
        decompose_ops(traced.graph_module, has_rule)
    assert re.match(r"test_decompose\.py:\d+", str(caught.value))
    assert "\n    op partir_test.scale(x[a], factor) -> y[a]\nThis one was found by trial on this call alone" in str(caught.value)
    with pytest.raises(RuleError) as caught:
        decompose_ops(trace(Scales(), (torch.ones(()),)).graph_module, has_rule)
    assert "\n    op partir_test.scale(x[* ...], factor, weight?[* ...]) -> y[* ...]\nwith a name for each dim" in str(caught.value)
    decompose_ops(trace(nn.Linear(2, 2), (torch.ones(1, 2),)).graph_module, has_rule)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_lstm_is_taken_apart_in_every_dtype(dtype: torch.dtype) -> None:
    lstm, x = torch.nn.LSTM(6, 6, batch_first=True).to(dtype), torch.randn(4, 5, 6, dtype=dtype)
    expected = lstm(x)[0]
    assert torch.allclose(partir.parallelize(lstm, (2, 1, 1))(x)[0], expected, atol=1e-6)
