"""The work of one node of a rank's graph: floating-point operations and bytes of memory, from local shapes.

FLOPs come from torch's table of formulas, `torch.utils.flop_counter`, which counts a multiplication and an addition as two and
a causal attention as a full one. An op without a formula counts its memory alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from partir.graph import collective_name, is_call, is_collective, operands, tensor_of, tensors_of

aten = torch.ops.aten
# The table lacks the CPU's attention; its first arguments are those of the GPU's.
SAME_FORMULA: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
# These read of their first operand what they return, not the whole table.
LOOK_UPS = (aten.embedding, aten.gather, aten.index_select, aten.index)
FREE_COLLECTIVES = ("spread", "settle", "once", "coordinate")


def node_flops(node: Node) -> int:
    """Return the floating-point operations of a call, by torch's formula for its op."""
    packet = getattr(node.target, "overloadpacket", None)
    formula = cast("Callable[..., int] | None", flop_registry.get(SAME_FORMULA.get(packet, packet)))
    if formula is None:
        return 0
    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda operand: operand.meta["val"])
    return int(formula(*cast("tuple[Any, ...]", args), **cast("dict[str, Any]", kwargs), out_val=node.meta["val"]))


def node_bytes(node: Node) -> int:
    """Return the bytes that a call reads and writes; views and renamings move none."""
    if not is_work(node):
        return 0
    written = sum(map(stored_bytes, tensors_of(node)))
    reads = [stored_bytes(tensor_of(operand)) for operand in operands(node)]
    if getattr(node.target, "overloadpacket", None) in LOOK_UPS or (is_collective(node) and collective_name(node) == "slice"):
        reads[0] = min(reads[0], written)
    return sum(reads) + written


def is_work(node: Node) -> bool:
    """Return whether a node computes something on its own rank: no view, no other name for its operand."""
    if not is_call(node) or getattr(node.target, "is_view", False):
        return False
    return not (is_collective(node) and collective_name(node) in FREE_COLLECTIVES)


def stored_bytes(t: torch.Tensor) -> int:
    """Return the bytes that a tensor's elements lie in; an expanded dim is stored once."""
    return math.prod(size for size, stride in zip(t.shape, t.stride()) if stride or not size) * t.element_size()
