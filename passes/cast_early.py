"""Cast to a smaller dtype before values move: the gathers of parameters in a compute dtype, or under autocast, move half the bytes.

Before:  %g: f32[256@y, 64@z] ~x  = all_gather(%weight, axis=x, dim=0)
         %c: bf16[256@y, 64@z] ~x = aten._to_copy(%g, dtype=torch.bfloat16)
After:   %c: bf16[256@y.x, 64@z]  = aten._to_copy(%weight, dtype=torch.bfloat16)
         %g: bf16[256@y, 64@z] ~x = all_gather(%c, axis=x, dim=0)

The gradient is then reduced in the smaller dtype too, unless `reduce_dtype` says otherwise.

Requires: insert_collectives; sizes global.
Ensures: no value is moved and only then made smaller, where nothing else reads it as it was; the same values. Idempotent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from partir.graph import collective_name, is_collective, layout_of, operands, tensor_of
from partir.layout import Layout, dtype_name

MOVES = frozenset({"all_gather", "all_gather_same", "slice", "spread", "settle", "all_to_all", "broadcast"})
CAST = torch.ops.aten._to_copy.default


def cast_early(graph_module: GraphModule) -> GraphModule:
    """Return the graph with casts before the collectives whose results they make smaller."""
    graph = graph_module.graph
    for node in reversed(list(graph.nodes)):
        if node.target is CAST and not node._erased:  # pyright: ignore[reportPrivateUsage]
            _move_up(node)
    graph.lint()
    graph_module.recompile()
    return graph_module


def _move_up(cast_node: Node) -> None:
    """Exchange a cast with the collectives above it, one after the other, as long as nothing else reads them."""
    moved = cast(Node, cast_node.args[0])
    while is_collective(moved) and collective_name(moved) in MOVES and _casts_alike(moved, cast_node):
        source = operands(moved)[0]
        with moved.graph.inserting_before(moved):
            early = moved.graph.call_function(CAST, (source,), dict(cast_node.kwargs))
            late = moved.graph.call_function(cast(Any, moved.target), (early, *moved.args[1:]), dict(moved.kwargs))
        early.meta = {**cast_node.meta, "layout": _as(layout_of(source), cast_node), "subdims": source.meta["subdims"]}
        early.meta["origin"] = cast_node.meta.get("origin", cast_node.name)
        late.meta = {**moved.meta, **_reader_of(cast_node, moved), "layout": _as(layout_of(moved), cast_node), "val": tensor_of(cast_node)}
        for other in list(moved.users):
            other.replace_all_uses_with(late)
            moved.graph.erase_node(other)
        moved.graph.erase_node(moved)
        cast_node, moved = early, source


def _casts_alike(moved: Node, cast_node: Node) -> bool:
    """Return whether all that read a moved value make it smaller in the same way."""
    smaller = tensor_of(cast_node).dtype.itemsize < tensor_of(moved).dtype.itemsize
    alike = all(user.target is CAST and dict(user.kwargs) == dict(cast_node.kwargs) for user in moved.users)
    return smaller and alike and tensor_of(moved).is_floating_point()


def _as(layout: Layout, cast_node: Node) -> Layout:
    return replace(layout, dtype=dtype_name(tensor_of(cast_node).dtype))


def _reader_of(cast_node: Node, moved: Node) -> dict[str, Any]:
    """Return line and reason of what reads a cast value: it is for that reader that a collective moves it."""
    origin, reader = str(cast_node.meta.get("origin", cast_node.name)), next(iter(cast_node.users), None)
    while reader is not None and is_collective(reader):
        reader = next(iter(reader.users), None)
    reason = str(moved.meta.get("reason", ""))
    if reader is None or reader.op == "output" or not reason.endswith(f" for {origin}"):
        return {}
    kept = {key: reader.meta[key] for key in ("nn_module_stack", "stack_trace") if key in reader.meta}
    return {**kept, "reason": reason.removesuffix(f" for {origin}") + f" for {reader.meta.get('origin', reader.name)}"}
