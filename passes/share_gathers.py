"""Make collectives that say the same thing one node, and views and constants likewise.

Before
    %g1: f32[16@x, 64@z] ~y = all_gather(%x, axis=y, dim=0)
    %q = aten.linear(%g1, %wq)
    %g2: f32[16@x, 64@z] ~y = all_gather(%x, axis=y, dim=0)
    %k = aten.linear(%g2, %wk)
After
    %g1: f32[16@x, 64@z] ~y = all_gather(%x, axis=y, dim=0)
    %q = aten.linear(%g1, %wq)
    %k = aten.linear(%g1, %wk)

Run before differentiation it also shares the backward: the gradients of q and k are added and reduce-scattered once.

Requires: a graph without mutation. Ensures: no two partir ops or views have the same operands and arguments.
Idempotent.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, cast

from torch.fx import Graph, GraphModule, Node

from partir.graph import Unprinted
from partir.passes.node_facts import collective, is_getitem, is_view


def share_gathers(module: GraphModule) -> GraphModule:
    """Return a copy of ``module`` in which repeated collectives and views are shared."""
    shared = copy_module(module)
    merge_repeated(shared.graph)
    shared.recompile()
    return shared


def merge_repeated(graph: Graph) -> None:
    """Replace each repeated collective or view of ``graph`` by the first of its kind."""
    first: dict[Hashable, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not (collective(node) or is_view(node) or is_getitem(node)):
            continue
        key = argument_key((node.target, node.args, node.kwargs))
        kept = first.setdefault(key, node)
        if kept is node:
            continue
        node.replace_all_uses_with(kept)
        graph.erase_node(node)


def copy_module(module: GraphModule) -> GraphModule:
    """Return a module with its own copy of the graph and of each node's ``meta``."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    results = graph.graph_copy(module.graph, copies)
    output = graph.output(results)
    output.meta.update(next(iter(reversed(module.graph.nodes))).meta)
    return Unprinted(module, graph)


def argument_key(value: Any) -> Hashable:
    """Return a hashable stand-in for an argument, telling 1 from 1.0 and True."""
    if isinstance(value, (list, tuple)):
        return ("list", *(argument_key(item) for item in cast("tuple[Any, ...]", value)))
    if isinstance(value, dict):
        return ("dict", *((name, argument_key(item)) for name, item in sorted(cast("dict[str, Any]", value).items())))
    if isinstance(value, slice):
        bounds = cast("slice[Any, Any, Any]", value)
        return ("slice", argument_key(bounds.start), argument_key(bounds.stop), argument_key(bounds.step))
    return (cast(object, type(value)), value)
