"""Pair the calls of one module's graphs at two lengths: the same calls with the same arguments, sizes apart.

    long:   %arange = aten.arange(16)   %sin = aten.sin(%arange)                               %x / 4
    short:  %arange = aten.arange(3)    %slice = aten.slice(%table, 0, 0, 3)   refused: %x / 2 in place of %x / 4

Requires: functional graphs of one module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from partir.errors import PaddingError, source_line
from partir.graph import arguments, operands
from partir.passes.node_facts import op_name

SIZES = frozenset({"size", "sizes", "shape", "end"})  # arguments that say how large a result is, and nothing else


def pair_calls(long: GraphModule, short: GraphModule) -> dict[Node, Node]:
    """Return the twin of each node of the short graph in the long one: the same calls with the same arguments, sizes apart.

    A slice of the first positions of a table that is not longer than `long` is no call there: its twin is the table's.

    Raises:
        PaddingError: names the first call that differs.
    """
    left, twins = list(long.graph.nodes), dict[Node, Node]()
    place = 0
    for node in short.graph.nodes:
        other = left[place] if place < len(left) else None
        if other is not None and _is_twin(other, node, twins):
            twins[node], place = other, place + 1
        elif name_of(node) == "slice" and is_first(node):
            twins[node] = twins[operands(node)[0]]
        else:
            instead = "nothing" if other is None else _call(other)
            raise PaddingError(f"{source_line(node.meta)}: with another length forward calls {instead} in place of {_call(node)}")
    if place < len(left):
        raise PaddingError(f"{source_line(left[place].meta)}: with another length forward does not call {_call(left[place])}")
    return twins


def _is_twin(other: Node, node: Node, twins: Mapping[Node, Node]) -> bool:
    if other.op != node.op or node.op == "placeholder":
        return other.op == node.op
    return other.target == node.target and _same(_plain(other), _plain(node), twins)


def is_first(node: Node) -> bool:
    """Return whether a slice begins with the first position and leaves out none between."""
    given = named(node)
    return given.get("start", 0) in (0, None) and given.get("step", 1) == 1


def _call(node: Node) -> str:
    rest = [str(item) for item in arguments(node) if not isinstance(item, Node)]
    return f"{node.target}({', '.join(rest)})"


def _plain(node: Node) -> dict[str, Any]:
    """Return a node's arguments by name without those that are sizes."""
    if not isinstance(cast(object, node.target), OpOverload):
        return {"args": node.args, **node.kwargs}
    return {name: value for name, value in named(node).items() if name not in SIZES}


def named(node: Node) -> dict[str, Any]:
    """Return the arguments of a call by the names of its op's schema, those left out not."""
    target: Any = node.target
    schema = [argument.name for argument in target._schema.arguments]
    return {**dict(zip(schema, node.args)), **node.kwargs}


def _same(a: object, b: object, twins: Mapping[Node, Node]) -> bool:
    same_kind = type(a) is type(b)  # 1 is not 1.0
    if isinstance(a, Node) and isinstance(b, Node):
        return twins[b] is a
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        left, right = cast("tuple[Any, ...]", a), cast("tuple[Any, ...]", b)
        return len(left) == len(right) and all(_same(x, y, twins) for x, y in zip(left, right))
    if isinstance(a, dict) and isinstance(b, dict):
        left, right = cast("dict[Any, Any]", a), cast("dict[Any, Any]", b)
        return list(left) == list(right) and _same([*left.values()], [*right.values()], twins)
    return same_kind and a == b


def name_of(node: Node) -> str:
    """Return the name of the op that a node calls, without the namespace aten."""
    if isinstance(cast(object, node.target), OpOverload):
        return op_name(node).removeprefix("aten::")
    return str(getattr(node.target, "__name__", node.target))
