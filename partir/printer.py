"""The text of a graph, one line a node: the same in docs, logs, errors and golden tests.

    %g: f32[16@x, 64@z] ~y  = all_gather(%x, axis=y, dim=0)
    %c: f32[16@x, 256@y] +z = aten.linear(%g, %h)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from partir.graph import is_collective, is_getitem
from partir.layout import Layout, dtype_name


def graph_text(graph_module: GraphModule, names: Mapping[str, str] | None = None) -> str:
    """Return the graph as text, ASCII, the same for every run.

    Args:
        names: a name to print for a placeholder in place of fx's own (``fc1.weight`` for ``p_fc1_weight``).
    """
    shown = {node: f"%{(names or {}).get(node.name) or user_name(node)}" for node in graph_module.graph.nodes}
    rows = [_row(node, shown) for node in graph_module.graph.nodes if node.op != "output"]
    width = max((len(left) for left, _, _ in rows if len(left) < 60), default=0)
    lines = [f"{left:<{width}}{' = ' + right if right else ''}{note}".rstrip() for left, right, note in rows]
    output = next((node for node in graph_module.graph.nodes if node.op == "output"), None)
    if output is not None:
        lines.append(f"return {_value(output.args[0], shown)}")
    return "\n".join(lines) + "\n"


def _row(node: Node, shown: Mapping[Node, str]) -> tuple[str, str, str]:
    left = f"{shown[node]}: {type_text(node)}"
    if node.op == "placeholder":
        return left, "", _facts(node)
    return left, _call(node, shown), _facts(node)


def user_name(node: Node) -> str:
    """Return the user's name of a parameter, input, gradient or tangent of a program's graph, else the node's name."""
    gradient = node.meta.get("gradient") or node.meta.get("tangent")
    return f"d_{gradient}" if gradient else str(node.meta.get("slot") or node.name)


def type_text(node: Node) -> str:
    """Return the layouts of a node's results, or their plain types: global before annotation, ``local`` in a rank's program."""
    value, layout = node.meta.get("val"), node.meta.get("layout")
    if layout is not None:
        layouts = (layout,) if isinstance(layout, Layout) else tuple(layout)
        text = "; ".join(str(item) for item in layouts)
    else:
        values = (value,) if isinstance(value, torch.Tensor) else tuple(value or ())
        text = "; ".join(f"{dtype_name(item.dtype)}[{', '.join(map(str, item.shape))}]" for item in values if item is not None)
        text = f"local {text}" if node.meta.get("stage") and text else text
    return text if isinstance(value, torch.Tensor) else f"({text})"


def _local(node: Node) -> str:
    """Return ``local [4, 32]`` for a node of one rank's graph whose block is smaller than the whole."""
    value, layout = node.meta.get("val"), node.meta.get("layout")
    if layout is None or value is None:
        return ""
    values = (value,) if isinstance(value, torch.Tensor) else tuple(value)
    layouts = (layout,) if isinstance(layout, Layout) else tuple(layout)
    if all(tuple(item.shape) == whole.shape for item, whole in zip(values, layouts)):
        return ""
    return "local " + "; ".join(f"[{', '.join(map(str, item.shape))}]" for item in values)


def _facts(node: Node) -> str:
    facts = [_local(node), *_choices(node)]
    text = ", ".join(fact for fact in facts if fact)
    return f"    # {text}" if text else ""


def _choices(node: Node) -> list[str]:
    """Return what annotate has chosen for a node: block, direction and state."""
    layout = node.meta.get("layout")
    if "operands" not in node.meta and not (node.op == "placeholder" and node.meta.get("direction")):
        return []
    chosen = {
        "block": layout.block if isinstance(layout, Layout) else "",
        "direction": node.meta.get("direction"),
        "state": node.meta.get("state"),
    }
    return [f"{name} {value}" for name, value in chosen.items() if value]


def op_text(node: Node) -> str:
    """Return an op's name: ``aten.linear``, ``all_gather``, ``masked_embedding``."""
    target = cast(Any, node.target)
    if is_getitem(node):
        return "getitem"
    if is_collective(node):
        return str(target._schema.name).removeprefix("partir::")
    if hasattr(target, "_schema"):
        overload = str(target._overloadname)
        name = str(target._schema.name).replace("::", ".")
        return name if overload in ("default", "") else f"{name}.{overload}"
    return str(target.__name__)


def _call(node: Node, shown: Mapping[Node, str]) -> str:
    if is_getitem(node):
        return f"{_value(node.args[0], shown)}[{node.args[1]}]"
    plain = is_collective(node)
    if plain:
        schema = [argument.name for argument in cast(Any, node.target)._schema.arguments]
        named = dict(zip(schema, node.args)) | dict(node.kwargs)
        items = [_value(named.pop(schema[0]), shown)] if schema[0] in ("t", "ts") else []
        items += [f"{name}={_value(value, shown, plain)}" for name, value in named.items()]
    else:
        items = [_value(item, shown) for item in node.args]
        items += [f"{name}={_value(value, shown)}" for name, value in node.kwargs.items()]
    return f"{op_text(node)}({', '.join(items)})"


def _value(item: Any, shown: Mapping[Node, str], plain: bool = False) -> str:
    if isinstance(item, Node):
        return shown[item]
    if isinstance(item, (list, tuple)):
        return "[" + ", ".join(_value(part, shown) for part in cast("list[Any]", item)) + "]"
    return str(item) if plain or not isinstance(item, str) else repr(item)
