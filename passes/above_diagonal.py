"""What a value of two growing dims is above the diagonal: where the later dim's position comes after the earlier's.

    %le = aten.le(%columns, %rows)            False
    %and = aten.bitwise_and(%le, %padding)    False, whatever the padding is
    %where = aten.where(%and, 0.0, -inf)      -inf
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from partir.graph import arguments, operands
from partir.passes.node_facts import is_pointwise, op_name

KEEPS = frozenset(
    f"aten::{name}"
    for name in ("expand", "unsqueeze", "squeeze", "view", "reshape", "_unsafe_view", "to", "_to_copy", "clone", "contiguous", "slice")
)
ANDS = frozenset(f"aten::{name}" for name in ("bitwise_and", "__and__", "logical_and"))
ORS = frozenset(f"aten::{name}" for name in ("bitwise_or", "__or__", "logical_or"))
FILLS = {"aten::new_full": 2, "aten::full_like": 1}
"""Ops that read no number of their operand -> which argument fills the result."""
FILLED = {f"aten::{name}": value for value in (0, 1) for name in (("new_zeros", "zeros_like"), ("new_ones", "ones_like"))[value]}
Diagonal = Callable[[Node], tuple[int, ...]]


def closed(values: tuple[Tensor, ...], dims: tuple[int, ...]) -> Any:
    """Return the one number that known values hold above the diagonal of two dims, None where there is none."""
    found: set[Any] = set()
    for value in values if dims else ():
        rows, columns = value.shape[dims[0]], value.shape[dims[1]]
        above = torch.ones(rows, columns, dtype=torch.bool, device=value.device).triu(1)
        held = value.movedim(dims, (-2, -1))[..., above]
        if not held.numel() or bool((held != held.flatten()[0]).any()):
            return None
        found.add(held.flatten()[0].item())
    return found.pop() if len(found) == 1 else None


def above_of(node: Node, above: Mapping[Node, Any], diagonal: Diagonal) -> Any:
    """Return what a call's result is above the diagonal, from what its operands are; None where that is not one number.

    Args:
        above: what is known of the operands.
        diagonal: a value's two growing dims, ``()`` where it has others.
    """
    if isinstance(node.meta["val"], (tuple, list)) or not diagonal(node):
        return None
    name = op_name(node)
    if name in KEEPS:
        first = operands(node)[0]
        return _converted(above.get(first), node) if diagonal(first) else None
    if name in FILLS or name in FILLED:
        return _converted(node.args[FILLS[name]] if name in FILLS else FILLED[name], node)
    if name == "aten::baddbmm" and len(node.args) == 3 and not node.kwargs:
        return -torch.inf if diagonal(operands(node)[0]) and above.get(operands(node)[0]) == -torch.inf else None
    if not is_pointwise(node) and name not in ANDS | ORS:
        return None
    items = arguments(node)
    values = [_scalar(item, above, diagonal) for item in items]
    absorbed = _absorbed(name, values)
    if absorbed is not None or any(value is None for value in values):
        return absorbed
    held = {item: value for item, value in zip(items, values) if isinstance(item, Node)}
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda read: torch.tensor(held[read], dtype=read.meta["val"].dtype))
    return cast(Any, node.target)(*args, **kwargs).item()


def _converted(value: Any, node: Node) -> Any:
    return None if value is None or isinstance(value, Node) else torch.tensor(value).to(node.meta["val"].dtype).item()


def _scalar(item: Any, above: Mapping[Node, Any], diagonal: Diagonal) -> Any:
    """Return a number for an argument: what an operand is above the diagonal, or the number that it is."""
    if isinstance(item, Node):
        return above.get(item) if diagonal(item) else None
    return item


def _absorbed(name: str, values: list[Any]) -> Any:
    """Return what one operand alone decides."""
    if name in ANDS:
        return False if any(value is False for value in values) else None
    if name in ORS:
        return True if any(value is True for value in values) else None
    if name == "aten::where" and isinstance(values[0], bool):
        return values[1] if values[0] else values[2]
    if name == "aten::masked_fill" and isinstance(values[1], bool):
        return values[2] if values[1] else values[0]
    if name == "aten::add" and -torch.inf in values[:2] and values[2:] in ([], [1]):
        return -torch.inf
    return None
