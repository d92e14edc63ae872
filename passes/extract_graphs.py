"""Write the two halves of a partitioned joint graph as graphs of their own, with readable names and origins.

A node that computes the value of a lowered node takes its name and its layout; every node, forward or backward,
keeps ``reason``, ``origin``, ``stack_trace`` and ``nn_module_stack`` of the lowered node that it serves, and says in
``meta["stage"]`` where it runs; ``meta["again"]`` marks a forward value that the backward computes again. What the
backward of a collective makes is the gradient of that collective's operand: it is called ``d_`` and the operand's name,
its layout is the operand's cotangent, and its reason says so. No name means one value here and another elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from partir.collectives import cotangent
from partir.errors import TypeRuleError
from partir.graph import Unprinted
from partir.graph import operands as read_in_order
from partir.layout import Layout
from partir.mesh import Mesh
from partir.passes import aot
from partir.passes.name_values import Names, copy_as, short_name
from partir.passes.node_facts import collective, is_getitem, op_name, operands, shape_and_dtype
from partir.passes.partition import Partition, is_tangent
from partir.program import Slot

Layouts = Layout | tuple[Layout, ...] | None
_VIEWS = frozenset({"aten::view", "aten::_unsafe_view"})
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
    values = _values(parts, lowered, mesh)
    writer = _Writer(lowered, "forward", mesh, slots, [name for name, _ in values.values()])
    skipped = [node for node, copy in zip(parts.outputs, copies, strict=True) if not copy]
    sources = iter(zip(lowered.graph.find_nodes(op="placeholder"), slots, strict=True))
    for node in parts.forward:
        if node in skipped:
            writer.copies[node] = writer.copies[operands(node)[0]]
        elif node.op == "placeholder":
            source, slot = next(sources)
            writer.placeholder(node, source.name, {**_kept(source), "slot": slot.name, "layout": slot.layout})
        else:
            writer.write(node, *values[node])
    return writer.finish([*parts.outputs, *parts.saved])


def extract_backward(
    parts: Partition,
    joint: GraphModule,
    lowered: GraphModule,
    forward: GraphModule,
    mesh: Mesh,
    slots: Sequence[Slot],
    tangents: Sequence[str],
) -> GraphModule:
    """Return the graph ``(*saved, *tangents) -> gradients``, a gradient named ``d_`` and its input's name."""
    values = _values(parts, lowered, mesh)
    writer = _Writer(lowered, "backward", mesh, slots, [name for name, _ in values.values()])
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
        if slot is not None:
            writer.write(node, f"d_{slot.name}", slot.layout).meta["gradient"] = slot.name
        else:
            writer.write(node, *(values.get(node) or writer.gradient(node)))
    return writer.finish(parts.gradients)


class _Writer:
    """Copies nodes of a joint graph into a new graph."""

    def __init__(self, lowered: GraphModule, stage: str, mesh: Mesh, slots: Sequence[Slot], reserved: Sequence[str]) -> None:
        self.graph = Graph()
        self.copies: dict[Node, Node] = {}
        self._stage = stage
        self._mesh = mesh
        self._origins = {node.name: node for node in lowered.graph.nodes}
        self._slots = {node.name: slot.name for node, slot in zip(lowered.graph.find_nodes(op="placeholder"), slots, strict=True)}
        self._reserved = {*self._origins, *reserved}
        self._names = Names(self._reserved)

    def placeholder(self, node: Node, name: str, meta: dict[str, Any]) -> None:
        """Copy a joint node as a placeholder."""
        copy = self.graph.create_node("placeholder", _identifier(name), name=_identifier(name))
        copy.meta.update(val=node.meta.get("val"), stage=self._stage, **meta)
        self.copies[node] = copy

    def write(self, node: Node, name: str | None, layout: Layouts) -> Node:
        """Copy a joint node, with the facts of the lowered node that it serves.

        Args:
            node: of the joint graph.
            name: that of the value it holds, as reserved, or ``d_`` and that of the value whose gradient it is.
            layout: of its value, where it is known.
        """
        wanted = _identifier(name) if name else short_name(node)
        copy = copy_as(self.graph, node, self.copies, wanted if name in self._reserved else self._names.free(wanted))
        if op_name(node) in _VIEWS:
            copy.target = torch.ops.aten.reshape.default  # the strides of a fake are not always those of its op
        source = self._origins.get(aot.origin(node) or "")
        facts = _kept(source) if source is not None else {}
        copy.meta = {"val": node.meta.get("val"), "stage": self._stage, **facts}
        if self._stage == "backward":
            copy.meta["again"] = not aot.is_backward(node)
            if source is not None and self._reverses(node, source):
                copy.meta["reason"] = f"gradient of {_root_name(source, self._slots)}"
        if layout is not None:
            copy.meta["layout"] = layout
        self.copies[node] = copy
        return copy

    def gradient(self, node: Node) -> tuple[str | None, Layouts]:
        """Return name and layout of what the backward of a lowered collective makes, else nothing."""
        source = self._origins.get(aot.origin(node) or "")
        if source is None or not self._reverses(node, source):
            return None, None
        reads = read_in_order(source)
        try:
            layouts = tuple(cotangent(cast(Layout, read.meta["layout"])) for read in reads)
        except (KeyError, TypeRuleError):
            return None, None
        if isinstance(node.meta.get("val"), (list, tuple)):
            return None, layouts if _num_results(node) == len(layouts) else None
        return f"d_{reads[0].name}", layouts[0] if _holds(node, layouts[0], self._mesh) else None

    def _reverses(self, node: Node, source: Node) -> bool:
        return aot.is_backward(node) and collective(node) is not None and collective(source) is not None

    def finish(self, results: Sequence[Node | None]) -> GraphModule:
        """Return the graph's module with these results."""
        self.graph.output(tuple(None if result is None else self.copies[result] for result in results))
        self.graph.lint()
        return Unprinted(torch.nn.Module(), self.graph)


