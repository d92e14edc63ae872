"""torch's own records of ops: the only place that touches its private types."""

from __future__ import annotations

from typing import Any

import torch


def is_overload(value: Any) -> bool:
    """Whether this is one overload of an op, such as ``torch.ops.aten.add.Tensor``."""
    return isinstance(value, torch._ops.OpOverload)  # pyright: ignore[reportPrivateUsage]


def is_packet(value: Any) -> bool:
    """Whether this is an op with all its overloads, such as ``torch.ops.aten.add``."""
    return isinstance(value, torch._ops.OpOverloadPacket)  # pyright: ignore[reportPrivateUsage]


def overloads(packet: Any) -> list[Any]:
    """Return the overloads of an op."""
    return [getattr(packet, name) for name in packet.overloads()]


def qualified_name(schema: Any) -> str:
    """``aten.sum.dim_IntList``, ``aten.linear.default``."""
    return f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}"
