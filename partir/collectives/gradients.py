"""The derivative of each collective, one row of the type table each: cotangents S<->S, P<->R, I<->I.

op               type   derivative

    all_gather       S->R   reduce_scatter      |  all_gather_same  S->I   slice
    reduce_scatter   P->S   all_gather          |  slice            I->S   all_gather_same
    all_reduce       P->I   spread              |  slice varied     R->S   zero_pad
    zero_pad         S->P   slice varied        |  spread           I->R   all_reduce
    settle           R->I   once                |  once             I->P   settle
    once varied      R->P   once varied         |  all_to_all       S->S   all_to_all
    broadcast    owner->R   reduce_to           |  reduce_to    P->owner   broadcast
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from partir.collectives.vocabulary import LIBRARY

ops: Any = torch.ops.partir

# From the result's cotangent and the op's arguments after the tensor to the tensor's cotangent.
Derivative = Callable[..., Any]


def _all_gather(grad: Tensor, axis: str, dim: int, blocks: int) -> Tensor:
    return ops.reduce_scatter(grad, axis, dim, blocks)


def _all_gather_same(grad: Tensor, axis: str, dim: int, blocks: int) -> Tensor:
    return ops.slice(grad, axis, dim, blocks)


def _reduce_scatter(grad: Tensor, axis: str, dim: int, blocks: int) -> Tensor:
    return ops.all_gather(grad, axis, dim, blocks)


def _all_reduce(grad: Tensor, axis: str, op: str) -> Tensor:
    return ops.spread(grad, axis)


def _slice(grad: Tensor, axis: str, dim: int, blocks: int, varied: bool) -> Tensor:
    return ops.zero_pad(grad, axis, dim, blocks) if varied else ops.all_gather_same(grad, axis, dim, blocks)


def _zero_pad(grad: Tensor, axis: str, dim: int, blocks: int) -> Tensor:
    return ops.slice(grad, axis, dim, blocks, True)


def _spread(grad: Tensor, axis: str) -> Tensor:
    return ops.all_reduce(grad, axis)


def _settle(grad: Tensor, axis: str) -> Tensor:
    return ops.once(grad, axis, False)


def _once(grad: Tensor, axis: str, varied: bool) -> Tensor:
    return ops.once(grad, axis, True) if varied else ops.settle(grad, axis)


def _all_to_all(grad: Tensor, axis: str, src: int, dst: int, src_blocks: int, dst_blocks: int) -> Tensor:
    return ops.all_to_all(grad, axis, dst, src, dst_blocks, src_blocks)


def _broadcast(grad: Tensor, axis: str, root: str) -> Tensor:
    return ops.reduce_to(grad, axis, root)


def _reduce_to(grad: Tensor, axis: str, root: str) -> Tensor:
    return ops.broadcast(grad, axis, root)


def _all_gather_bucket(grads: list[Tensor], axis: str) -> list[Tensor]:
    return ops.reduce_scatter_bucket(grads, axis)


def _reduce_scatter_bucket(grads: list[Tensor], axis: str) -> list[Tensor]:
    return ops.all_gather_bucket(grads, axis)


DERIVATIVES: dict[str, Derivative] = {
    "all_gather": _all_gather,
    "all_gather_same": _all_gather_same,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "slice": _slice,
    "zero_pad": _zero_pad,
    "spread": _spread,
    "settle": _settle,
    "once": _once,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce_to": _reduce_to,
    "all_gather_bucket": _all_gather_bucket,
    "reduce_scatter_bucket": _reduce_scatter_bucket,
}


def _save_arguments(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.arguments = inputs[1:]


def _save_reduction(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _save_arguments(ctx, inputs, output)
    if inputs[2] == "max":
        ctx.mark_non_differentiable(output)


def _register() -> None:
    register_autograd: Any = cast(Any, torch.library).register_autograd
    for name, derivative in DERIVATIVES.items():

        def backward(ctx: Any, grad: Any, derivative: Derivative = derivative) -> tuple[Any, ...]:
            return derivative(grad, *ctx.arguments), *(None for _ in ctx.arguments)

        save = _save_reduction if name == "all_reduce" else _save_arguments
        register_autograd(f"partir::{name}", backward, setup_context=save, lib=LIBRARY)


_register()
