"""Write the two halves of a partitioned joint graph as graphs of their own, with readable names and origins.

A node that computes the value of a lowered node takes its name and its layout; every node, forward or backward,
keeps ``reason``, ``origin``, ``stack_trace`` and ``nn_module_stack`` of the lowered node that it serves, and says in
``meta["stage"]`` where it runs; ``meta["again"]`` marks a forward value that the backward computes again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from partir.layout import Layout
from partir.mesh import Mesh
from partir.passes import aot
from partir.passes.node_facts import is_getitem, operands, shape_and_dtype
from partir.passes.partition import Partition, is_tangent
from partir.program import Slot

KEPT = ("reason", "origin", "stack_trace", "nn_module_stack")


def extract_forward(
    parts: Partition, lowered: GraphModule, mesh: Mesh, slots: Sequence[Slot], copies: Sequence[bool]
) -> GraphModule:
    """Return the graph ``(*inputs) -> (*outputs, *saved)``.

    Args:
        parts: the partition.
        lowered: the graph that the joint one was traced from.
        mesh: for the local shapes of layouts.
        slots: one for each input.
        copies: for each output, whether it must be a copy.
    """
    writer = _Writer(lowered, "forward")
    skipped = [node for node, copy in zip(parts.outputs, copies, strict=True) if not copy]
    names = _value_names(parts, lowered, mesh)
    sources = iter(zip(lowered.graph.find_nodes(op="placeholder"), slots, strict=True))
    for node in parts.forward:
        if node in skipped:
            writer.copies[node] = writer.copies[operands(node)[0]]
        elif node.op == "placeholder":
            source, slot = next(sources)
            writer.placeholder(node, source.name, {**_kept(source), "slot": slot.name, "layout": slot.layout})
        else:
            writer.write(node, *names.get(node, (None, None)))
    return writer.finish([*parts.outputs, *parts.saved])


def extract_backward(
    parts: Partition,
    joint: GraphModule,
    lowered: GraphModule,
    forward: GraphModule,
    slots: Sequence[Slot],
    tangents: Sequence[str],
) -> GraphModule:
    """Return the graph ``(*saved, *tangents) -> gradients``, a gradient named ``d_`` and its input's name."""
    writer = _Writer(lowered, "backward")
    sources = cast("tuple[Node, ...]", forward.graph.output_node().args[0])[len(parts.outputs) :]
    for node, source in zip(parts.saved, sources, strict=True):
        kept = {key: source.meta[key] for key in ("layout", "slot", *KEPT) if key in source.meta}
        writer.placeholder(node, source.name, {**kept, "saved": source.name})
    for node, name in zip(filter(is_tangent, joint.graph.find_nodes(op="placeholder")), tangents, strict=True):
        writer.placeholder(node, f"d_{name}", {"tangent": name})
    gradient_of = {
        gradient: slot for gradient, slot in zip(parts.gradients, slots, strict=True) if gradient is not None
    }
    for node in parts.backward:
        slot = gradient_of.get(node)
        copy = writer.write(node, f"d_{slot.name}" if slot else None, None)
        copy.meta["again"] = not aot.is_backward(node)
        if slot is not None:
            copy.meta.update(gradient=slot.name, layout=slot.layout)
    return writer.finish(parts.gradients)


class _Writer:
    """Copies nodes of a joint graph into a new graph."""

    def __init__(self, lowered: GraphModule, stage: str) -> None:
        self.graph = Graph()
        self.copies: dict[Node, Node] = {}
        self._stage = stage
        self._origins = {node.name: node for node in lowered.graph.nodes}

    def placeholder(self, node: Node, name: str, meta: dict[str, Any]) -> None:
        """Copy a joint node as a placeholder."""
        copy = self.graph.create_node("placeholder", _identifier(name), name=_identifier(name))
        copy.meta.update(val=node.meta.get("val"), stage=self._stage, **meta)
        self.copies[node] = copy

    def write(self, node: Node, name: str | None, layout: Layout | None) -> Node:
        """Copy a joint node, with the facts of the lowered node that it serves."""
        copy = self.graph.node_copy(node, self.copies.__getitem__)
        if name is not None:
            copy._rename(_identifier(name))  # pyright: ignore[reportPrivateUsage]
        source = self._origins.get(aot.origin(node) or "")
        facts = _kept(source) if source is not None else {}
        copy.meta = {"val": node.meta.get("val"), "stage": self._stage, **facts}
        if layout is not None:
            copy.meta["layout"] = layout
        self.copies[node] = copy
        return copy

    def finish(self, results: Sequence[Node | None]) -> GraphModule:
        """Return the graph's module with these results."""
        self.graph.output(tuple(None if result is None else self.copies[result] for result in results))
        self.graph.lint()
        return GraphModule(torch.nn.Module(), self.graph)


def _value_names(parts: Partition, lowered: GraphModule, mesh: Mesh) -> dict[Node, tuple[str | None, Layout]]:
    """Return the lowered name and layout of the forward nodes that hold a lowered node's value."""
    last: dict[str, Node] = {}
    names: dict[Node, tuple[str | None, Layout]] = {}
    origins = {node.name: node for node in lowered.graph.nodes}
    for node in parts.forward:
        source = origins.get(aot.origin(node) or "")
        if source is None or node.op != "call_function":
            continue
        layouts = cast("Layout | tuple[Layout, ...] | None", source.meta.get("layout"))
        if isinstance(layouts, Layout):
            if _holds(node, layouts, mesh):
                last[source.name] = node
        elif layouts is not None and is_getitem(node):
            index = cast(int, node.args[1])
            if index < len(layouts) and _holds(node, layouts[index], mesh):
                names[node] = (None, layouts[index])
    for name, node in last.items():
        names[node] = (name, cast(Layout, origins[name].meta["layout"]))
    return names


def _holds(node: Node, layout: Layout, mesh: Mesh) -> bool:
    fact = shape_and_dtype(node)
    return fact is not None and fact[0] == tuple(layout.local_shape(mesh))


def _kept(source: Node) -> dict[str, Any]:
    return {key: source.meta[key] for key in KEPT if source.meta.get(key) is not None}


def _identifier(name: str) -> str:
    cleaned = re.sub(r"\W", "_", name)
    return f"_{cleaned}" if cleaned[:1].isdigit() else cleaned
