"""Small readers of fx graphs whose nodes carry layouts; the one place where fx's loose types are cast."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Interpreter, Node

from partir.layout import Layout


class Unprinted(GraphModule):
    """A graph that is read, or interpreted: no code is made of it until somebody asks. (Making it took a fifth of a compilation.)"""

    def recompile(self) -> Any:
        """Make no code; see `torch.fx.GraphModule.recompile`."""

    @property
    def code(self) -> str:
        """The code that `torch.fx` would make."""
        return self.graph.python_code("self").src

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Run node by node."""
        return Interpreter(self).run(*tensors)

    def __str__(self) -> str:
        return f"{type(self).__name__}\n{self.graph}"


def create_call(graph: Graph, target: Any, args: Any, kwargs: Any, name: str) -> Node:
    """Append a call to a graph.

    The arguments are set afterwards: `Graph.create_node` would look through them for symbolic sizes, which takes a third of its time.
    """
    node = graph.create_node("call_function", target, (), {}, name)
    node.args, node.kwargs = args, kwargs
    return node


def operands(node: Node) -> list[Node]:
    """Return the tensor operands of a call in the order of its schema, lists flattened, absent ones left out."""
    return [item for item in _flatten(arguments(node)) if is_tensor(item)]


def arguments(node: Node) -> list[Any]:
    """Return every argument of a call in the order of its op's schema (positional, then by keyword)."""
    if not node.kwargs or not isinstance(cast(object, node.target), OpOverload):
        return [*node.args, *node.kwargs.values()]
    found: list[Any] = []
    for index, argument in enumerate(cast(Any, node.target)._schema.arguments):
        if index < len(node.args):
            found.append(node.args[index])
        elif argument.name in node.kwargs:
            found.append(node.kwargs[argument.name])
    return found


def is_tensor(item: object) -> bool:
    """Return whether an argument is a node that holds one tensor."""
    return isinstance(item, Node) and isinstance(item.meta.get("val"), torch.Tensor)


def tensor_of(node: Node) -> torch.Tensor:
    """Return the fake tensor of a node that holds one tensor."""
    return cast(torch.Tensor, node.meta["val"])


def results_of(node: Node) -> tuple[torch.Tensor, ...]:
    """Return the fake tensors that a node produces."""
    value = node.meta["val"]
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def tensors_of(node: Node) -> tuple[torch.Tensor, ...]:
    """Return those results of a node that are tensors: a backward formula leaves out the gradients that nobody wants."""
    value = cast(Any, node.meta.get("val"))
    if isinstance(value, torch.Tensor):
        return (value,)
    several = cast("tuple[object, ...]", value) if isinstance(value, (list, tuple)) else ()
    return tuple(one for one in several if isinstance(one, torch.Tensor))


def layouts_of(node: Node) -> tuple[Layout, ...]:
    """Return the layouts of a node's results."""
    layout = node.meta["layout"]
    return (layout,) if isinstance(layout, Layout) else tuple(layout)


def layout_of(node: Node) -> Layout:
    """Return the layout of a node that holds one tensor."""
    return cast(Layout, node.meta["layout"])


def is_getitem(node: Node) -> bool:
    """Return whether a node takes one result of a call with several."""
    return node.op == "call_function" and node.target is operator.getitem


def is_call(node: Node) -> bool:
    """Return whether a node calls an op or a local function."""
    return node.op == "call_function" and not is_getitem(node)


def is_collective(node: Node) -> bool:
    """Return whether a node calls an op of the namespace ``partir``."""
    return node.op == "call_function" and getattr(node.target, "namespace", None) == "partir"


def collective_name(node: Node) -> str:
    """Return ``all_gather`` for a node that calls ``torch.ops.partir.all_gather.default``."""
    return str(cast(Any, node.target)._schema.name).removeprefix("partir::")


def is_view(node: Node) -> bool:
    """Return whether a call, by its op's schema, only looks at its operand's storage."""
    if not is_call(node) or not isinstance(cast(object, node.target), OpOverload):
        return False
    aliases = [result.alias_info for result in cast(Any, node.target)._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def gives_gradient(node: Node) -> bool:
    """Return whether a call's results have gradients where its operands have: all but ``detach``."""
    return not str(node.target).startswith("aten.detach")


def outputs_of(graph_module: GraphModule) -> list[Any]:
    """Return the flat outputs of a graph."""
    output = next(node for node in reversed(graph_module.graph.nodes) if node.op == "output")
    values = output.args[0]
    return list(cast("tuple[Any, ...]", values)) if isinstance(values, (tuple, list)) else [values]


def replace_operands(node: Node, reads: Sequence[Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments with each operand's read, in schema order, where it stood."""
    positions: dict[Node, list[Node]] = {}
    for operand, read in zip(operands(node), reads):
        positions.setdefault(operand, []).append(read)

    def swap(old: Node) -> Node:
        found = positions[old]
        return found.pop(0) if len(found) > 1 else found[0]

    args = torch.fx.map_arg(node.args, swap)
    kwargs = torch.fx.map_arg(dict(node.kwargs), swap)
    return cast("tuple[Any, ...]", args), cast("dict[str, Any]", kwargs)


def with_attributes(
    node: Node, args: Sequence[Any], kwargs: Mapping[str, Any], changed: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments with other values of some attributes, by schema name."""
    schema = [argument.name for argument in cast(Any, node.target)._schema.arguments]
    listed, named = list(args), dict(kwargs)
    for name, value in changed.items():
        if name in schema and schema.index(name) < len(listed):
            listed[schema.index(name)] = value
        else:
            named[name] = value
    return tuple(listed), named


def _flatten(items: Any) -> Iterator[Any]:
    for item in items:
        if isinstance(item, (list, tuple)):
            yield from _flatten(cast("list[Any]", item))
        else:
            yield item
