"""What a model is checked with: sizes, a way to build it, its inputs, and how far float64 carries in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

import partir
from partir.errors import VerifyError


@dataclass(frozen=True)
class Sizes:
    """Sizes of a small transformer.

    Args:
        vocabulary, batch, sequence, hidden, wide, heads: of tokens, inputs, layers, MLPs and attention.
        groups: key and value heads.
        image: height and width; patches are 4 x 4.
        classes: of a classifier.
    """

    vocabulary: int
    batch: int
    sequence: int
    hidden: int
    wide: int
    heads: int
    groups: int
    image: int
    classes: int


SIZES = {
    "even": Sizes(vocabulary=48, batch=12, sequence=8, hidden=48, wide=96, heads=12, groups=4, image=16, classes=12),
    "odd": Sizes(vocabulary=37, batch=3, sequence=7, hidden=24, wide=44, heads=6, groups=2, image=12, classes=5),
}
Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A model and how it is called.

    Args:
        build: from sizes and the name of an attention to a module, arguments and keyword arguments.
        attentions: the implementations of attention that it has; ("",) where it has no choice.
        tolerance: 1e-5 where the model itself computes in float32.
        refused: the text of the one error that is right for it, "" where it works.
        dtype: float64, but where an op of the model has none.
        rounding: a pattern of parameters whose gradient is zero but for rounding, as a key's bias has; at most 1e-6 of the largest.
    """

    build: Callable[[Sizes, str], Built]
    attentions: tuple[str, ...] = ("",)
    tolerance: float = 1e-9
    refused: str = ""
    dtype: torch.dtype = torch.float64
    rounding: str = ""


@dataclass(frozen=True)
class Run:
    """How a case runs once.

    Args:
        attention: one of the case's implementations.
        sizes: "odd" or "even".
        mesh: the ranks.
        training: with gradients; else in evaluation and without.
    """

    attention: str
    sizes: str
    mesh: tuple[int, int, int]
    training: bool = True

    def __str__(self) -> str:
        return " ".join([self.attention, self.sizes, str(self.mesh), "training" if self.training else "evaluation"]).strip()


def runs(case: Case) -> list[Run]:
    """Return the runs of a case: every attention on one mesh, the first on all, and in evaluation."""
    first = case.attentions[0]
    others = [Run(first, "even", (1, 4, 1)), Run(first, "odd", (3, 1, 2)), Run(first, "even", (2, 2, 2), False)]
    return [Run(attention, "odd", (2, 2, 2)) for attention in case.attentions] + ([] if case.refused else others)


def worst_difference(case: Case, run: Run) -> float:
    """Return the largest relative difference from one device, what is zero but for rounding left out.

    Raises:
        PartirError: the model is refused, or something differs by more than the case's tolerance.
    """
    torch.manual_seed(0)
    model, args, kwargs = case.build(SIZES[run.sizes], run.attention)
    model.train(run.training)
    with torch.set_grad_enabled(run.training):
        tolerance = 1.0 if case.rounding else case.tolerance
        report = partir.verify(model, run.mesh, args, kwargs, tolerance=tolerance, dtype=case.dtype)
    gradients = [d for name, d in report.gradients.items() if not fnmatch(name, case.rounding)]
    worst = max([report.loss, *report.outputs, *gradients, *report.buffers.values()])
    if not worst <= case.tolerance:
        raise VerifyError(str(report))
    return worst


def tokens(sizes: Sizes, length: int = 0) -> Tensor:
    """Return random token ids [batch, length or sequence], never 0, which some models read as padding."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, sizes.vocabulary, (sizes.batch, length or sizes.sequence), generator=generator)


def images(sizes: Sizes) -> Tensor:
    """Return random images [batch, 3, image, image]."""
    return torch.randn(sizes.batch, 3, sizes.image, sizes.image, generator=torch.Generator().manual_seed(0))


def mask(sizes: Sizes) -> Tensor:
    """Return an attention mask [batch, sequence] of ones, zero for the last two places of some rows, as padding is."""
    lengths = sizes.sequence - torch.arange(sizes.batch) % 3
    return (torch.arange(sizes.sequence) < lengths.unsqueeze(1)).long()


def labels_of_classes(sizes: Sizes) -> Tensor:
    """Return a class for each of the batch."""
    return torch.arange(sizes.batch) % sizes.classes
