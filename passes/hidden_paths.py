"""Refuse what torch's own modules compute otherwise when they are not traced, so that a trace would be another function."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from partir.passes.user_lines import fail


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
