"""Overlap: the order in which one rank starts messages, waits for them and computes, the same where it runs and where it is timed.

    Before: %a_start  %a_wait  %relu  %b_start  %b_wait  %mm(%relu, %b_wait)      relu reads a, b does not
    After:  %a_start  %b_start  %a_wait  %relu  %b_wait  %mm(%relu, %b_wait)

In a graph that is bound to run, a start has "start" and a wait has "wait" in ``meta["message"]``.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch.fx import Graph, GraphModule, Node

from partir.calls import Call, calls_of, is_light
from partir.mesh import Mesh

AHEAD = 4
"""Messages under way at once that something will read, so that memory holds no more than their results."""

RESULTS_AHEAD = 2
"""Messages under way at once on the way to a result (a gradient), besides: what they are made of stays in memory meanwhile."""


def start_early_wait_late(graph: Graph) -> None:
    """Order the nodes anew: a start once its operands exist, a wait right before its first use, the rest as it was.

    A message on the way to a result (a gradient: reduce-scatter, all-reduce, cast) is waited for when another wants its place, and what
    is left to do for that result is done then.
    """
    nodes = list(graph.nodes)
    turns = {node: Turn(node, node.meta.get("message", "call"), is_light(node)) for node in nodes}
    for node, turn in turns.items():
        turn.read([turns[read] for read in node.all_input_nodes])
    order = [turn.node for turn in _ordered([turns[node] for node in nodes])]
    for earlier, later in zip(order, order[1:]):
        earlier.append(later)


@dataclass(eq=False, slots=True)
class Turn:
    """One thing that a rank does.

    Args:
        node: of the graph.
        kind: ``"start"`` and ``"wait"`` of a message, or ``"call"``.
        light: a call that computes nothing.
        reads: whose results it needs; those of a wait are the start alone.
        users: that need its result.
    """

    node: Node
    kind: str
    light: bool = False
    reads: list[Turn] = field(default_factory=list["Turn"])
    users: list[Turn] = field(default_factory=list["Turn"])

    def read(self, turns: Iterable[Turn]) -> None:
        """Note what it reads."""
        self.reads = list(turns)
        for turn in self.reads:
            turn.users.append(self)


_orders: WeakKeyDictionary[GraphModule, dict[Mesh, tuple[Turn, ...]]] = WeakKeyDictionary()


def as_run(graph_module: GraphModule, mesh: Mesh) -> tuple[Turn, ...]:
    """Return the calls of a program's graph in the order in which the runtime makes them, each message a start and a wait.

    Time, memory and steps ask for the same order; it is made once, for the graph of a program does not change. On a mesh that lacks axes
    of the program's, collectives over these are left out.
    """
    known = _orders.setdefault(graph_module, {})
    if mesh not in known:
        known[mesh] = tuple(turn for turn in _ordered(_turns(calls_of(graph_module).values(), mesh)) if turn.node.op == "call_function")
    return known[mesh]


def _turns(calls: Iterable[Call], mesh: Mesh) -> list[Turn]:
    """Return what a rank does for the calls of a graph, in their order; what nothing reads is left out."""
    made: dict[Node, Turn] = {}
    turns: list[Turn] = []
    for call in calls:
        node = call.node
        if call.is_item and node in made:
            continue  # of a bucket in groups of one
        if call.is_alone(mesh):
            made |= _handed_on(call, made)
            continue
        turn = Turn(node, "call", call.is_light)
        turn.read(dict.fromkeys([made[read] for read in call.reads]))
        made[node] = turn
        turns.append(turn)
        if call.operands and call.moves(mesh):
            turn.kind = "start"
            made[node] = Turn(node, "wait")
            made[node].read([turn])
            turns.append(made[node])
    return turns


def _handed_on(call: Call, made: Mapping[Node, Turn]) -> dict[Node, Turn]:
    """Return what is read in place of a collective in groups of one rank: its operand, of a bucket each item's."""
    reads = [made[read] for read in call.operands]
    return {call.node: reads[0], **{item: reads[number] for item, number in call.items}}


def _ordered(turns: Sequence[Turn]) -> list[Turn]:
    schedule = _Schedule(turns)
    for turn in turns:
        if turn.node.op == "placeholder":
            schedule.emit(turn)
    for turn in turns:
        if turn.node.op != "placeholder" and turn.kind == "call" and turn not in schedule.finishing:
            schedule.need(turn)
    return schedule.order


class _Schedule:
    """The new order, as it grows."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.order: list[Turn] = []
        self._place = {turn: index for index, turn in enumerate(turns)}
        self._done: set[Turn] = set()
        self.finishing = _finishing(turns)
        self._ready: dict[bool, list[tuple[int, Turn]]] = {True: [], False: []}
        self._under_way: dict[bool, dict[Turn, None]] = {True: {}, False: {}}

    def need(self, turn: Turn) -> None:
        """Emit a node, what it waits for before it, and afterwards the starts that may follow."""
        if turn in self._done:
            return
        for operand in turn.reads:
            self.need(operand)
        self.emit(turn)
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

    def _finish(self, turn: Turn) -> None:
        self.emit(turn)
        for user in turn.users:
            local = user in self.finishing and user.kind == "call"
            if local and all(operand in self._done for operand in user.reads):
                self._finish(user)

    def emit(self, turn: Turn) -> None:
        """Append a node whose operands are there."""
        if turn in self._done:
            return
        self._done.add(turn)
        self.order.append(turn)
        if turn.kind == "start":
            self._under_way[self._is_result(turn)][turn] = None
        elif turn.kind == "wait":
            start = turn.reads[0]
            self._under_way[self._is_result(start)].pop(start, None)
        for user in turn.users:
            if user.kind == "start" and all(operand in self._done for operand in user.reads):
                heapq.heappush(self._ready[self._is_result(user)], (self._place[user], user))

    def _is_result(self, start: Turn) -> bool:
        return all(wait in self.finishing for wait in start.users)


def _finishing(turns: Sequence[Turn]) -> set[Turn]:
    """Return the waits on the way to results, and what lies between them and the results: other messages, views, casts; no computation."""
    found: set[Turn] = set()
    for turn in reversed(turns):
        if turn.users and all(user.node.op == "output" or user in found for user in turn.users) and (turn.light or turn.kind != "call"):
            found.add(turn)
    after: set[Turn] = set()
    for turn in turns:
        if turn in found and (turn.kind == "wait" or any(read in after for read in turn.reads)):
            after.add(turn)
    return after