def _root_name(node: Node, slots: Mapping[str, str]) -> str:
    """Return the value, parameter or bucket of them that a chain of collectives brings to its reader."""
    while (collective(node) is not None or is_getitem(node) or _casts_input(node)) and operands(node):
        reads = operands(node)
        if len(reads) > 1:
            return str(node.meta.get("reason"))
        node = reads[0]
    inside = node.meta.get("reason") == "recipe" and node.name != node.meta["origin"]
    return slots.get(node.name, node.name) + (f" in {node.meta['origin']}" if inside else "")


def _casts_input(node: Node) -> bool:
    return op_name(node) == "aten::_to_copy" and operands(node)[0].op == "placeholder"


def _values(parts: Partition, lowered: GraphModule, mesh: Mesh) -> dict[Node, tuple[str, Layouts]]:
    """Return name and layout of every node of the forward, made again or not: those of the lowered node whose value it holds."""
    origins = {node.name: node for node in lowered.graph.nodes}
    once = frozenset(parts.forward)
    forward = [*parts.forward, *(node for node in parts.backward if not aot.is_backward(node) and node not in once)]
    known = _lowered_values(forward, origins, mesh)
    names = Names(origins)
    return {
        node: known[node] if node in known else (names.free(short_name(node)), None)
        for node in forward
        if node.op == "call_function"
    }


def _lowered_values(nodes: Sequence[Node], origins: Mapping[str, Node], mesh: Mesh) -> dict[Node, tuple[str, Layouts]]:
    """Return lowered name and layout of the nodes that hold a lowered node's value: the last of its origin that has its shape."""
    items = {(operands(node)[0].name, node.args[1]): node.name for node in origins.values() if is_getitem(node)}
    last: dict[str, tuple[Node, Layouts]] = {}
    for node in nodes:
        source = origins.get(aot.origin(node) or "")
        if source is None or node.op != "call_function":
            continue
        layouts = cast(Layouts, source.meta.get("layout"))
        if isinstance(layouts, Layout):
            if _holds(node, layouts, mesh):
                last[source.name] = (node, layouts)
        elif layouts is not None and is_getitem(node):
            index = cast(int, node.args[1])
            name = items.get((source.name, index))
            if name is not None and _holds(node, layouts[index], mesh):
                last[name] = (node, layouts[index])
        elif layouts is not None and _num_results(node) == len(layouts):
            last[source.name] = (node, layouts)
    return {node: (name, layout) for name, (node, layout) in last.items()}


def _num_results(node: Node) -> int:
    """Return how many results a call has; one that is a tensor is a part of an op that was taken apart."""
    value = node.meta.get("val")
    return len(cast("Sequence[Any]", value)) if isinstance(value, (list, tuple)) else 0


def _holds(node: Node, layout: Layout, mesh: Mesh) -> bool:
    fact = shape_and_dtype(node)
    return fact is not None and fact[0] == tuple(layout.local_shape(mesh))


def _kept(source: Node) -> dict[str, Any]:
    return {key: source.meta[key] for key in KEPT if source.meta.get(key) is not None}


def _identifier(name: str) -> str:
    cleaned = re.sub(r"\W", "_", name)
    return f"_{cleaned}" if cleaned[:1].isdigit() else cleaned
