"""Ops written as other ops, in plain torch, for ops that have no rule or whose rule cannot serve.

Each function has the signature of its op. They are written for splitting: no value is wider than the operands need,
reductions are sums and maxima over a dim, and positions come from comparisons of aranges, never from a baked triangle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from partir.passes import more_decompositions as more
from partir.passes.loss_decompositions import along, cross_entropy_loss, nll_loss

aten = torch.ops.aten


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention [..., L, V] of query [..., L, E], key [..., S, E], value [..., S, V]; rows all masked are 0."""
    if enable_gqa:
        key = repeat_interleave(key, query.shape[-3] // key.shape[-3], -3)
        value = repeat_interleave(value, query.shape[-3] // value.shape[-3], -3)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query * factor, key.transpose(-2, -1))
    hidden = None
    if is_causal:
        rows = torch.arange(query.shape[-2], device=query.device)
        columns = torch.arange(key.shape[-2], device=query.device)
        hidden = columns.unsqueeze(0) > rows.unsqueeze(1)
    elif attn_mask is not None and attn_mask.dtype is torch.bool:
        hidden = ~attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask
        hidden = scores == -math.inf
    if hidden is not None:
        # The lowest number, not -inf: a row that is all hidden then has no NaN, in the value or in the gradient.
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, -1)
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)
    if dropout_p > 0.0:
        weights = torch.dropout(weights, dropout_p, True)
    return torch.matmul(weights, value)


def rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Return x / sqrt(mean of x*x over the last dims + eps) * weight."""
    wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    dims = list(range(-len(normalized_shape), 0))
    y = wide * torch.rsqrt((wide * wide).mean(dims, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Return x [N, C, ...] normalized over each group of channels and the dims after them."""
    grouped = x.view([x.shape[0], num_groups, x.shape[1] // num_groups, *x.shape[2:]])
    dims = list(range(2, grouped.dim()))
    centred = grouped - grouped.mean(dims, keepdim=True)
    scale = torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps)
    y = (centred * scale).view(x.shape)
    y = y if weight is None else y * along(weight, 1, x.dim())
    return y if bias is None else y + along(bias, 1, x.dim())


def native_dropout(x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    """Return x with entries zeroed and the rest scaled, and the mask of what was kept."""
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = torch.bernoulli(torch.empty_like(x), 1.0 - p)
    return x * kept * (0.0 if p == 1.0 else 1.0 / (1.0 - p)), kept.to(torch.bool)


def feature_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Return x [N, C, ...] with whole channels zeroed."""
    if not train or p == 0.0:
        return x
    ones = torch.ones([*x.shape[:2], *[1] * (x.dim() - 2)], dtype=x.dtype, device=x.device)
    return x * torch.dropout(ones, p, True)


def alpha_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Return x with entries set to SELU's negative limit, rescaled to keep mean and variance."""
    if not train or p == 0.0:
        return x
    return _alpha(x, torch.ones_like(x), p)


def feature_alpha_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Return x [N, C, ...] with whole channels set to SELU's negative limit, rescaled."""
    if not train or p == 0.0:
        return x
    ones = torch.ones([*x.shape[:2], *[1] * (x.dim() - 2)], dtype=x.dtype, device=x.device)
    return _alpha(x, ones, p)


def _alpha(x: Tensor, ones: Tensor, p: float) -> Tensor:
    """Drop where a dropout of `ones` does: what is dropped becomes SELU's negative limit; where all is, 0."""
    if p == 1.0:
        return x * 0.0
    kept = torch.dropout(ones, p, True) * (1.0 - p)
    alpha = 1.7580993408473766
    a = 1.0 / math.sqrt((alpha * alpha * p + 1.0) * (1.0 - p))
    return x * (kept * a) + ((kept - 1.0) * (alpha * a) + alpha * a * p)


def one_hot(ids: Tensor, num_classes: int = -1) -> Tensor:
    """Return 1 where the class number equals the id: [...] -> [..., C]."""
    classes = torch.arange(num_classes, device=ids.device)
    return (ids.unsqueeze(-1) == classes).to(torch.int64)


def repeat_interleave(x: Tensor, repeats: int, dim: int | None = None, **_: Any) -> Tensor:
    """Return x with each slice of a dim repeated: one expand, no data-dependent size."""
    if dim is None:
        x, dim = x.flatten(), 0
    dim = dim % x.dim()
    shape = [*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :]]
    return x.unsqueeze(dim + 1).expand(shape).flatten(dim, dim + 1)


def var(x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """Return the variance over dims: the sum of squares about the mean, divided by their number less the correction."""
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def std(x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """Return the square root of the variance over dims."""
    return torch.sqrt(var(x, dim, correction=correction, keepdim=keepdim))


def var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the variance over dims, and the mean."""
    dims = list(dim) if dim else list(range(x.dim()))
    count = math.prod(x.shape[d] for d in dims) - (1.0 if correction is None else float(correction))
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    squares = (centred * centred).sum(dims, keepdim=keepdim)
    return squares / count, mean if keepdim else x.mean(dims)


def constant_pad_nd(x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    """Return x with `pad` = (before, after) constants at the last dim, then the one before; negative ones cut."""
    for index in range(len(pad) // 2):
        dim, before, after = x.dim() - 1 - index, pad[2 * index], pad[2 * index + 1]
        start, length = max(-before, 0), x.shape[dim] + min(before, 0) + min(after, 0)
        if (start, length) != (0, x.shape[dim]):
            x = x.narrow(dim, start, length)
        sizes = [list(x.shape[:dim]) + [max(count, 0)] + list(x.shape[dim + 1 :]) for count in (before, after)]
        ends = [torch.full(size, value, dtype=x.dtype, device=x.device) if size[dim] else None for size in sizes]
        parts = [part for part in (ends[0], x, ends[1]) if part is not None]
        x = torch.cat(parts, dim) if len(parts) > 1 else x
    return x


def slice_scatter(x: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    """Return x with the slice start:end of a dim replaced."""
    first, last, _ = slice(start, end).indices(x.shape[dim])
    if step != 1:
        places = torch.arange(x.shape[dim], device=x.device)
        inside = (places >= first) & (places < last) & ((places - first) % step == 0)
        spread = repeat_interleave(src, step, dim).narrow(dim, 0, max(last - first, 0))
        return torch.where(along(inside, dim % x.dim(), x.dim()), slice_scatter(x, spread, dim, first, last), x)
    parts = [x.narrow(dim, 0, first), src, x.narrow(dim, last, x.shape[dim] - last)]
    kept = [part for part in parts if part.shape[dim]]
    return torch.cat(kept, dim) if len(kept) > 1 else kept[0].clone()


def roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """Return x with its entries shifted along dims, those that fall off coming back at the other end."""
    if not dims:
        return roll(x.flatten(), shifts, [0]).view(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        cut = -shift % size if size else 0
        x = torch.cat([x.narrow(dim, cut, size - cut), x.narrow(dim, 0, cut)], dim) if cut else x
    return x


OWN: dict[Any, Callable[..., Any]] = {
    aten.cross_entropy_loss.default: cross_entropy_loss,
    aten.nll_loss.default: nll_loss,
    aten.nll_loss2d.default: nll_loss,
    aten.nll_loss_nd.default: nll_loss,
    aten.scaled_dot_product_attention.default: scaled_dot_product_attention,
    aten.rms_norm.default: rms_norm,
    aten.group_norm.default: group_norm,
    aten.native_dropout.default: native_dropout,
    aten.feature_dropout.default: feature_dropout,
    aten.alpha_dropout.default: alpha_dropout,
    aten.feature_alpha_dropout.default: feature_alpha_dropout,
    aten.var.correction: var,
    aten.std.correction: std,
    aten.var_mean.correction: var_mean,
    aten.constant_pad_nd.default: constant_pad_nd,
    aten.slice_scatter.default: slice_scatter,
    aten.roll.default: roll,
    aten.one_hot.default: one_hot,
    aten.repeat_interleave.self_int: repeat_interleave,
    aten.index.Tensor: more.index,
    aten.index_put.default: more.index_put,
    aten.index_fill.int_Scalar: more.index_fill,
    aten.index_fill.int_Tensor: more.index_fill,
    aten.tril.default: more.tril,
    aten.triu.default: more.triu,
    aten.unfold.default: more.unfold,
    aten.bilinear.default: more.bilinear,
    aten._safe_softmax.default: more.safe_softmax,
    aten.linalg_matrix_power.default: more.matrix_power,
    aten.linalg_tensorinv.default: more.tensorinv,
    aten.linalg_tensorsolve.default: more.tensorsolve,
}
