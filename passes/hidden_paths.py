"""Refuse what torch computes otherwise when it is not traced, so that a trace would be another function; or rewrite it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import nn

from partir.passes.user_lines import fail

OWN_GENERATOR = (
    "`{name}` draws from a torch.Generator, a sequential stream that no mesh can share. Leave `generator=` out: the numbers then "
    "follow from torch.manual_seed, the same on every mesh. Or draw outside of forward and pass the numbers in."
)


@contextmanager
def nested_tensors_padded() -> Generator[None]:
    """Trace a TransformerEncoder that would run on nested tensors on padded ones, and write the zeros that nested ones leave in padding.

    In evaluation it does so where every mask of a batch is a suffix of its row: that is data, and stays so in the graph.
    """
    original: Any = nn.TransformerEncoder.forward

    def forward(self: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None) -> Any:
        if mask is not None or src_key_padding_mask is None or not _may_run_nested(self, src):
            return original(self, src, mask, src_key_padding_mask, is_causal)
        with mock.patch.object(self, "use_nested_tensor", False), _without_norm(self):
            padded = original(self, src, mask, src_key_padding_mask, is_causal)
        zeros = src_key_padding_mask.bool()
        if self.mask_check:
            zeros = zeros & _are_suffixes(zeros)
        result = padded.masked_fill(zeros.unsqueeze(-1), 0.0)
        return result if self.norm is None else self.norm(result)

    with mock.patch.object(nn.TransformerEncoder, "forward", forward):
        yield


def _may_run_nested(encoder: Any, src: torch.Tensor) -> bool:
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in [src, *encoder.parameters()])
    wanted = encoder.use_nested_tensor and not encoder.training and src.dim() == 3 and torch.backends.mha.get_fastpath_enabled()
    return bool(wanted and not differentiable and not torch.is_autocast_enabled())


@contextmanager
def _without_norm(encoder: Any) -> Generator[None]:
    norm, encoder.norm = encoder.norm, None
    try:
        yield
    finally:
        encoder.norm = norm


def _are_suffixes(padding: torch.Tensor) -> torch.Tensor:
    """Return a 0-d bool: whether the padding of each row [batch, sequence] is at its end."""
    return (padding[:, 1:] | ~padding[:, :-1]).all()


@contextmanager
def no_seeding() -> Generator[None]:
    """Refuse `torch.manual_seed` inside forward: a trace would seed once, and every later call draw other numbers than one device."""

    def manual_seed(seed: Any) -> NoReturn:
        fail("torch.manual_seed inside forward: a graph holds no seeding. Seed before the model is called.")

    with mock.patch.object(torch, "manual_seed", manual_seed), mock.patch.object(torch.random, "manual_seed", manual_seed):
        yield


def fill_with_integers(x: torch.Tensor, *bounds: int | None, **named: int | None) -> torch.Tensor:
    """Run ``x.random_(...)``; with two bounds as a copy of other draws, as export cannot write the argument called ``from``."""
    low, high = (*bounds, named.get("from"), named.get("to"))[:2] if "from" not in named else (named["from"], named.get("to"))
    if low is None or high is None:
        return x.random_(*bounds, **named)  # pyright: ignore[reportArgumentType]
    return x.copy_(torch.randint_like(x, low, high))
