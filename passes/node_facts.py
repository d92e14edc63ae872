"""What kind of op a node of a local ATen graph is: the facts that sharing, partition and scheduling decide by."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.fx import Node

from partir import graph

GATHERS = frozenset({"all_gather", "all_gather_same", "all_gather_bucket", "broadcast"})
IDENTITIES = frozenset({"spread", "settle"})
MOVES = frozenset({"aten::clone", "aten::_to_copy", "aten::cat", "aten::stack", "partir::once", "partir::all_to_all"})
_UNSAFE_VIEWS = frozenset({"aten::_unsafe_view", "aten::_reshape_alias"})


def op_name(node: Node) -> str:
    """Return ``namespace::op`` of a call to a torch op, else ``""``."""
    target = cast(object, node.target)
    return target.name().split(".")[0] if isinstance(target, OpOverload) else ""


def collective(node: Node) -> str | None:
    """Return the name of the partir op that ``node`` calls, or None."""
    name = op_name(node)
    return name.removeprefix("partir::") if name.startswith("partir::") else None


def is_getitem(node: Node) -> bool:
    """Return whether ``node`` picks one result of its operand."""
    return node.op == "call_function" and node.target is operator.getitem


def operands(node: Node) -> list[Node]:
    """Return the nodes that ``node`` reads, each once, in order."""
    return list(node.all_input_nodes)


def is_view(node: Node) -> bool:
    """Return whether ``node`` only looks at its operand's storage."""
    if is_getitem(node):
        return is_view(operands(node)[0])
    if op_name(node) in _UNSAFE_VIEWS:
        return True
    return graph.is_view(node)


def storage_owner(node: Node) -> Node:
    """Return the node whose storage ``node`` looks at: itself unless it is a view."""
    while is_view(node):
        node = operands(node)[0]
    return node


def has_tag(node: Node, tag: torch.Tag) -> bool:
    """Return whether ``node`` calls an op that carries ``tag``."""
    target = cast(object, node.target)
    return isinstance(target, OpOverload) and tag in target.tags


def is_random(node: Node) -> bool:
    """Return whether ``node`` draws from a generator, or is a result of one that does, so that a second run differs.

    Attention is tagged so for its dropout; without any it draws nothing.
    """
    if is_getitem(node):
        return is_random(operands(node)[0])
    return has_tag(node, torch.Tag.nondeterministic_seeded) and _argument(node, "dropout_p") != 0.0


def _argument(node: Node, name: str) -> Any:
    """Return an argument of a call to a torch op, its default where it is left out; None where the op has none of this name."""
    for place, argument in enumerate(cast(Any, node.target)._schema.arguments):
        if argument.name == name:
            given = node.args[place] if place < len(node.args) else argument.default_value
            return node.kwargs.get(name, given)
    return None


def is_pointwise(node: Node) -> bool:
    """Return whether ``node`` computes each element from the same element of its operands."""
    return has_tag(node, torch.Tag.pointwise) or op_name(node) in ("aten::where", "aten::masked_fill")


def is_move(node: Node) -> bool:
    """Return whether ``node`` copies values without computing new ones."""
    return op_name(node) in MOVES or (is_getitem(node) and not is_view(node))


def shape_and_dtype(node: Node) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Return the local shape and dtype of a node that is one tensor."""
    value = cast(Any, node.meta.get("val"))
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
