"""The slots of a program: what enters and leaves it, read from the annotated and the lowered graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch.fx import GraphModule, Node

from partir.graph import layout_of, outputs_of
from partir.passes.trace import InputSlot, Traced
from partir.program import Slot


def outputs_reached(annotated: GraphModule) -> dict[str, tuple[int, ...]]:
    """Return for each placeholder the outputs that can be differentiated with respect to it; from none ``grad`` stays None.

    A gathered bucket would give zeros to a member that has no gradient, and an optimizer decays what has zeros.
    """
    reached: dict[Node, set[int]] = {}
    for number, value in enumerate(outputs_of(annotated)):
        reached.setdefault(cast(Node, value), set()).add(number)
    for node in reversed(annotated.graph.nodes):
        if not (node.meta.get("grad") or any(node.meta.get("grads", ()))):
            reached[node] = set()
            continue
        reached.setdefault(node, set()).update(*(reached.get(user, set()) for user in node.users))
    return {node.name: tuple(sorted(reached[node])) for node in placeholders(annotated)}


def input_slots(lowered: GraphModule, slots: Mapping[str, InputSlot], reached: Mapping[str, tuple[int, ...]]) -> tuple[Slot, ...]:
    """Return one slot for each placeholder; ``reached``: what `outputs_reached` says."""
    found: list[Slot] = []
    for node in placeholders(lowered):
        layout = layout_of(node)
        slot = slots.get(node.name)
        name, kind = (slot.name, slot.kind) if slot else ("seed", "seed")
        reaches = reached.get(node.name, ()) if slot and slot.requires_grad else ()
        found.append(Slot(name, cast(Any, kind), layout, layout.shape, node.meta["val"].dtype, bool(reaches), reaches))
    return tuple(found)


def output_slots(lowered: GraphModule, shapes: Sequence[tuple[int, ...]], traced: Traced, training: bool) -> tuple[Slot, ...]:
    """Return one slot for each output; ``shapes``: as the user sees them, without pads."""
    found: list[Slot] = []
    buffers = dict(traced.mutated_buffers)
    for index, (value, shape) in enumerate(zip(outputs_of(lowered), shapes)):
        layout = layout_of(value)
        name = buffers.get(index, f"output[{index}]")
        wanted = training and layout.grad and index not in buffers
        found.append(Slot(name, "output", layout, shape, value.meta["val"].dtype, wanted))
    return tuple(found)


def with_tangent(slot: Slot, takes: bool) -> Slot:
    """Return an output slot that takes a cotangent, or does not."""
    return replace(slot, differentiable=takes)


def placeholders(graph_module: GraphModule) -> list[Node]:
    """Return a graph's placeholders, in order."""
    return [node for node in graph_module.graph.nodes if node.op == "placeholder"]
