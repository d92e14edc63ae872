"""Losses of classes written as other ops: sums and a gather along the classes, so that the classes may be split."""

from __future__ import annotations

import torch
from torch import Tensor

_NONE, _MEAN = 0, 1


def cross_entropy_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross entropy of logits [N, C, ...] with class indices [N, ...] or class probabilities [N, C, ...]."""
    dim = 1 if x.dim() > 1 else 0
    log_probabilities = torch.log_softmax(x, dim)
    if target.is_floating_point():
        return _soft_cross_entropy(log_probabilities, target, weight, reduction, label_smoothing, dim)
    loss = nll_loss(log_probabilities, target, weight, reduction, ignore_index)
    if label_smoothing == 0.0:
        return loss
    weighted = log_probabilities if weight is None else log_probabilities * along(weight, dim, x.dim())
    smooth = -weighted.sum(dim)
    smooth = _wide(smooth.masked_fill(target == ignore_index, 0.0))
    if reduction == _MEAN:
        smooth = smooth.sum() / _total(target, weight, ignore_index, smooth.dtype)
    elif reduction != _NONE:
        smooth = smooth.sum()
    return (1.0 - label_smoothing) * loss + smooth.to(x.dtype) * (label_smoothing / x.shape[dim])


def nll_loss(
    log_probabilities: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
) -> Tensor:
    """Return minus the log-probability [N, C, ...] of each target [N, ...], reduced."""
    dim = 1 if log_probabilities.dim() > 1 else 0
    ignored = target == ignore_index
    classes = target.masked_fill(ignored, 0)
    picked = log_probabilities.gather(dim, classes.unsqueeze(dim)).squeeze(dim)
    loss = (-picked).masked_fill(ignored, 0.0)
    if weight is not None:
        loss = loss * _weights(classes, weight)
    if reduction == _NONE:
        return loss
    total = _wide(loss).sum()
    if reduction == _MEAN:
        total = total / _total(target, weight, ignore_index, total.dtype)
    return total.to(loss.dtype)


def _wide(t: Tensor) -> Tensor:
    """Add up 16-bit values in float32, as one kernel does inside: the losses of a batch overflow float16."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def _soft_cross_entropy(
    log_probabilities: Tensor, target: Tensor, weight: Tensor | None, reduction: int, label_smoothing: float, dim: int
) -> Tensor:
    num_classes = log_probabilities.shape[dim]
    if label_smoothing:
        target = target * (1.0 - label_smoothing) + label_smoothing / num_classes
    product = log_probabilities * target
    if weight is not None:
        product = product * along(weight, dim, product.dim())
    loss = -product.sum(dim)
    if reduction == _NONE:
        return loss
    total = _wide(loss).sum()
    return (total / (product.numel() // num_classes) if reduction == _MEAN else total).to(loss.dtype)


def _total(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """Return what a mean divides by: the number of targets that count, or the sum of their weights."""
    ignored = target == ignore_index
    if weight is None:
        return (~ignored).to(dtype).sum()
    return _weights(target.masked_fill(ignored, 0), weight).to(dtype).masked_fill(ignored, 0.0).sum()


def _weights(classes: Tensor, weight: Tensor) -> Tensor:
    return weight.index_select(0, classes.flatten()).view(classes.shape)


def along(vector: Tensor, dim: int, num_dims: int) -> Tensor:
    """Return a vector as a tensor of `num_dims` dims that lies along one of them."""
    return vector.view([-1 if index == dim else 1 for index in range(num_dims)])
