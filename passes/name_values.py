"""Give every value that the compiler made a short name, numbered in the order of the graph.

Before:  %all_gather_default_7: f32[128@y, 32@z] ~x    = all_gather(%blocks.0.mlp.fc1.weight, axis=x, dim=0)
         %reshape_default_3: f32[16@x.z, 8, 32@y]      = aten.reshape(%transpose_3, [4, 8, 16])
         %sum_dim_int_list_4: f32[16@x.y, 8, 1] +z     = aten.sum.dim_IntList(%add_1, [2], True)
After:   %all_gather_5: f32[128@y, 32@z] ~x            = all_gather(%blocks.0.mlp.fc1.weight, axis=x, dim=0)
         %flatten: f32[16@x.z, 8, 32@y]                = aten.reshape(%transpose_3, [4, 8, 16])
         %sum_3: f32[16@x.y, 8, 1] +z                  = aten.sum.dim_IntList(%add_1, [2], True)

A call, and what a recipe computes in place of a call, keeps the name that its value has in the annotated graph.

Ensures: the same graph under other names; no name of the annotated graph means another value. Idempotent.
"""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Iterable
from typing import Any, cast

from torch.fx import Graph, GraphModule, Node, map_arg

from partir.graph import Unprinted, create_call, is_collective, is_getitem


def name_values(graph_module: GraphModule, annotated: GraphModule) -> GraphModule:
    """Return the graph with short names.

    Args:
        graph_module: the lowered graph.
        annotated: the graph whose names its calls keep.
    """
    results = {(cast(Node, n.args[0]).name, n.args[1]): n.name for n in annotated.graph.nodes if is_getitem(n)}
    names = Names(node.name for node in annotated.graph.nodes)
    recipes = _recipe_results(graph_module)
    graph, copies = Graph(), dict[Node, Node]()
    used: set[str] = set()
    for node in graph_module.graph.nodes:
        name = recipes.get(node) or _kept_name(node, results)
        if name is None or name in used:
            name = names.free(short_name(node))
        used.add(name)
        copies[node] = copy_as(graph, node, copies, name)
        copies[node].meta = dict(node.meta)
    return Unprinted({}, graph)


def _recipe_results(graph_module: GraphModule) -> dict[Node, str]:
    """Return the name of the call that a recipe stands for, by the recipe's one node that others read."""
    read: dict[str, list[Node]] = {}
    for node in graph_module.graph.nodes:
        origin = node.meta.get("origin")
        if node.meta.get("reason") == "recipe" and any(user.meta.get("origin") != origin for user in node.users):
            read.setdefault(str(origin), []).append(node)
    return {nodes[0]: origin for origin, nodes in read.items() if len(nodes) == 1}


def _kept_name(node: Node, results: dict[tuple[str, Any], str]) -> str | None:
    """Return the name that a node's value has in the annotated graph, None for what the compiler has added."""
    if node.op != "call_function":
        return node.name
    if node.meta.get("reason") != "call" or is_collective(node):
        return None
    origin = str(node.meta["origin"])
    return results.get((origin, node.args[1])) if is_getitem(node) else origin


def copy_as(graph: Graph, node: Node, copies: dict[Node, Node], name: str) -> Node:
    """Copy a node into another graph under a name that must be free there."""
    args, kwargs = cast(Any, map_arg((node.args, node.kwargs), copies.__getitem__))
    if node.op == "call_function":
        copy = create_call(graph, node.target, args, kwargs, name)
    else:
        copy = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
    assert node.op == "output" or copy.name == name, f"{name} is taken"
    return copy


def short_name(node: Node) -> str:
    """Return the bare name of what a node calls: ``all_gather``, ``sum``, ``masked_embedding``."""
    target = cast(Any, node.target)
    if node.op != "call_function":
        return node.name
    if hasattr(target, "_schema"):
        return str(target._schema.name).rsplit("::", 1)[1]
    return str(target.__name__)


class Names:
    """Free names, ``base``, ``base_1``, ``base_2``, in the order asked.

    >>> names = Names(["add"])
    >>> names.free("add"), names.free("add"), names.free("mul"), names.free("sum")
    ('add_1', 'add_2', 'mul', 'sum_1')
    """

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = {*taken, *keyword.kwlist, *dir(builtins)}
        self._next: dict[str, int] = {}

    def free(self, base: str) -> str:
        """Return a name that nothing has, and take it."""
        number = self._next.get(base, 0)
        name = f"{base}_{number}" if number else base
        while name in self._taken:
            number += 1
            name = f"{base}_{number}"
        self._next[base] = number + 1
        self._taken.add(name)
        return name
