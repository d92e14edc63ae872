"""Losses on meshes: value and every gradient of one device's; no rank holds a whole row of logits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import partir
from partir.equivalence import relative_difference
from partir.graph import results_of
from partir.module import parallelized

N, HIDDEN, CLASSES = 24, 12, 48
SLOW = pytest.mark.slow
Loss = Callable[[Tensor, Tensor], Tensor]


class Head(nn.Module):
    """Logits of a linear head and losses of them; the head's vocabulary is split."""

    def __init__(self, *losses: Loss) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.losses = losses
        self.body = nn.Parameter(torch.randn(HIDDEN, HIDDEN, dtype=torch.float64, generator=generator))
        self.weight = nn.Parameter(torch.randn(CLASSES, HIDDEN, dtype=torch.float64, generator=generator) * 0.3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(F.gelu(F.linear(x, self.body)), self.weight)
        return torch.stack([loss(logits, target) for loss in self.losses])


def hidden() -> Tensor:
    return torch.randn(N, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def labels(ignored: Any = ()) -> Tensor:
    target = torch.randint(0, CLASSES, (N,), generator=torch.Generator().manual_seed(2))
    target[ignored] = -100
    return target


def probabilities() -> Tensor:
    return torch.rand(N, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).softmax(-1)


def weighing(loss: Tensor) -> Tensor:
    """Reduce an unreduced loss with a weight of its own for each element."""
    return (loss * torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view(loss.shape)).sum()


def gradients(model: nn.Module, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the losses, and for each of them the gradient of every parameter."""
    found: list[Tensor] = []
    losses = model(*inputs)
    for index in range(losses.numel()):
        model.zero_grad()
        losses[index].backward(retain_graph=index + 1 < losses.numel())
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    assert len(found) == losses.numel() * len(list(model.parameters()))
    return losses.detach(), found


def check(losses: dict[str, Loss], mesh: tuple[int, ...], *inputs: Tensor) -> None:
    model = Head(*losses.values())
    values, grads = gradients(copy.deepcopy(model), *inputs)
    found, found_grads = gradients(partir.parallelize(model, mesh), *inputs)
    for name, mine, theirs in zip(losses, found, values, strict=True):
        assert relative_difference(mine, theirs) <= 1e-10, name
    names = [name for name in losses for _ in range(2)]
    for name, mine, theirs in zip(names, found_grads, grads, strict=True):
        assert relative_difference(mine, theirs) <= 1e-10, f"gradient of {name}"


def cross_entropies() -> Iterator[tuple[str, Loss]]:
    """Every reduction with each of ignored targets, class weights and label smoothing."""
    weight = torch.rand(CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    for reduction in ("mean", "sum", "none"):
        for smoothing in (0.0, 0.2):
            for weights in (None, weight):
                options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}

                def loss(z: Tensor, t: Tensor, options: Any = options, weights: Any = weights) -> Tensor:
                    return weighing(F.cross_entropy(z, t, weight=weights, **options))

                yield f"{reduction} smoothing {smoothing} {'weighted' if weights is not None else ''}", loss


def by_hand(z: Tensor, t: Tensor) -> Tensor:
    return (z.logsumexp(-1) - z.gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1)).mean()


LABELLED: dict[str, Loss] = dict(cross_entropies()) | {
    "another ignored class": lambda z, t: F.cross_entropy(z, t.clamp(min=0), ignore_index=0),
    "log softmax and nll": lambda z, t: F.nll_loss(z.log_softmax(-1), t),
    "nll without reduction": lambda z, t: weighing(F.nll_loss(z.log_softmax(-1), t, reduction="none")),
    "logsumexp by hand": by_hand,
    "with a z-loss": lambda z, t: F.cross_entropy(z, t) + 1e-2 * z.logsumexp(-1).square().mean(),
}


@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 4, 1), pytest.param((3, 1, 2), marks=SLOW)], ids=str)
def test_cross_entropy_with_classes(mesh: tuple[int, ...]) -> None:
    """Ignored labels: very different counts a rank, and in the first third none that is valid."""
    check(LABELLED, mesh, hidden(), labels([*range(8), 9, 10, 11, 13, 23]))


WEIGHT = torch.rand(CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) + 0.5
SOFT: dict[str, Loss] = {
    "soft targets": lambda z, q: F.cross_entropy(z, q),
    "soft targets, summed": lambda z, q: F.cross_entropy(z, q, reduction="sum"),
    "soft targets, weighted and smoothed": lambda z, q: weighing(
        F.cross_entropy(z, q, weight=WEIGHT, reduction="none", label_smoothing=0.1)
    ),
    "kl_div, batchmean": lambda z, q: F.kl_div(z.log_softmax(-1), q, reduction="batchmean"),
    "kl_div, mean": lambda z, q: F.kl_div(z.log_softmax(-1), q, reduction="sum") / q.numel(),
    "kl_div, log_target": lambda z, q: F.kl_div(z.log_softmax(-1), q.log(), reduction="batchmean", log_target=True),
    "mse": lambda z, q: F.mse_loss(z, q) + F.mse_loss(z, q, reduction="sum"),
    "mse, none": lambda z, q: weighing(F.mse_loss(z, q, reduction="none")),
    "l1": lambda z, q: F.l1_loss(z, q) + F.l1_loss(z, q, reduction="sum"),
    "smooth l1": lambda z, q: F.smooth_l1_loss(z, q, beta=0.3) + weighing(F.smooth_l1_loss(z, q, reduction="none")),
    "huber": lambda z, q: F.huber_loss(z, q, delta=0.4) + F.huber_loss(z, q, reduction="sum"),
    "bce": lambda z, q: F.binary_cross_entropy(z.sigmoid(), q) + weighing(F.binary_cross_entropy(z.sigmoid(), q, reduction="none")),
    "bce, weighted": lambda z, q: F.binary_cross_entropy(z.sigmoid(), q, weight=WEIGHT, reduction="sum"),
    "bce with logits": lambda z, q: F.binary_cross_entropy_with_logits(z, q),
    "bce with logits, weighted": lambda z, q: F.binary_cross_entropy_with_logits(z, q, weight=WEIGHT, pos_weight=WEIGHT + 1),
    "cosine similarity": lambda z, q: weighing(F.cosine_similarity(z, q, dim=-1)),
    "cosine embedding": lambda z, q: F.cosine_embedding_loss(z, q, 2.0 * (q.detach()[:, 0] > 0.02) - 1, margin=0.1),
}


@pytest.mark.parametrize("mesh", [(3, 1, 2), pytest.param((2, 2, 2), marks=SLOW), pytest.param((1, 4, 1), marks=SLOW)], ids=str)
def test_losses_with_tensors(mesh: tuple[int, ...]) -> None:
    check(SOFT, mesh, hidden(), probabilities())


def test_a_batch_without_valid_labels_is_nan_as_on_one_device() -> None:
    check_nan = {"mean": lambda z, t: F.cross_entropy(z, t)}
    model, target = Head(*check_nan.values()), torch.full((N,), -100)
    assert bool(partir.parallelize(model, (2, 2, 2))(hidden(), target).isnan().all())
    check({"sum": lambda z, t: F.cross_entropy(z, t, reduction="sum")}, (2, 2, 2), hidden(), target)


def test_a_label_out_of_range_is_the_same_error() -> None:
    target = labels()
    target[3] = CLASSES
    model = partir.parallelize(Head(F.cross_entropy), (1, 2, 2))
    with pytest.raises(IndexError, match=f"index {CLASSES} is out of range: a dim of size {CLASSES}"):
        model(hidden(), target)


def test_ctc_is_one_clear_error() -> None:
    def loss(z: Tensor, t: Tensor) -> Tensor:
        return F.ctc_loss(z.log_softmax(-1).unsqueeze(1), t[None, :4], torch.tensor([N]), torch.tensor([4]))

    with pytest.raises(partir.PartirError, match=r"test_losses\.py:\d+.*ctc_loss"):
        partir.parallelize(Head(loss), (1, 2, 2), (hidden(), labels()))


VOCABULARY = 80  # no other dim, whole or a rank's part, has this size
IDS = torch.zeros(24, 8, dtype=torch.long)


class Model(nn.Module):
    """An embedding, a layer, a head and the loss of a language model."""

    def __init__(self, loss: Loss, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.fc = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY, bias=not tied)
        self.loss = loss
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.loss(self.head(F.gelu(self.fc(self.embedding(ids)))).flatten(0, 1), ids.flatten())


LANGUAGE: dict[str, Loss] = {
    "cross entropy": F.cross_entropy,
    "smoothed": lambda z, t: F.cross_entropy(z, t, label_smoothing=0.1),
    "weighted": lambda z, t: F.cross_entropy(z, t, weight=torch.linspace(0, 1, VOCABULARY)),
    "log softmax and nll": lambda z, t: F.nll_loss(z.log_softmax(-1), t),
    "with a z-loss": lambda z, t: F.cross_entropy(z, t) + 1e-2 * z.logsumexp(-1).square().mean(),
}


def whole_rows(graph: fx.GraphModule) -> list[str]:
    """Return the values of a rank's graph that hold whole rows of logits or of their gradients.

    Of 8 ranks each has 24 rows or more; a weight has 16 columns at most.
    """
    share = IDS.numel() // 8 * VOCABULARY
    nodes = [node for node in graph.graph.nodes if node.op == "call_function" and "val" in node.meta]
    held = [(node.name, value) for node in nodes for value in results_of(node)]
    return [f"{name}: {list(value.shape)}" for name, value in held if VOCABULARY in value.shape and value.numel() >= share]


def programs(mesh: tuple[int, ...], loss: Loss, tied: bool) -> list[fx.GraphModule]:
    model = partir.parallelize(Model(loss, tied), mesh, IDS)
    (program,) = parallelized(model).programs()
    assert program.backward is not None
    return [program.forward, program.backward]


@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 2, 4)], ids=str)
@pytest.mark.parametrize("name", LANGUAGE)
def test_no_rank_holds_a_whole_row_of_logits(name: str, mesh: tuple[int, ...]) -> None:
    for graph in programs(mesh, LANGUAGE[name], tied=name == "cross entropy"):
        assert whole_rows(graph) == []


def test_a_whole_row_would_be_seen() -> None:
    """The negative control: a loss that needs its classes whole gathers them, and one rank alone holds all."""
    for mesh, loss in [((2, 2, 2), lambda z, t: z.cumsum(-1).square().mean()), ((1, 1, 1), F.cross_entropy)]:
        assert any(whole_rows(graph) for graph in programs(mesh, loss, tied=False))
