"""Overlap: the order in which one rank starts messages, waits for them and computes, the same where it runs and where it is timed.

    Before: %a_start  %a_wait  %relu  %b_start  %b_wait  %mm(%relu, %b_wait)      relu reads a, b does not
    After:  %a_start  %b_start  %a_wait  %relu  %b_wait  %mm(%relu, %b_wait)

A start has "start" and a wait has "wait" in ``meta["message"]``.
"""

from __future__ import annotations

import heapq

from torch.fx import Graph, Node

AHEAD = 4
"""Messages under way at once, so that memory holds no more than their results."""


def start_early_wait_late(graph: Graph) -> None:
    """Order the nodes anew: a start once its operands exist, a wait right before its first use, the rest as it was."""
    schedule = _Schedule(graph)
    for node in schedule.before:
        if node.op == "placeholder":
            schedule.emit(node)
    for node in schedule.before:
        if node.op != "placeholder" and "message" not in node.meta:
            schedule.need(node)
    for earlier, later in zip(schedule.order, schedule.order[1:]):
        earlier.append(later)


class _Schedule:
    """The new order, as it grows."""

    def __init__(self, graph: Graph) -> None:
        self.before = list(graph.nodes)
        self.order: list[Node] = []
        self._place = {node: index for index, node in enumerate(self.before)}
        self._done: set[Node] = set()
        self._ready: list[tuple[int, Node]] = []
        self._under_way = 0

    def need(self, node: Node) -> None:
        """Emit a node, what it waits for before it, and afterwards the starts that may follow."""
        if node in self._done:
            return
        for operand in node.all_input_nodes:
            self.need(operand)
        self.emit(node)
        while self._ready and self._under_way < AHEAD:
            self.emit(heapq.heappop(self._ready)[1])

    def emit(self, node: Node) -> None:
        """Append a node whose operands are there."""
        if node in self._done:
            return
        self._done.add(node)
        self.order.append(node)
        self._under_way += {"start": 1, "wait": -1}.get(str(node.meta.get("message")), 0)
        for user in node.users:
            if user.meta.get("message") == "start" and all(operand in self._done for operand in user.all_input_nodes):
                heapq.heappush(self._ready, (self._place[user], user))
