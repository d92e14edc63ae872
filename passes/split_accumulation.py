"""Split what is done for parameters alone from what is done for a batch, so that several batches share it.

Before:  %h: f32[256@y, 64@z] ~x = all_gather(%weight, axis=x, dim=0)
         %c: f32[16@x, 256@y] +z = aten.linear(%g, %h)
After, for the parameters:      %h: f32[256@y, 64@z] ~x = all_gather(%weight, axis=x, dim=0)
                                return %h
       for each batch:          %c: f32[16@x, 256@y] +z = aten.linear(%g, %h)        %h is an input, and gets a gradient

The backward of the first part reduces the gradients of what it gathered: once, of their sum over batches.

Requires: a lowered graph.
Ensures: the one graph after the other computes what the lowered graph does. Parameters are read by the first part alone; it holds
    collectives, casts and views of one parameter each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from partir.graph import Unprinted, is_collective, is_getitem, is_view, layout_of, tensor_of
from partir.passes.share_gathers import share_gathers
from partir.program import Slot

CAST = torch.ops.aten._to_copy.default


@dataclass(frozen=True, eq=False)
class SplitAccumulation:
    """The two parts of a lowered graph.

    Args:
        gather: ``(*parameters) -> (*held,)``.
        batch: ``(*held, *other inputs) -> (*outputs,)``.
        parameters, held, others: slots; those of ``held`` are outputs of the one and inputs of the other.
    """

    gather: GraphModule
    batch: GraphModule
    parameters: tuple[Slot, ...]
    held: tuple[Slot, ...]
    others: tuple[Slot, ...]


def split_accumulation(lowered: GraphModule, inputs: Sequence[Slot]) -> SplitAccumulation:
    """Return the two parts of a lowered graph.

    Args:
        lowered: one rank's forward.
        inputs: a slot for each of its placeholders.
    """
    graph = share_gathers(lowered).graph
    slots = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    roots = _of_one_parameter(graph, slots)
    held = [node for node in roots if any(user not in roots for user in node.users) and isinstance(node.meta["val"], torch.Tensor)]
    held_slots = tuple(_held_slot(node, slots[roots[node]]) for node in held)
    parameters = [node for node, slot in slots.items() if slot.kind == "parameter"]
    others = [node for node, slot in slots.items() if slot.kind != "parameter"]
    gather, copies = Graph(), dict[Node, Node]()
    for node in [*parameters, *(node for node in roots if node not in slots)]:
        copies[node] = _copy(gather, node, copies)
    gather.output(tuple(copies[node] for node in held))
    batch, inside = Graph(), dict[Node, Node]()
    for node, slot in zip(held, held_slots):
        inside[node] = batch.placeholder(slot.name)
        inside[node].meta = dict(node.meta)
    for node in [*others, *(node for node in graph.nodes if node not in roots and node not in slots and node.op != "output")]:
        inside[node] = _copy(batch, node, inside)
    results = cast("tuple[Any, ...]", graph.output_node().args[0])
    batch.output(tuple(inside[node] if isinstance(node, Node) else node for node in results))
    gather.eliminate_dead_code()
    gather.lint()
    batch.lint()
    return SplitAccumulation(
        Unprinted({}, gather), Unprinted({}, batch), _slots(parameters, slots), held_slots, _slots(others, slots)
    )


def _slots(nodes: Sequence[Node], slots: dict[Node, Slot]) -> tuple[Slot, ...]:
    return tuple(slots[node] for node in nodes)


def _copy(graph: Graph, node: Node, copies: dict[Node, Node]) -> Node:
    copy = graph.node_copy(node, lambda old: copies[old])
    copy.meta = dict(node.meta)
    return copy


def _of_one_parameter(graph: Graph, slots: dict[Node, Slot]) -> dict[Node, Node]:
    """Return for each node that is made of one parameter, without computation, that parameter; of a bucket its first."""
    roots: dict[Node, Node] = {}
    for node in graph.nodes:
        if node in slots:
            if slots[node].kind == "parameter":
                roots[node] = node
            continue
        reads = node.all_input_nodes
        if node.op == "call_function" and reads and all(read in roots for read in reads) and _is_no_computation(node):
            bucketed = is_getitem(node) and len(reads[0].all_input_nodes) > 1
            roots[node] = roots[reads[0].all_input_nodes[cast(int, node.args[1])] if bucketed else reads[0]]
    return roots


def _is_no_computation(node: Node) -> bool:
    """A cast to a wider dtype belongs to what computes with it: the narrow value is what is held."""
    narrows = node.target is CAST and tensor_of(node).dtype.itemsize <= tensor_of(node.all_input_nodes[0]).dtype.itemsize
    return is_collective(node) or is_getitem(node) or is_view(node) or narrows


def _held_slot(node: Node, parameter: Slot) -> Slot:
    layout, dtype = layout_of(node), tensor_of(node).dtype
    layout = replace(layout, owner=None) if layout.owner and node.op != "placeholder" else layout
    return Slot(node.name, "output", layout, layout.shape, dtype, parameter.differentiable, parameter.reaches, parameter.name)
