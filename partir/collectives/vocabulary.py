"""The collectives as torch ops over axis names: schemas, kernels on real tensors, fake formulas.

Each op has four things:

    schema              torch.ops.partir.<name>.default is the target of a node
    kernel              reads the communication backend (`backend.py`); plain tensors in, new tensors out
    fake formula        reads the current mesh (`partir.mesh.use_mesh`); needs no backend
    autograd formula    `gradients.py`

`axis` is one axis (`"y"`) or several, major to minor (`"z.x"`). No formula returns its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from partir.collectives import addressing, lockstep
from partir.collectives.addressing import split_axes
from partir.collectives.backend import current_backend
from partir.errors import LayoutError
from partir.mesh import current_mesh

SCHEMAS = {
    "all_gather": "(Tensor t, str axis, int dim, int blocks=1) -> Tensor",
    "all_gather_same": "(Tensor t, str axis, int dim, int blocks=1) -> Tensor",
    "reduce_scatter": "(Tensor t, str axis, int dim, int blocks=1) -> Tensor",
    "all_reduce": '(Tensor t, str axis, str op="sum") -> Tensor',
    "slice": "(Tensor t, str axis, int dim, int blocks=1, bool varied=False) -> Tensor",
    "zero_pad": "(Tensor t, str axis, int dim, int blocks=1) -> Tensor",
    "spread": "(Tensor t, str axis) -> Tensor",
    "settle": "(Tensor t, str axis) -> Tensor",
    "once": "(Tensor t, str axis, bool varied=True) -> Tensor",
    "all_to_all": "(Tensor t, str axis, int src, int dst, int src_blocks=1, int dst_blocks=1) -> Tensor",
    "broadcast": "(Tensor t, str axis, str root) -> Tensor",
    "reduce_to": "(Tensor t, str axis, str root) -> Tensor",
    "all_gather_bucket": "(Tensor[] ts, str axis) -> Tensor[]",
    "reduce_scatter_bucket": "(Tensor[] ts, str axis) -> Tensor[]",
    "coordinate": "(str axis, Device device) -> Tensor",
}

# The library lives as long as the process: torch drops the ops when it is collected.
LIBRARY: Any = torch.library.Library("partir", "DEF")

Formula = Callable[..., Any]


def _copy(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _size(axis: str) -> int:
    return current_mesh().extent(split_axes(axis))


def _place(op: str, axis: str) -> tuple[int, int]:
    backend, axes = current_backend(op), split_axes(axis)
    return backend.coordinate(axes), backend.mesh.extent(axes)


def _resized(t: Tensor, op: str, axis: str, changes: Sequence[tuple[int, int, int, int]]) -> Tensor:
    """Make an empty result: each change `(dim, blocks, times, over)` multiplies a dim and divides it."""
    shape = list(t.shape)
    for dim, blocks, times, over in changes:
        size = shape[dim] * times
        if size % (blocks * over):
            raise LayoutError(
                f"partir::{op} along {axis}: dim {dim} of local size {shape[dim]} is not divisible into "
                f"blocks={blocks} times {over} ranks (local shape {list(t.shape)})."
            )
        shape[dim] = size // over
    return t.new_empty(shape)


def _all_gather(t: Tensor, axis: str, dim: int, blocks: int = 1) -> Tensor:
    return current_backend("all_gather").all_gather(t, split_axes(axis), dim, blocks)


def _all_gather_fake(t: Tensor, axis: str, dim: int, blocks: int = 1) -> Tensor:
    return _resized(t, "all_gather", axis, [(dim, blocks, _size(axis), 1)])


def _reduce_scatter(t: Tensor, axis: str, dim: int, blocks: int = 1) -> Tensor:
    return current_backend("reduce_scatter").reduce_scatter(t, split_axes(axis), dim, blocks)


def _reduce_scatter_fake(t: Tensor, axis: str, dim: int, blocks: int = 1) -> Tensor:
    return _resized(t, "reduce_scatter", axis, [(dim, blocks, 1, _size(axis))])


def _all_reduce(t: Tensor, axis: str, op: str = "sum") -> Tensor:
    return current_backend("all_reduce").all_reduce(t, split_axes(axis), op)


def _same_shape_fake(t: Tensor, axis: str, *rest: object, **named: object) -> Tensor:
    current_mesh()
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def _slice(t: Tensor, axis: str, dim: int, blocks: int = 1, varied: bool = False) -> Tensor:
    return lockstep.slice(t, *_place("slice", axis), dim, blocks)


def _slice_fake(t: Tensor, axis: str, dim: int, blocks: int = 1, varied: bool = False) -> Tensor:
    return _resized(t, "slice", axis, [(dim, blocks, 1, _size(axis))])


def _zero_pad(t: Tensor, axis: str, dim: int, blocks: int = 1) -> Tensor:
    return lockstep.zero_pad(t, *_place("zero_pad", axis), dim, blocks)


def _zero_pad_fake(t: Tensor, axis: str, dim: int, blocks: int = 1) -> Tensor:
    return _resized(t, "zero_pad", axis, [(dim, blocks, _size(axis), 1)])


def _identity(t: Tensor, axis: str) -> Tensor:
    return _copy(t)


def _once(t: Tensor, axis: str, varied: bool = True) -> Tensor:
    return lockstep.once(t, *_place("once", axis))


def _all_to_all(t: Tensor, axis: str, src: int, dst: int, src_blocks: int = 1, dst_blocks: int = 1) -> Tensor:
    return current_backend("all_to_all").all_to_all(t, split_axes(axis), src, dst, src_blocks, dst_blocks)


def _all_to_all_fake(t: Tensor, axis: str, src: int, dst: int, src_blocks: int = 1, dst_blocks: int = 1) -> Tensor:
    size = _size(axis)
    return _resized(t, "all_to_all", axis, [(src, src_blocks, size, 1), (dst, dst_blocks, 1, size)])


def _broadcast(t: Tensor, axis: str, root: str) -> Tensor:
    return current_backend("broadcast").broadcast(t, split_axes(axis), root)


def _reduce_to(t: Tensor, axis: str, root: str) -> Tensor:
    return current_backend("reduce_to").reduce_to(t, split_axes(axis), root)


def _all_gather_bucket(ts: Sequence[Tensor], axis: str) -> list[Tensor]:
    backend, axes = current_backend("all_gather_bucket"), split_axes(axis)
    size = backend.mesh.extent(axes)
    flat = backend.all_gather(addressing.pack(ts, 1), axes, 0, 1)
    return addressing.unpack(flat, [(t.shape[0] * size, *t.shape[1:]) for t in ts], size)


def _all_gather_bucket_fake(ts: Sequence[Tensor], axis: str) -> list[Tensor]:
    return [_resized(t, "all_gather_bucket", axis, [(0, 1, _size(axis), 1)]) for t in ts]


def _reduce_scatter_bucket(ts: Sequence[Tensor], axis: str) -> list[Tensor]:
    backend, axes = current_backend("reduce_scatter_bucket"), split_axes(axis)
    size = backend.mesh.extent(axes)
    flat = backend.reduce_scatter(addressing.pack(ts, size), axes, 0, 1)
    return addressing.unpack(flat, [(t.shape[0] // size, *t.shape[1:]) for t in ts], 1)


def _reduce_scatter_bucket_fake(ts: Sequence[Tensor], axis: str) -> list[Tensor]:
    return [_resized(t, "reduce_scatter_bucket", axis, [(0, 1, 1, _size(axis))]) for t in ts]


def _coordinate(axis: str, device: torch.device) -> Tensor:
    return lockstep.coordinate(_place("coordinate", axis)[0], device)


def _coordinate_fake(axis: str, device: torch.device) -> Tensor:
    current_mesh()
    return torch.empty((), dtype=torch.int64, device=device)


FORMULAS: dict[str, tuple[Formula, Formula]] = {
    "all_gather": (_all_gather, _all_gather_fake),
    "all_gather_same": (_all_gather, _all_gather_fake),
    "reduce_scatter": (_reduce_scatter, _reduce_scatter_fake),
    "all_reduce": (_all_reduce, _same_shape_fake),
    "slice": (_slice, _slice_fake),
    "zero_pad": (_zero_pad, _zero_pad_fake),
    "spread": (_identity, _same_shape_fake),
    "settle": (_identity, _same_shape_fake),
    "once": (_once, _same_shape_fake),
    "all_to_all": (_all_to_all, _all_to_all_fake),
    "broadcast": (_broadcast, _same_shape_fake),
    "reduce_to": (_reduce_to, _same_shape_fake),
    "all_gather_bucket": (_all_gather_bucket, _all_gather_bucket_fake),
    "reduce_scatter_bucket": (_reduce_scatter_bucket, _reduce_scatter_bucket_fake),
    "coordinate": (_coordinate, _coordinate_fake),
}


def _register() -> None:
    register_fake: Any = cast(Any, torch.library).register_fake
    for name, schema in SCHEMAS.items():
        kernel, fake = FORMULAS[name]
        LIBRARY.define(name + schema)
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        register_fake(f"partir::{name}", fake, lib=LIBRARY)


def overload(name: str) -> OpOverload:
    """Return the op of a collective, as it is a node's target.

    >>> overload("all_gather")
    <OpOverload(op='partir.all_gather', overload='default')>
    """
    return cast(OpOverload, getattr(torch.ops.partir, name).default)


_register()
