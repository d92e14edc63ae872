"""Sizes that no axis divides: the loss, outputs and gradients of one device, and no pad in any result."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import partir
from examples.models.bert import BERT, BERTConfig
from examples.models.gpt import GPT, GPTConfig
from examples.models.llama import Llama, LlamaConfig
from partir.pads import Pad, cut, extend, is_real, natural_index, natural_size, pad_dim, zero_pads
from partir.passes.checkpoints import region_of
from tests.compiled import compile_model

MESHES = [(2, 2, 2), (1, 4, 1), (3, 1, 2), *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in [(1, 1, 4), (5, 1, 1), (2, 3, 2)])]


def ids(batch: int, sequence: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (batch, sequence), generator=torch.Generator().manual_seed(batch * sequence))


def gpt() -> tuple[nn.Module, dict[str, Tensor]]:
    model = GPT(GPTConfig(vocab_size=37, block_size=7, num_layers=1, num_heads=6, hidden=30, dropout=0.0))
    return model, {"ids": ids(3, 7, 37), "labels": ids(3, 7, 37)}


def gpt_of_one_row() -> tuple[nn.Module, dict[str, Tensor]]:
    model = GPT(GPTConfig(vocab_size=48, block_size=8, num_layers=1, num_heads=12, hidden=48, dropout=0.0))
    return model, {"ids": ids(1, 8, 48), "labels": ids(1, 8, 48)}


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    model = BERT(BERTConfig(vocab_size=41, block_size=9, num_layers=1, num_heads=5, hidden=35, dropout=0.0))
    mask = torch.arange(9) < torch.tensor([[9], [2], [5]])
    labels = ids(3, 9, 41).masked_fill(torch.arange(9) % 3 == 1, -100)
    return model, {"ids": ids(3, 9, 41), "attention_mask": mask.long(), "token_types": ids(3, 9, 2), "labels": labels}


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    model = Llama(LlamaConfig(vocab_size=37, block_size=7, num_layers=1, num_heads=6, num_kv_heads=2, hidden=36, mlp_hidden=50))
    return model, {"ids": ids(2, 7, 37), "labels": ids(2, 7, 37)}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("make", [gpt, gpt_of_one_row, pytest.param(bert, marks=pytest.mark.slow), llama])
def test_models_of_odd_sizes(make: Callable[[], tuple[nn.Module, dict[str, Tensor]]], mesh: tuple[int, ...]) -> None:
    check_odd(make, mesh)


def test_bert_of_odd_sizes() -> None:
    check_odd(bert, (2, 2, 2))


def check_odd(make: Callable[[], tuple[nn.Module, dict[str, Tensor]]], mesh: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    partir.verify(model, mesh, (), inputs, tolerance=1e-5 if make is llama else 1e-10)


@pytest.mark.slow
def test_dropout_of_odd_sizes_is_the_same_on_every_mesh() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=37, block_size=7, num_layers=1, num_heads=6, hidden=30, dropout=0.3)).double()
    for mesh in [(1, 4, 1), (2, 1, 4)]:
        partir.verify(model, mesh, (ids(3, 7, 37),), {"labels": ids(3, 7, 37)})


def test_a_maximum_does_not_see_random_pads() -> None:
    """Pads must stay copies where each block has a generator of its own: nothing masks them in a maximum."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 11)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = F.dropout(self.up(x).exp(), 0.6, True)
            return h.detach(), h.amax(-1)

    torch.manual_seed(0)
    for rng in ("exact", "fast"):
        values, largest = partir.parallelize(Dropped(), (1, 4, 1), rng=rng)(torch.randn(64, 6))
        torch.testing.assert_close(largest, values.amax(-1), rtol=0, atol=0)


class Reductions(nn.Module):
    """Every kind of reduction over a hidden dim of 11 and over 5 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 11), nn.Linear(11, 7)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.up(x)
        spread = torch.cat([h.var(-1), h.std(0), h.mean(), h.amax(-1), h.logsumexp(0), h.norm(dim=-1)][:2] + [h.amax(-1), h.logsumexp(0)])
        return spread, h.mean(), h.softmax(0) * h.log_softmax(-1), h.sum(0, keepdim=True), h.cumsum(-1), h.flip(0), self.down(h).argmax(-1)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_reductions_do_not_see_pads(mesh: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    partir.verify(Reductions(), mesh, torch.randn(5, 6))


class Singular(nn.Module):
    """Functions that a pad of zeros would turn into infinities, and a gradient that sums over the padded dim."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(6, 11), nn.Parameter(torch.ones(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).exp()
        return (self.scale / h + h.log() / self.scale + (h * self.scale).rsqrt()).sum(-1)


def test_a_pad_makes_no_infinity() -> None:
    torch.manual_seed(0)
    partir.verify(Singular(), (1, 4, 1), torch.randn(5, 6))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_of_odd_vocabularies(reduction: str) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 37)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            weights = torch.linspace(1, 2, 37, dtype=x.dtype)
            return F.cross_entropy(self.head(x), labels, weight=weights, label_smoothing=0.1, reduction=reduction)

    torch.manual_seed(0)
    labels = ids(1, 7, 37)[0].masked_fill(torch.arange(7) > 4, -100)
    for mesh in [(2, 4, 1), (2, 1, 4)]:
        partir.verify(Head(), mesh, (torch.randn(7, 8), labels))


