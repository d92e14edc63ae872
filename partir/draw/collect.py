"""Read a plan's graphs into a picture: ops by the traced op that they serve, collectives one by one, what enters and leaves.

    weight --> (all_gather x) --> [linear]   <-- (all_gather y) <-- [layer_norm]

Views and ops that move nothing on their way (chunk, transpose, spread) are drawn as the value that they look at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.fx import GraphModule, Node

from partir.draw.picture import DrawnEdge, DrawnNode, Kind, Picture, cluster_path, short_name
from partir.errors import module_path, source_line
from partir.graph import is_collective, is_getitem, is_view
from partir.layout import Layout
from partir.printer import op_text, user_name
from partir.program import Slot
from partir.records import Collective, layer_of

if TYPE_CHECKING:
    from partir.plans import Plan


def collect(plan: Plan) -> Picture:
    """Return the picture of a plan, every layer drawn."""
    picture = Picture()
    traced = {node.name: node for node in plan.compiled.annotated.graph.nodes}
    slots = {slot.name: slot for slot in plan.program.inputs}
    for stage, module in (("forward", plan.program.forward), ("backward", plan.program.backward)):
        if module is not None:
            records = {record.node: record for record in plan.collectives if record.stage == stage}
            _Stage(picture, stage, plan, traced, slots, records).read(module)
    return picture


@dataclass
class _Stage:
    """One stage of a plan on its way into a picture; `shown`: the drawn node of each graph node."""

    picture: Picture
    stage: str
    plan: Plan
    traced: Mapping[str, Node]
    slots: Mapping[str, Slot]
    records: Mapping[str, Collective]
    shown: dict[Node, DrawnNode] = field(default_factory=dict[Node, DrawnNode])

    def read(self, module: GraphModule) -> None:
        for node in module.graph.nodes:
            if node.op in ("placeholder", "output") or _is_place(node):
                continue
            if node.name in self.records:
                self._draw_collective(node, self.records[node.name])
            elif _looks_at_one(node):
                self._stand_for(node, self._source(node.all_input_nodes[0]))
            else:
                self._draw_op(node)
            if node.meta.get("gradient"):
                self._draw_gradient(node, str(node.meta["gradient"]))

    def _add(self, name: str, path: str, kind: Kind, title: str, layout: Layout | None) -> DrawnNode:
        layers = (layer_of(path),) if layer_of(path) else ()
        return self.picture.add(DrawnNode(f"{self.stage} {name}", self.stage, path, kind, title, {}, layout, layers=layers))

    def _stand_for(self, node: Node, drawn: DrawnNode) -> None:
        self.shown[node] = drawn
        traced = self.traced.get(node.name)
        if traced is not None and _comes_from(node, traced):
            drawn.names.setdefault(node.name, _layout(traced))

    def _source(self, node: Node) -> DrawnNode:
        """Return the drawn node of a value, drawing it where it is a parameter, an input or a saved value."""
        if node in self.shown:
            return self.shown[node]
        name = user_name(node)
        saved = "saved" in node.meta and "slot" not in node.meta
        path = module_path(node.meta) or name.rpartition(".")[0]
        title = short_name(name, path) + " (saved)" * saved
        key, kind = (f"saved {name}", "saved") if saved else (name, "value")
        drawn = self._add(key, path, kind, title, _layout(node))
        drawn.names.setdefault(name, _layout(node))
        if name in self.slots:
            drawn.facts.update(_slot_facts(self.slots[name], self.plan))
        self.shown[node] = drawn
        return drawn

    def _draw_collective(self, node: Node, record: Collective) -> None:
        title = f"{record.op} {record.axis}" + " again" * record.again
        sources = [self._source(source) for source in node.all_input_nodes]
        drawn = self._add(record.node, module_path(node.meta), "collective", title, _layout(node))
        drawn.record = record
        drawn.names.setdefault(record.node, drawn.layout)
        drawn.before = _layout(node.all_input_nodes[0]) if len(sources) == 1 else None
        for source in sources:
            self.picture.join(DrawnEdge(source.key, drawn.key, record.axis, record.bytes))
        self.shown[node] = drawn

    def _draw_op(self, node: Node) -> None:
        """Draw the traced op that a node serves, once for all the nodes of its recipe, decomposition or backward formula."""
        # In the backward, what was saved and is only read would hide what moves.
        enters = self.stage == "forward"
        read = [source for source in node.all_input_nodes if source in self.shown or (enters and source.op == "placeholder")]
        sources = [self._source(source) for source in read]
        drawn = self._op(node)
        self._stand_for(node, drawn)
        for source in sources:
            self._connect(source, drawn)

    def _op(self, node: Node) -> DrawnNode:
        if "origin" not in node.meta:
            return self._sum_of_gradients(node)
        name = str(node.meta["origin"])
        origin = self.traced.get(name)
        layout = _layout(origin) if origin is not None else None
        drawn = self._add(name, module_path(node.meta), "op", name, layout)
        if origin is not None and not drawn.facts:
            drawn.names.setdefault(name, layout)
            drawn.facts.update(_op_facts(origin))
        return drawn

    def _sum_of_gradients(self, node: Node) -> DrawnNode:
        """Return the one node for all the sums of gradients in a module: that whose gradient comes last."""
        read = [self.shown[source] for source in reversed(node.all_input_nodes) if source in self.shown]
        path = next((drawn.path for drawn in read if drawn.path), "")
        place = ".".join(cluster_path(path)[-1:]) or "the model"
        return self._add(f"sum of gradients in {place}", path, "op", "sum of gradients", None)

    def _connect(self, source: DrawnNode, target: DrawnNode) -> None:
        axis, num_bytes = (source.record.axis, source.record.bytes) if source.record else ("", 0)
        self.picture.join(DrawnEdge(source.key, target.key, axis, num_bytes))

    def _draw_gradient(self, node: Node, name: str) -> None:
        path = name.rpartition(".")[0]
        slot = self.slots.get(name)
        drawn = self._add(f"d_{name}", path, "gradient", "d " + short_name(name, path), slot.layout if slot else None)
        drawn.names.setdefault(f"d_{name}", drawn.layout)
        self._connect(self.shown[node], drawn)


def _layout(node: Node) -> Layout | None:
    layout = node.meta.get("layout")
    return layout if isinstance(layout, Layout) else None


def _is_place(node: Node) -> bool:
    """Return whether a node asks for the rank's own place: nothing of the model's, and shared by all that ask."""
    return is_collective(node) and not node.all_input_nodes


def _looks_at_one(node: Node) -> bool:
    """Return whether a node moves and computes nothing: a view, or a collective of one operand with nothing to send."""
    if len(node.all_input_nodes) != 1:
        return False
    if is_getitem(node) or is_collective(node):
        return True
    return is_view(node)


def _comes_from(node: Node, traced: Node) -> bool:
    """Return whether a node of a program is a traced one, and not a part of another's formula that bears its name by chance."""
    origin = traced.all_input_nodes[0] if is_getitem(traced) else traced
    return node.meta.get("origin") == origin.name


def _op_facts(node: Node) -> dict[str, str]:
    facts = {"op": op_text(node), "state": str(node.meta.get("state") or ""), "line": source_line(node.meta)}
    facts["note"] = "; ".join(str(note) for note in node.meta.get("notes", ()))
    return {name: text for name, text in facts.items() if text}


def _slot_facts(slot: Slot, plan: Plan) -> dict[str, str]:
    local = slot.local_shape(plan.mesh)
    elements = 1
    for size in local:
        elements *= size
    facts = {"kind": slot.kind, "block of a rank": f"{list(local)}, {elements * slot.dtype.itemsize:,} bytes"}
    pattern = plan.pinned(slot.name)
    return facts | ({"pinned by": pattern} if pattern else {})
