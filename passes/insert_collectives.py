"""Insert the collectives that bring each value from the layout at rest to the layout that its reader wants.

Before:  %c: f32[16@x.z, 256@y]  = aten.linear(%x, %w)          (wants f32[16@x, 64@z] ~y, computes f32[16@x, 256@y] +z)
After:   %g: f32[16@x, 64@z] ~y  = all_gather(%x, axis=y, dim=0)
         %h: f32[256@y, 64@z] ~x = all_gather(%w, axis=x, dim=0)
         %c: f32[16@x, 256@y] +z = aten.linear(%g, %h)
         %r: f32[16@x.z, 256@y]  = reduce_scatter(%c, axis=z, dim=0)

Requires: annotate_layouts.
Ensures: every node's ``meta["layout"]`` is what it holds, operands are read in the layout they have; sizes stay global;
    ``meta["subdims"]`` names the sizes of each node's results, as factorise_dims does.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from partir.dims import Dim, Part
from partir.graph import Unprinted, is_getitem, layout_of, layouts_of, operands, outputs_of, replace_operands
from partir.layout import Layout
from partir.mesh import Mesh
from partir.relayout import relayout

KEPT = (
    *("binding", "factors", "broken", "subdims", "pads", "result_pads", "site", "assignment", "state", "direction"),
    *("nn_module_stack", "stack_trace"),
)


def insert_collectives(graph_module: GraphModule, mesh: Mesh, sharded_outputs: Sequence[bool]) -> GraphModule:
    """Return a new graph with collectives between values and their readers.

    Args:
        mesh: the ranks.
        sharded_outputs: for each output, whether it leaves as blocks; the others leave whole.
    """
    inserter = _Inserter(mesh)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            inserter.copy_placeholder(node)
        elif is_getitem(node):
            inserter.rest[node] = inserter.results[(cast(Node, node.args[0]), cast(int, node.args[1]))]
        elif node.op == "call_function":
            inserter.call(node)
    outputs = [
        inserter.output(value, sharded)
        for value, sharded in zip(outputs_of(graph_module), sharded_outputs, strict=True)
    ]
    result = inserter.graph.output(tuple(outputs))
    result.meta["layouts"] = tuple(layout_of(value) if isinstance(value, Node) else None for value in outputs)
    return Unprinted({}, inserter.graph)


class _Inserter:
    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.graph = Graph()
        self.rest: dict[Node, Node] = {}
        self.results: dict[tuple[Node, int], Node] = {}

    def copy_placeholder(self, node: Node) -> None:
        new = self.graph.placeholder(node.name)
        new.meta = {
            "val": node.meta["val"],
            "layout": node.meta["layout"].strip(self.mesh),
            "subdims": node.meta["subdims"],
            "origin": node.name,
            "reason": "input",
        }
        self.rest[node] = new

    def call(self, node: Node) -> None:
        wanted: tuple[Layout, ...] = node.meta["operands"]
        reads = [self.bring(self.rest[o], layout, node, "operand") for o, layout in zip(operands(node), wanted)]
        args, kwargs = replace_operands(node, reads)
        new = self.graph.call_function(cast(Any, node.target), args, kwargs, name=node.name)
        new.meta = {key: node.meta[key] for key in KEPT if key in node.meta}
        computed = tuple(layout.strip(self.mesh) for layout in _as_tuple(node.meta["computed"]))
        single = isinstance(node.meta["val"], torch.Tensor)
        new.meta |= {
            "val": node.meta["val"],
            "layout": computed[0] if single else computed,
            "origin": node.name,
            "reason": "call",
        }
        if single:
            self.rest[node] = self.bring(new, layouts_of(node)[0], node, "result")
            return
        for index, (layout, value) in enumerate(zip(computed, node.meta["val"])):
            item = self.graph.call_function(operator.getitem, (new, index))
            item.meta = {**_trace_of(node), "val": value, "layout": layout, "origin": node.name, "reason": "call"}
            item.meta["subdims"] = node.meta["subdims"][index : index + 1]
            self.results[(node, index)] = self.bring(item, layouts_of(node)[index], node, "result")

    def bring(self, value: Node, layout: Layout, reader: Node, role: str) -> Node:
        """Return ``value`` in ``layout``, through the cheapest chain of collectives.

        Args:
            value: of the new graph.
            layout: wanted.
            reader: the annotated node for which it is done.
            role: what the value is to it: "operand", "result", or "output" of the program.
        """
        layout = layout.strip(self.mesh)
        source = _origin(value)
        held = cast(Layout, value.meta["layout"])
        if held.grad and not layout.grad:
            layout = replace(layout, grad=True)
        for step in relayout(held, layout, self.mesh).steps:
            target = getattr(torch.ops.partir, step.op).default
            new = self.graph.call_function(target, (value,), dict(step.kwargs))
            new.meta = {
                **_trace_of(reader),
                "val": value.meta["val"],
                "layout": step.result,
                "subdims": value.meta["subdims"],
                "origin": reader.name,
                "reason": f"{source} for {reader.name}" if role == "operand" else f"{role} of {reader.name}",
            }
            value = new
        return value

    def output(self, value: Any, sharded: bool) -> Any:
        if not isinstance(value, Node):
            return value
        held = self.rest[value]
        return self.bring(held, output_layout(held.meta["layout"], sharded), value, "output")


def output_layout(layout: Layout, sharded: bool) -> Layout:
    """Return the layout in which a value leaves the program: its blocks, or whole on every rank. Never R, never pending."""
    if sharded:
        return replace(layout, pending=(), varied=())
    return replace(layout, dims=tuple(Dim((Part(dim.size),)) for dim in layout.dims), pending=(), varied=())


def _trace_of(node: Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in ("nn_module_stack", "stack_trace", "site") if key in node.meta}


def _origin(value: Node) -> str:
    """Return whose value it is; a parameter's in a compute dtype is the parameter's."""
    if value.target is torch.ops.aten._to_copy.default and operands(value)[0].op == "placeholder":
        value = operands(value)[0]
    return str(value.meta["origin"])


def _as_tuple(layout: Any) -> tuple[Layout, ...]:
    return (layout,) if isinstance(layout, Layout) else tuple(layout)
