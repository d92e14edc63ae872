"""Gather all the small parameters of a layer along an axis in one message; their gradients then leave in one reduce-scatter.

Before:  %a: f32[64@z] ~x = all_gather(%ln.weight, axis=x, dim=0)
         %b: f32[64@z] ~x = all_gather(%ln.bias, axis=x, dim=0)
After:   %g: (f32[64@z] ~x; f32[64@z] ~x) = all_gather_bucket([%ln.weight, %ln.bias], axis=x)
         %a: f32[64@z] ~x = %g[0]
         %b: f32[64@z] ~x = %g[1]

A layer is a module that is an item of a list (``blocks.3``). The bucket's backward is one reduce_scatter_bucket. What stands between
a parameter and its gather (a spread) moves up with it. A vector that is read several times is in the bucket once.

Requires: localize_shapes.
Ensures: the same values; fewer messages, the same bytes. Idempotent.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable
from typing import cast

import torch
from torch.fx import Graph, GraphModule, Node

from partir.errors import module_path
from partir.graph import collective_name, is_collective, layout_of, tensor_of, tensors_of
from partir.mesh import Mesh
from partir.passes.share_gathers import argument_key

LARGEST = 1 << 16  # elements of a rank's block; larger gathers are worth a message of their own
LOCAL = frozenset({"spread", "settle", "once", "slice", "zero_pad"})
CAST = torch.ops.aten._to_copy.default
Key = tuple[str, str, torch.dtype, bool, int]


def bucket_vectors(graph_module: GraphModule, mesh: Mesh) -> GraphModule:
    """Return the graph with one gather for each layer, axis and dtype in place of many small ones."""
    _share(graph_module.graph)
    groups: dict[Key, list[Node]] = defaultdict(list)
    for node in graph_module.graph.nodes:
        key = _key(node)
        if key is not None:
            groups[key].append(node)
    for gathers in groups.values():
        if len(gathers) > 1:
            _bucket(graph_module.graph, gathers)
    graph_module.graph.lint()
    graph_module.recompile()
    return graph_module


def _share(graph: Graph) -> None:
    """Let equal steps from a vector to what is gathered of it be one, as `share_gathers` does for all else: a bias is read at every step
    of a recurrent layer, and would be in the bucket as often.
    """
    first: dict[Hashable, Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and _chain(node) and tensors_of(node)[0].dim() == 1:
            kept = first.setdefault(argument_key((node.target, node.args, node.kwargs)), node)
            if kept is not node:
                node.replace_all_uses_with(kept)
                graph.erase_node(node)


def _key(node: Node) -> Key | None:
    """Return what gathers must share to travel together, or None for a gather that travels alone."""
    if not is_collective(node) or collective_name(node) != "all_gather":
        return None
    source = cast(Node, node.args[0])
    chain = _chain(source)
    if chain is None or node.kwargs["dim"] != 0 or node.kwargs.get("blocks", 1) != 1:
        return None
    value = tensor_of(source)
    if value.dim() != 1 or value.numel() > LARGEST:
        return None
    moved = sum(is_collective(link) and collective_name(link) not in LOCAL for link in chain)
    return layer_of(node), cast(str, node.kwargs["axis"]), value.dtype, layout_of(node).grad, moved


def _chain(node: Node) -> list[Node] | None:
    """Return the collectives and casts between a parameter and the node that it becomes, in order; None for a computed value."""
    chain: list[Node] = []
    while node.op != "placeholder":
        if not (is_collective(node) or node.target is CAST) or len(node.all_input_nodes) != 1:
            return None
        chain.append(node)
        node = node.all_input_nodes[0]
    return chain[::-1]


def layer_of(node: Node) -> str:
    """Return the path of the innermost list item that made a node: ``blocks.3`` of ``blocks.3.mlp.fc1``."""
    parts = module_path(node.meta).split(".")
    numbered = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[0] + 1]) if numbered else ""


def _bucket(graph: Graph, gathers: list[Node]) -> None:
    first, sources = gathers[0], [cast(Node, gather.args[0]) for gather in gathers]
    chains = [_chain(source) for source in sources]
    if any(chain is None for chain in chains):
        return
    for link in (link for chain in chains for link in chain or () if first < link):
        first.prepend(link)
    with graph.inserting_before(first):
        bucket = graph.call_function(torch.ops.partir.all_gather_bucket.default, (sources, first.kwargs["axis"]))
        items = [graph.call_function(operator.getitem, (bucket, index)) for index in range(len(gathers))]
    bucket.meta = {key: first.meta[key] for key in ("stack_trace", "nn_module_stack", "origin") if key in first.meta}
    bucket.meta["reason"] = f"vectors of {layer_of(first) or 'the model'}"
    bucket.meta["val"] = [tensor_of(gather) for gather in gathers]
    bucket.meta["layout"] = tuple(layout_of(gather) for gather in gathers)
    bucket.meta["subdims"] = tuple(gather.meta["subdims"][0] for gather in gathers)
    for item, gather in zip(items, gathers):
        item.meta = dict(gather.meta)
        gather.replace_all_uses_with(item)
        graph.erase_node(gather)
