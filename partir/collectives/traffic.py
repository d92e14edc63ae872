"""Bytes that one rank receives in a collective; local formulas move nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch

from partir.collectives.vocabulary import SCHEMAS

Shape = Sequence[int]


def received_bytes(name: str, /, shape: Shape | Sequence[Shape], dtype: torch.dtype, size: int, **args: object) -> int:
    """Count the bytes that one rank of a group receives.

    broadcast is counted for a rank that is not the root, reduce_to for the root.

    Args:
        name: of the collective.
        shape: local shape of the operand on one rank; one shape per tensor for a bucket.
        dtype: of the operand.
        size: number of ranks in the group.
        args: the op's other arguments, which change nothing.

    >>> received_bytes("all_gather", (16, 64), torch.float32, size=4)
    12288
    >>> received_bytes("reduce_scatter", (16, 64), torch.float32, size=4)
    3072
    """
    if name not in SCHEMAS:
        raise ValueError(f"{name!r} is not a collective; known: {', '.join(SCHEMAS)}.")
    numel = _numel(shape)
    if name in ("all_gather", "all_gather_same", "all_gather_bucket"):
        elements = (size - 1) * numel
    elif name in ("reduce_scatter", "reduce_scatter_bucket", "all_to_all"):
        elements = (size - 1) * (numel // size)
    elif name == "all_reduce":
        elements = 2 * (size - 1) * math.ceil(numel / size)
    elif name == "broadcast":
        elements = numel if size > 1 else 0
    elif name == "reduce_to":
        elements = (size - 1) * numel
    else:
        elements = 0
    return elements * dtype.itemsize


def _numel(shape: Shape | Sequence[Shape]) -> int:
    if shape and not isinstance(shape[0], int):
        return sum(math.prod(one) for one in cast(Sequence[Shape], shape))
    return math.prod(cast(Shape, shape))
