"""Split a joint graph into a forward and a backward: decide which forward values are saved.

A value that the backward needs is, in this order of preference,

- an input of the forward: saved, which costs nothing;
- a view: made again from the value that owns the storage, so that no expanded, transposed or sliced copy is saved;
- made from nothing (constants, coordinates): made again;
- with memory="low", something gathered, or moved, cast or combined elementwise from gathered values only: gathered
  again, so that shards are saved;
- with memory="low", a mask, an index or a random number that depends on inputs without gradient only: made again;
- inside a user's `torch.utils.checkpoint`: made again from what enters it;
- anything else: saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from partir.passes import aot
from partir.passes.node_facts import (
    GATHERS,
    collective,
    is_move,
    is_pointwise,
    is_random,
    is_view,
    op_name,
    operands,
    storage_owner,
)


@dataclass(frozen=True)
class Partition:
    """Which nodes of a joint graph run where.

    Args:
        forward: nodes of the forward graph, in order.
        saved: those of them that the backward reads, in order.
        backward: nodes of the backward graph, in order; a forward node among them is made again.
        outputs: the forward's results.
        gradients: the backward's results, one for each input.
    """

    forward: tuple[Node, ...]
    saved: tuple[Node, ...]
    backward: tuple[Node, ...]
    outputs: tuple[Node, ...]
    gradients: tuple[Node | None, ...]


def partition(joint: GraphModule, num_outputs: int, again: frozenset[Node]) -> Partition:
    """Decide which nodes run in the forward, in the backward or in both.

    Args:
        joint: graph of ``(*primals, *tangents) -> (*outputs, *gradients)``.
        num_outputs: outputs of the forward.
        again: the forward nodes that the backward may make again, as `made_again` says.
    """
    results = cast("list[Node | None]", list(cast("Any", joint.graph.output_node().args[0])))
    outputs = tuple(node for node in results[:num_outputs] if node is not None)
    gradients = tuple(results[num_outputs:])
    saved, backward = _backward_nodes(joint, gradients, again)
    checks = [node for node in joint.graph.nodes if aot.is_check(node)]
    wanted = _ancestors([*outputs, *saved, *checks])
    primals = {node for node in joint.graph.find_nodes(op="placeholder") if not is_tangent(node)}
    forward = [node for node in joint.graph.nodes if node in wanted or node in primals]
    return Partition(tuple(forward), tuple(saved), tuple(backward), outputs, gradients)


def is_tangent(node: Node) -> bool:
    """Return whether ``node`` is the placeholder of an output's cotangent."""
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def made_again(joint: GraphModule, memory: str, without_gradient: frozenset[Node]) -> frozenset[Node]:
    """Return the forward nodes that the backward computes again instead of reading them.

    Args:
        joint: graph of ``(*primals, *tangents) -> (*outputs, *gradients)``.
        memory: ``"low"`` or ``"fast"``.
        without_gradient: the primals that get no gradient.
    """
    gathered: set[Node] = set()
    free: set[Node] = set(without_gradient)
    again: set[Node] = set()
    for node in joint.graph.nodes:
        if node.op != "call_function" or is_random(node):
            continue
        reads = operands(node)
        if is_gathered(node, gathered, free):
            gathered.add(node)
        if (not reads or all(read in free for read in reads)) and _is_cheap(node):
            free.add(node)
        cheap = node in gathered or node in free or _casts_input(node)
        if is_view(node) or not reads or (memory == "low" and cheap):
            again.add(node)
    return frozenset(again)


def inside_regions(joint: GraphModule, regions: Mapping[Node, str]) -> frozenset[Node]:
    """Return the forward nodes that a user's checkpoints enclose, less what leaves them: that is the input of what follows.

    Args:
        regions: node -> the checkpoint that it was made in.
    """
    of_backward = _of_backward(joint)
    inside = {node: region for node, region in regions.items() if node not in of_backward and node.op == "call_function"}
    leaving = {
        storage_owner(node)
        for node, region in inside.items()
        for reader in node.users
        if reader not in of_backward and regions.get(reader) != region
    }
    return frozenset(node for node in inside if node not in leaving and not is_random(node))


def _casts_input(node: Node) -> bool:
    """Return whether a node is a parameter's block in the dtype of computation: the block is there, a copy of it is not kept."""
    return op_name(node) == "aten::_to_copy" and operands(node)[0].op == "placeholder"


def is_gathered(node: Node, gathered: set[Node], free: set[Node]) -> bool:
    """Return whether a node holds what a collective gathered, moved or combined elementwise at most.

    Args:
        gathered: the nodes before it that do.
        free: nodes that hold what needs no gradient.
    """
    if collective(node) in GATHERS:
        return True
    reads = operands(node)
    if not any(read in gathered for read in reads):
        return False
    if not (is_view(node) or is_move(node) or is_pointwise(node)):
        return False
    return all(read in gathered or read in free or _numel(read) <= 1 for read in reads)


def _is_cheap(node: Node) -> bool:
    """Return whether a node is worth computing twice rather than saving: no product, no communication."""
    if collective(node) is not None:
        return collective(node) in ("coordinate", "slice", "once")
    if is_view(node) or is_move(node) or is_pointwise(node) or not operands(node):
        return True
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def _numel(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _backward_nodes(
    joint: GraphModule, gradients: tuple[Node | None, ...], again: frozenset[Node]
) -> tuple[list[Node], list[Node]]:
    """Return the saved values and the backward's nodes, each made again just before its first use."""
    of_backward = _of_backward(joint)
    saved: dict[Node, None] = {}
    order: dict[Node, None] = {}

    def need(root: Node) -> None:
        stack = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if node in order or node in saved or is_tangent(node):
                continue
            if node not in of_backward and node not in again:
                saved[node] = None
            elif ready:
                order[node] = None
            else:
                stack.append((node, True))
                stack.extend((read, False) for read in reversed(operands(node)))

    wanted = _ancestors([gradient for gradient in gradients if gradient is not None])
    for node in joint.graph.nodes:
        if node in of_backward and node in wanted:
            need(node)
    for gradient in gradients:
        if gradient is not None:
            need(gradient)
    return list(saved), list(order)


def _of_backward(joint: GraphModule) -> set[Node]:
    """Return the nodes that depend on a tangent or that a backward formula made."""
    found: set[Node] = set()
    for node in joint.graph.nodes:
        if node.op == "call_function" and (
            aot.is_backward(node) or any(read in found or is_tangent(read) for read in operands(node))
        ):
            found.add(node)
    return found


def _ancestors(nodes: list[Node]) -> set[Node]:
    """Return ``nodes`` and everything that they are computed from."""
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(operands(node))
    return found


def output_needs_copy(partition_of: Partition, index: int) -> bool:
    """Return whether an output shares storage with an input, an earlier output or a saved value.

    The output is a copy that ``aot.export_joint`` put there; this says whether the copy is needed.
    """
    owners = [storage_owner(operands(output)[0]) for output in partition_of.outputs]
    owner = owners[index]
    return owner.op == "placeholder" or owner in owners[:index] or owner in partition_of.saved
