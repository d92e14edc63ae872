"""Read a compiled plan into a document: what each tensor is, who reads it, why it lies so, and what moves for it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.fx import GraphModule, Node

from partir.errors import module_path, source_line
from partir.graph import is_collective, operands, outputs_of
from partir.layout import DTYPE_NAMES, Layout
from partir.plan_document import Kind, Origin, PlanDocument, PlannedCollective, PlannedTensor, settings_of
from partir.printer import op_text
from partir.program import Program, Slot
from partir.records import Collective
from partir.report import saved_bytes
from partir.signature import signature

if TYPE_CHECKING:
    from partir.plans import Plan

_DEVICE = re.compile(r"\b(?:cpu|meta|(?:cuda|xpu|mps)(?::\d+)?)\b")


def parameter_types(model: nn.Module) -> dict[str, str]:
    """Return dtype and global shape of each parameter by its name, ``f32[64, 16]``."""
    return {name: tensor_type(parameter) for name, parameter in model.named_parameters()}


def tensor_type(tensor: torch.Tensor) -> str:
    """Return dtype and shape as text."""
    return f"{DTYPE_NAMES.get(tensor.dtype, tensor.dtype)}[{', '.join(map(str, tensor.shape))}]"


def call_digest(model: nn.Module, leaves: Sequence[torch.Tensor], structure: str) -> str:
    """Return a digest of all that a trace depends on but devices: two calls of one digest give one graph."""
    return digest(_DEVICE.sub("device", signature(model, leaves, structure)))


def graph_digests(graph_module: GraphModule, text: str) -> tuple[str, str]:
    """Return digests of a traced graph, with sizes (devices left out) and without."""
    ops = [f"{node.name} {op_text(node)}" for node in graph_module.graph.nodes if node.op == "call_function"]
    return digest(_DEVICE.sub("device", text)), digest("\n".join(ops))


def digest(text: str) -> str:
    """Return a short SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def document_of(plan: Plan) -> PlanDocument:
    """Return a plan as a document."""
    program, options = plan.program, plan.options
    graph, ops = graph_digests(plan.compiled.traced.graph_module, program.texts["traced"])
    parameters = plan.parameters or {slot.name: _slot_type(slot) for slot in program.inputs if slot.kind == "parameter"}
    origin = Origin(plan.model, parameters, plan.aliases, plan.call, graph, ops, torch.__version__.partition("+")[0])
    settings = settings_of(plan.mesh, options)
    facts = _Facts(plan)
    tensors = (*facts.inputs(), *facts.values(), *facts.outputs())
    collectives = tuple(_collectives(plan.collectives, _bucketed(program)))
    return PlanDocument(origin, settings, tensors, collectives, saved_bytes(plan), plan.notes, str(settings))


def _slot_type(slot: Slot) -> str:
    return f"{slot.layout.dtype}[{', '.join(map(str, slot.shape))}]"


def layouts_at_rest(program: Program, annotated: GraphModule) -> dict[tuple[str, str], Layout]:
    """Return the layout of each input slot and value of a compiled program by kind and name."""
    slots = {(str(slot.kind), slot.name): slot.layout for slot in program.inputs}
    return slots | {("value", node.name): cast(Layout, node.meta["layout"]) for node in _value_nodes(annotated)}


def _value_nodes(annotated: GraphModule) -> Iterator[Node]:
    for node in annotated.graph.nodes:
        if node.op == "call_function" and isinstance(node.meta.get("layout"), Layout):
            yield node


class _Facts:
    """What the annotated graph of a plan says of each tensor."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.graph = plan.compiled.annotated
        self.placeholders = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
        self.names = {node.name: slot.name for node, slot in zip(self.placeholders, plan.program.inputs, strict=True)}
        self.leaving = list(zip(plan.program.outputs, outputs_of(self.graph)))

    def inputs(self) -> Iterator[PlannedTensor]:
        for slot, node in zip(self.plan.program.inputs, self.placeholders):
            yield self._tensor(node, slot.name, cast(Kind, slot.kind), slot.layout)

    def values(self) -> Iterator[PlannedTensor]:
        for node in _value_nodes(self.graph):
            found = self._tensor(node, node.name, "value", cast(Layout, node.meta["layout"]))
            yield replace(found, state=node.meta.get("state") or "", op=op_text(node), module=module_path(node.meta))

    def outputs(self) -> Iterator[PlannedTensor]:
        for slot, value in self.leaving:
            layout, how = slot.layout, "in blocks" if slot.layout.split_axes else "whole on every rank"
            why = f"it leaves {how}: outputs={self.plan.options.outputs!r}"
            source = self.names.get(value.name, value.name) if isinstance(value, Node) else str(value)
            yield PlannedTensor(slot.name, "output", slot.shape, layout, layout, why, layout.direction or "", op=source)

    def _tensor(self, node: Node, name: str, kind: Kind, layout: Layout) -> PlannedTensor:
        notes, made = tuple(node.meta.get("notes", ())), node if kind == "value" else next(iter(node.users), node)
        line = source_line(made.meta).partition(" (")[0]
        why, read = self._why(node, name), self._readers(node)
        direction = layout.direction or ""
        return PlannedTensor(name, kind, layout.shape, layout, layout, why, direction, line=line, read=read, notes=notes)

    def _why(self, node: Node, name: str) -> str:
        pattern = self.plan.pinned(name)
        if pattern is not None:
            return f"pinned by {pattern!r}"
        return re.sub(r"\w+", lambda word: self.names.get(word[0], word[0]), str(node.meta.get("why", "")))

    def _readers(self, node: Node) -> tuple[tuple[str, str], ...]:
        """Return who reads a value, and in which layout."""
        found: list[tuple[str, str]] = []
        for user in node.users:
            if user.op == "output":
                found += [(slot.name, str(slot.layout)) for slot, value in self.leaving if value is node]
                continue
            wanted = cast("tuple[Layout, ...]", user.meta.get("operands", ()))
            layouts = [layout for operand, layout in zip(operands(user), wanted) if operand is node]
            found += dict.fromkeys((user.name, str(layout.strip(self.plan.mesh))) for layout in layouts)
        return tuple(found)


def _bucketed(program: Program) -> dict[str, tuple[str, ...]]:
    """Return the parameters that each bucket of the forward holds, by the bucket's reason."""
    found: dict[str, tuple[str, ...]] = {}
    for node in program.forward.graph.nodes:
        if is_collective(node) and "bucket" in node.name:
            found[str(node.meta.get("reason"))] = tuple(name for read in operands(node) if (name := _root(read)))
    return found


def _root(node: Node) -> str:
    """Return the name of the slot that a chain of one-operand calls begins with, ``""`` where there is none."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return str(node.meta.get("slot", ""))


def _collectives(records: Sequence[Collective], bucketed: Mapping[str, tuple[str, ...]]) -> Iterator[PlannedCollective]:
    for record in records:
        line, _, module = record.source.partition(" (")
        tensors = _tensors(record.reason.removesuffix(", again"), bucketed)
        yield PlannedCollective(
            record.stage, record.op, record.axis, record.bytes, record.reason, line, module.removesuffix(")"), tensors
        )


_REASONS = re.compile(r"(?P<operand>\S+) for \S+|(?:\w+ over .+|gradient of \S+) in (?P<inside>\S+)|\w+ of (?P<of>\S+)")


def _tensors(reason: str, bucketed: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names of the tensors that a collective's reason is about."""
    members = bucketed.get(reason.removeprefix("gradient of "))
    if members is not None:
        return members
    match = _REASONS.fullmatch(reason)
    return tuple(name for name in match.groups() if name) if match else ()
