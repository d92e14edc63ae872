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
def no_nested_tensors() -> Generator[None]:
    """Refuse a TransformerEncoder that would run on nested tensors: its padded places are zeros then, which no trace shows."""
    original: Any = nn.TransformerEncoder.forward

    def forward(self: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None) -> Any:
        if mask is None and src_key_padding_mask is not None and _may_run_nested(self, src):
            fail(
                "nn.TransformerEncoder(enable_nested_tensor=True) with a padding mask runs on nested tensors in evaluation: "
                "their shapes depend on data, and no graph holds them. Pass enable_nested_tensor=False, or call "
                "torch.backends.mha.set_fastpath_enabled(False); both keep what is not padded as it is."
            )
        return original(self, src, mask, src_key_padding_mask, is_causal)

    with mock.patch.object(nn.TransformerEncoder, "forward", forward):
        yield


def _may_run_nested(encoder: Any, src: torch.Tensor) -> bool:
    tensors = [src, *encoder.parameters()]
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return bool(encoder.use_nested_tensor and not encoder.training and torch.backends.mha.get_fastpath_enabled() and not differentiable)


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
