"""Overlap: the order in which one rank starts messages, waits for them and computes, the same where it runs and where it is timed.

    Before: %a_start  %a_wait  %relu  %b_start  %b_wait  %mm(%relu, %b_wait)      relu reads a, b does not
    After:  %a_start  %b_start  %a_wait  %relu  %b_wait  %mm(%relu, %b_wait)

A start has "start" and a wait has "wait" in ``meta["message"]``.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from torch.fx import Graph, GraphModule, Node

from partir.graph import is_collective
from partir.mesh import Mesh
from partir.records import message_of

AHEAD = 4
"""Messages under way at once, so that memory holds no more than their results."""


def start_early_wait_late(graph: Graph) -> None:
    """Order the nodes anew: a start once its operands exist, a wait right before its first use, the rest as it was.

    A message that only the end reads (a gradient) is waited for as soon as another wants its place.
    """
    schedule = _Schedule(graph)
    for node in schedule.before:
        if node.op == "placeholder":
            schedule.emit(node)
    for node in schedule.before:
        if node.op != "placeholder" and "message" not in node.meta:
            schedule.need(node)
    for earlier, later in zip(schedule.order, schedule.order[1:]):
        earlier.append(later)


def as_run(graph_module: GraphModule, mesh: Mesh) -> Iterator[Node]:
    """Yield the calls of a graph in the order in which the runtime makes them, each message a start and a wait."""
    graph = Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    for node in list(graph.nodes):
        if is_collective(node) and message_of(node, mesh)[1]:
            _split_message(graph, node)
    graph.eliminate_dead_code()
    start_early_wait_late(graph)
    yield from (node for node in graph.nodes if node.op == "call_function")


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
        self._ready: list[tuple[int, Node]] = []
        self._under_way: dict[Node, None] = {}

    def need(self, node: Node) -> None:
        """Emit a node, what it waits for before it, and afterwards the starts that may follow."""
        if node in self._done:
            return
        for operand in node.all_input_nodes:
            self.need(operand)
        self.emit(node)
        while self._ready and (len(self._under_way) < AHEAD or self._finish_a_result()):
            self.emit(heapq.heappop(self._ready)[1])

    def _finish_a_result(self) -> bool:
        """Wait for the oldest message that nothing but the end of the graph reads: a gradient on its way.

        Else gradients would keep all places to the end: no gather could start early, and what they are made of stayed in memory.
        """
        for start in self._under_way:
            waits = [user for user in start.users if user.meta.get("message") == "wait"]
            if waits and all(reader.op == "output" for wait in waits for reader in wait.users):
                for wait in waits:
                    self.emit(wait)
                return True
        return False

    def emit(self, node: Node) -> None:
        """Append a node whose operands are there."""
        if node in self._done:
            return
        self._done.add(node)
        self.order.append(node)
        if node.meta.get("message") == "start":
            self._under_way[node] = None
        elif node.meta.get("message") == "wait":
            self._under_way.pop(node.all_input_nodes[0], None)
        for user in node.users:
            if user.meta.get("message") == "start" and all(operand in self._done for operand in user.all_input_nodes):
                heapq.heappush(self._ready, (self._place[user], user))
