"""Overlap: the order in which one rank starts messages, waits for them and computes, the same where it runs and where it is timed.

    Before: %a_start  %a_wait  %relu  %b_start  %b_wait  %mm(%relu, %b_wait)      relu reads a, b does not
    After:  %a_start  %b_start  %a_wait  %relu  %b_wait  %mm(%relu, %b_wait)

A start has "start" and a wait has "wait" in ``meta["message"]``.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.fx import Graph, GraphModule, Node

from partir.graph import is_collective, is_getitem, is_view
from partir.mesh import Mesh
from partir.records import message_of

AHEAD = 4
"""Messages under way at once that something will read, so that memory holds no more than their results."""

RESULTS_AHEAD = 2
"""Messages under way at once on the way to a result (a gradient), besides: what they are made of stays in memory meanwhile."""


def start_early_wait_late(graph: Graph) -> None:
    """Order the nodes anew: a start once its operands exist, a wait right before its first use, the rest as it was.

    A message on the way to a result (a gradient: reduce-scatter, all-reduce, cast) is waited for when another wants its place, and what
    is left to do for that result is done then.
    """
    schedule = _Schedule(graph)
    for node in schedule.before:
        if node.op == "placeholder":
            schedule.emit(node)
    for node in schedule.before:
        if node.op != "placeholder" and "message" not in node.meta and node not in schedule.finishing:
            schedule.need(node)
    for earlier, later in zip(schedule.order, schedule.order[1:]):
        earlier.append(later)


_orders: WeakKeyDictionary[GraphModule, dict[Mesh, tuple[Node, ...]]] = WeakKeyDictionary()


def as_run(graph_module: GraphModule, mesh: Mesh) -> tuple[Node, ...]:
    """Return the calls of a program's graph in the order in which the runtime makes them, each message a start and a wait.

    Time, memory and steps ask for the same order; it is made once, for the graph of a program does not change.
    """
    known = _orders.setdefault(graph_module, {})
    if mesh not in known:
        known[mesh] = _as_run(graph_module, mesh)
    return known[mesh]


def _as_run(graph_module: GraphModule, mesh: Mesh) -> tuple[Node, ...]:
    graph = Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    for node in list(graph.nodes):
        if is_collective(node) and message_of(node, mesh)[1]:
            _split_message(graph, node)
    graph.eliminate_dead_code()
    start_early_wait_late(graph)
    return tuple(node for node in graph.nodes if node.op == "call_function")


def _split_message(graph: Graph, start: Node) -> None:
    """Before: ``%g = all_gather(%x)``. After: ``%g = all_gather(%x)  %wait = wait(%g)``, read in its place."""
    with graph.inserting_after(start):
        wait = graph.call_function(_wait)
    start.replace_all_uses_with(wait)
    wait.args = (start,)
    wait.meta = {**start.meta, "message": "wait"}
    start.meta = {**start.meta, "message": "start"}


def _wait(message: Any) -> Any:
    """Stand for a wait in a graph that is timed and never run."""
    return message


class _Schedule:
    """The new order, as it grows."""

    def __init__(self, graph: Graph) -> None:
        self.before = list(graph.nodes)
        self.order: list[Node] = []
        self._place = {node: index for index, node in enumerate(self.before)}
        self._done: set[Node] = set()
        self.finishing = _finishing(self.before)
        self._ready: dict[bool, list[tuple[int, Node]]] = {True: [], False: []}
        self._under_way: dict[bool, dict[Node, None]] = {True: {}, False: {}}

    def need(self, node: Node) -> None:
        """Emit a node, what it waits for before it, and afterwards the starts that may follow."""
        if node in self._done:
            return
        for operand in node.all_input_nodes:
            self.need(operand)
        self.emit(node)
        while self._start_one(True) or self._start_one(False):
            pass

    def _start_one(self, result: bool) -> bool:
        """Start a message that is ready, on the way to a result or not; return whether a place was free or made free."""
        places = RESULTS_AHEAD if result else AHEAD
        if not self._ready[result]:
            return False
        if len(self._under_way[result]) >= places and not (result and self._finish_a_result()):
            return False
        if len(self._under_way[result]) < places:
            self.emit(heapq.heappop(self._ready[result])[1])
        return True

    def _finish_a_result(self) -> bool:
        """Wait for the oldest message on the way to a result, and do what follows up to the next message.

        Else gradients would stay under way to the end with what they are made of, and their second message (the all-reduce along data)
        would start after all work is done.
        """
        oldest = next(iter(self._under_way[True]))
        for user in list(oldest.users):
            self._finish(user)
        return oldest not in self._under_way[True]

    def _finish(self, node: Node) -> None:
        self.emit(node)
        for user in node.users:
            local = user in self.finishing and "message" not in user.meta
            if local and all(operand in self._done for operand in user.all_input_nodes):
                self._finish(user)

    def emit(self, node: Node) -> None:
        """Append a node whose operands are there."""
        if node in self._done:
            return
        self._done.add(node)
        self.order.append(node)
        if node.meta.get("message") == "start":
            self._under_way[self._is_result(node)][node] = None
        elif node.meta.get("message") == "wait":
            start = node.all_input_nodes[0]
            self._under_way[self._is_result(start)].pop(start, None)
        for user in node.users:
            if user.meta.get("message") == "start" and all(operand in self._done for operand in user.all_input_nodes):
                heapq.heappush(self._ready[self._is_result(user)], (self._place[user], user))

    def _is_result(self, start: Node) -> bool:
        return all(wait in self.finishing for wait in start.users)


def _finishing(nodes: Sequence[Node]) -> set[Node]:
    """Return the waits on the way to results, and what lies between them and the results: other messages, views, casts; no computation."""
    found: set[Node] = set()
    for node in reversed(nodes):
        if node.users and all(user.op == "output" or user in found for user in node.users) and _is_light(node):
            found.add(node)
    after: set[Node] = set()
    for node in nodes:
        if node in found and (node.meta.get("message") == "wait" or any(operand in after for operand in node.all_input_nodes)):
            after.add(node)
    return after


def _is_light(node: Node) -> bool:
    return "message" in node.meta or is_getitem(node) or is_view(node) or node.target is torch.ops.aten._to_copy.default
