"""Inference mode: what is compiled or laid out inside it must serve training as well, so it is made outside."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def ordinary_tensors() -> Generator[None]:
    """Leave `torch.inference_mode` and keep gradients off, as they are in it; without it change nothing."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def may_be_saved(t: Tensor) -> Tensor:
    """Return a tensor that a backward may keep: a copy of one that was made in inference mode, where gradients are recorded."""
    return t.clone() if t.is_inference() and torch.is_grad_enabled() else t
