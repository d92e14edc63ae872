"""The norm of all gradients, and clipping by it: one device's, whatever the layouts.

Each rank takes the norms of the blocks that it counts for: of a block held several times one rank counts, of a vector on the diagonal
its owner. The norms travel, one number a parameter, and are combined in the order of the ranks, so that every rank has the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from partir.errors import PartirError
from partir.runtime.session import Session
from partir.runtime.torch_dtensor import local_of
from partir.runtime.transport import Call

WHERE = Call("all_gather", "all", "norm of the gradients", "norms", counted=False)


def clip_gradients(
    parameters: Sequence[nn.Parameter], session: Session | None, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """Scale the gradients of a model so that their norm is at most `max_norm`; return the norm before. Every rank calls it.

    Args:
        session: this rank; None where all are simulated and gradients are whole.

    Raises:
        PartirError: a limit that is negative or no number, or a gradient that is no DTensor.
        RuntimeError: the norm is not finite and `error_if_nonfinite`.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0 or math.isnan(norm_type):
        raise PartirError(f"clip_grad_norm_: max_norm={max_norm}, norm_type={norm_type}: give a limit of at least 0 and an order.")
    if session is None:
        return cast(Any, nn.utils).clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
    norm = total_norm(parameters, session, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped. "
            "To disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                block = local_of(parameter.grad)
                block.mul_(scale.to(block.dtype))
    return norm


def total_norm(parameters: Sequence[nn.Parameter], session: Session, norm_type: float) -> Tensor:
    """Return the norm of the norms of all gradients, as `torch.nn.utils.get_total_norm` does; the same bits on every rank."""
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    norms = [_own_norm(p, norm_type, dtype) for p in parameters]
    with_grad = [index for index, p in enumerate(parameters) if p.grad is not None]
    if not norms or not with_grad:
        return torch.zeros((), dtype=dtype, device=session.device)
    mine = torch.stack(norms).to(session.device)
    everyone = session.groups.over(session.mesh.names)
    rows = mine.unsqueeze(0)
    if everyone.size > 1:
        rows = session.transport.wait(session.transport.gather_rows(mine, everyone, WHERE))
    each = rows.sum(0) if norm_type == 0 else torch.linalg.vector_norm(rows, norm_type, dim=0)
    return torch.linalg.vector_norm(each[with_grad], norm_type)


def _own_norm(parameter: nn.Parameter, norm_type: float, dtype: torch.dtype) -> Tensor:
    """Return the norm of what this rank counts of a gradient; where that is nothing, what changes no norm."""
    grad = parameter.grad
    if grad is None or not _counts(grad) or local_of(grad).numel() == 0:
        return torch.full((), 0.0 if norm_type >= 0 else torch.inf, dtype=dtype, device=parameter.device)
    return torch.linalg.vector_norm(local_of(grad), norm_type, dtype=dtype)


def _counts(grad: Tensor) -> bool:
    """Return whether this rank is the one of those that hold its block that counts for it."""
    if not isinstance(grad, DTensor):
        raise PartirError("clip_grad_norm_: a gradient is a plain tensor and its parameter a DTensor; set .grad to one laid out alike.")
    loose = cast(Any, grad)
    places = loose.device_mesh.get_coordinate()
    for place, placement in zip(places, loose.placements):
        if placement.is_partial():
            raise PartirError(f"clip_grad_norm_: a gradient is {loose.placements}, a sum not yet made; redistribute it first.")
        if placement.is_replicate() and place > 0:
            return False
    return True