def test_no_rank_holds_a_whole_row_of_odd_logits() -> None:
    model, inputs = gpt()
    program = compile_model(model, tuple(inputs.values()), (1, 4, 1)).program
    assert program.backward is not None
    nodes = [*program.forward.graph.nodes, *program.backward.graph.nodes]
    shapes = [node.meta["val"].shape for node in nodes if isinstance(node.meta.get("val"), Tensor)]
    assert any(shape[-1:] == (10,) for shape in shapes), "the logits are split"
    assert not [shape for shape in shapes if len(shape) > 1 and shape[0] in (3, 21) and shape[-1] in (37, 40)]


def test_the_plan_says_what_is_padded_and_what_it_costs() -> None:
    model, inputs = gpt()
    plan = partir.plan(model, (2, 4, 1), (), inputs)
    assert "is padded to" in str(plan) and "more: plan.notes" in str(plan)
    text = plan.report()
    assert "a dim of 37 is padded to 40: 8.1% more work along it" in text
    assert "a dim of 6 is padded to 8: 33% more work along it" in text
    assert "token_embedding.weight: no dim of" in text and "held 4 times" in text
    assert "<unknown line>" not in str(plan) and "<unknown line>" not in text, "a pad has the line of what it pads, or of its first reader"
    assert re.search(r"\nfirst used at gpt.py:\d+\n", plan.explain("ids"))
    assert not [c for c in plan.collectives if c.source.startswith("<unknown")]


class Checkpointed(nn.Module):
    """A checkpoint reads a padded weight first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 37), nn.Linear(37, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.up, x, use_reentrant=False)
        return self.down(torch.tanh(hidden)) + self.up.weight.sum()


def test_the_pad_of_a_weight_is_no_part_of_the_checkpoint_that_reads_it() -> None:
    model, x = Checkpointed(), torch.randn(8, 8)
    annotated = partir.plan(model, (2, 2, 1), x).compiled.annotated
    pads = [node for node in annotated.graph.nodes if "pad_dim" in str(node.target)]
    assert pads and all(region_of(node) is None and "stack_trace" in node.meta for node in pads)
    assert any(region_of(node) for node in annotated.graph.nodes)
    assert partir.verify(model, (2, 2, 1), x).worst < 1e-10


def test_the_plan_says_what_is_computed_more_than_once() -> None:
    plan = partir.plan(nn.Linear(8, 3), (1, 4, 1), torch.randn(8, 8))
    assert "linear [8, 3]: no size is left for y: computed 4 times, the same on these ranks" in str(plan)


def test_nothing_is_padded_where_axes_divide() -> None:
    plan = partir.plan(nn.Linear(8, 16), (2, 4, 1), torch.randn(8, 8))
    assert "pad" not in plan.text("lowered") and "padded" not in str(plan)


@pytest.mark.parametrize("mesh", [(1, 4, 1), (2, 2, 2)])
def test_sharded_outputs_keep_their_pads_until_they_are_read(mesh: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 37).double()
    plan = partir.plan(model, mesh, torch.randn(8, 8).double(), outputs="sharded")
    assert "unpad" in plan.text("annotated") and "unpad" not in plan.text("lowered")
    assert plan.program.outputs[0].shape == (8, 37) and plan.program.outputs[0].layout.shape[1] > 37
    twin, x = copy.deepcopy(model), torch.randn(8, 8).double()
    parallel = partir.parallelize(model, mesh, outputs="sharded")
    cotangent = torch.randn(8, 37).double()
    result = parallel(x)
    result.backward(cotangent)
    expected = twin(x)
    expected.backward(cotangent)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    for mine, its in zip(parallel.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-12, atol=1e-12)


def test_a_token_behind_an_odd_vocabulary_is_an_error() -> None:
    """Row 37 of the padded table is a copy of row 36: it must not be found."""
    for mesh in [(1, 4, 1), (2, 2, 2), (5, 1, 1)]:
        model, inputs = gpt()
        bad = inputs["ids"].clone()
        bad[1, 2] = 37
        with pytest.raises(IndexError, match="out of range"):
            partir.parallelize(model, mesh)(bad)


PADS: list[tuple[Pad, ...]] = [(), (Pad(1, 3, 4),), (Pad(5, 6, 8),), (Pad(4, 3, 4), Pad(1, 3, 4)), (Pad(12, 2, 3), Pad(1, 5, 6))]


@pytest.mark.parametrize("pads", PADS, ids=str)
def test_indices_of_a_padded_dim(pads: tuple[Pad, ...]) -> None:
    """Real elements of the padded dim are those of the dim without pads, in order, and copies stand at their originals."""
    sizes = {pad.block: pad for pad in pads}
    padded = 2 * (max((pad.block * pad.padded for pad in pads), default=7))
    index = torch.arange(padded)
    real = natural_index(index, pads)[is_real(index, pads)]
    assert real.tolist() == list(range(natural_size(padded, pads)))
    assert set(natural_index(index, pads).tolist()) == set(real.tolist())
    assert len(sizes) == len(pads)


def test_a_pad_is_copies_and_its_gradient_is_what_came_for_them() -> None:
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    y = pad_dim(x, 0, 5)
    assert y.tolist() == [[0, 1], [2, 3], [4, 5], [4, 5], [4, 5]]
    masked = zero_pads(y, 0, torch.arange(5), (Pad(1, 3, 5),))
    masked.sum().backward()
    assert masked[3:].abs().sum() == 0 and x.grad is not None and x.grad.tolist() == [[1, 1]] * 3


def test_cut_and_extend() -> None:
    x: Any = torch.ones(3, 5)
    assert extend(x, (4, 8)).sum() == 15 and cut(extend(x, (4, 8)), (3, 5)).equal(x)
    assert extend(x, (3, 5)) is x and cut(x, (3, 5)) is x
