"""Clip gradients of a parallelized module by their norm, as `torch.nn.utils.clip_grad_norm_` does on one device."""

from __future__ import annotations

from torch import Tensor, nn

from partir.module import parallelized
from partir.runtime.norms import clip_gradients


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
    """Scale all gradients in place so that their norm is at most ``max_norm``; return the norm that they had, 0-d, on every rank.

    Right for every layout, `vectors="diagonal"` and every norm included. Every rank must call it. Also a method of the module, where its
    class has none of that name: `model.clip_grad_norm_(1.0)`.

    Args:
        model: a parallelized module.
        max_norm: the largest norm allowed.
        norm_type: order of the norm; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: raise where the norm is NaN or infinite, instead of scaling by it.

    Raises:
        PartirError: not parallelized, a limit that is negative or no number, or a gradient that is no DTensor.
        RuntimeError: the norm is not finite and `error_if_nonfinite`; on every rank.
    """
    return clip_gradients(list(model.parameters()), parallelized(model).session(model), max_norm, norm_type, error_if_nonfinite)
