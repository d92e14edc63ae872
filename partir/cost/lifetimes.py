"""When each block of a program's graphs is made and freed, and what one rank of torch.distributed holds at most.

    forward   outputs and saved values stay; anything else goes after its last reader
    backward  saved values stay to its end, as the runtimes keep them; gradients stay; anything else goes

The nodes are numbered as that runtime runs them (`partir.overlap`): a message's result exists from its start, a copy of what is sent
from there to its wait, and a result that must be put together from rows once more at its wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
from torch.fx import GraphModule, Node

from partir.calls import calls_of
from partir.cost.messages import RENAMES, adds_up_rows, copies_of
from partir.cost.monomial import Monomial
from partir.graph import collective_name, operands
from partir.mesh import Mesh
from partir.overlap import as_run
from partir.program import Program

SAVED, GRADIENTS, TEMPORARY, OUTPUTS = "saved activations", "gradients", "temporaries", "outputs"
Storage = tuple[str, int]
"""A call's name, and which of its results."""


class Held(Protocol):
    """The bytes of each value on one rank, as `ProgramSizes` has them in symbols."""

    def bytes_of(self, node: Node) -> Sequence[Monomial]:
        """Return that of each result of a node."""
        ...


@dataclass(frozen=True)
class Block:
    """One storage.

    Args:
        kind: what it is for.
        bytes: of it.
        stage: in whose timeline it lives.
        born, dies: numbers of the nodes that make it and that read it last.
        node: that makes it.
        count: how many of it are alive at once: more than one of what is kept of a layer that stands for others.
    """

    kind: str
    bytes: Monomial
    stage: str
    born: int
    dies: int
    node: str
    count: int = 1


def blocks_of(program: Program, sizes: Held, counts: Mapping[str, int]) -> tuple[Block, ...]:
    """Return every storage that a step makes, forward and backward; ``counts``: how many layers a layer stands for."""
    forward = _Stage(program.forward, "forward", program.mesh, sizes, counts)
    count = program.num_outputs
    found = forward.blocks({**forward.kept(OUTPUTS, slice(count)), **forward.kept(SAVED, slice(count, None))})
    if program.backward is None:
        return tuple(found)
    backward = _Stage(program.backward, "backward", program.mesh, sizes, counts)
    stay = [replace(one, stage="backward", born=-1, dies=backward.end) for one in found if one.kind in (SAVED, OUTPUTS)]
    return (*found, *stay, *backward.blocks(backward.kept(GRADIENTS, slice(None))))


class _Stage:
    """One graph as a rank runs it."""

    def __init__(self, module: GraphModule, stage: str, mesh: Mesh, sizes: Held, counts: Mapping[str, int]) -> None:
        self.module, self.stage, self.mesh, self.sizes, self.counts = module, stage, mesh, sizes, counts
        self.calls = calls_of(module)
        self.order = as_run(module, mesh)
        self.place = {turn: number for number, turn in enumerate(self.order)}
        self.end = len(self.order)
        self._storages: dict[Node, Storage] = {}
        self._other_names: dict[Node, bool] = {}

    def kept(self, kind: str, which: slice) -> dict[Storage, str]:
        """Return the storages behind some of the graph's results, and what they are for."""
        results = cast("tuple[Any, ...]", self.module.graph.output_node().args[0])[which]
        return {self._storage(node): kind for node in results if isinstance(node, Node)}

    def blocks(self, kept: Mapping[Storage, str]) -> list[Block]:
        """Return the storages that the calls make; ``kept``: those that stay to the end."""
        dies = self._last_reads()
        found: list[Block] = []
        for number, turn in enumerate(self.order):
            made = turn.node
            if turn.kind == "wait" or self.calls[made].is_item or self._is_other_name(made):
                continue
            for place, held in enumerate(self.sizes.bytes_of(made)):
                storage = (made.name, place)
                last = self.end if storage in kept else dies.get(storage, number)
                many = self.counts.get(self.calls[made].layer, 1) if storage in kept else 1
                found.append(Block(kept.get(storage, TEMPORARY), held, self.stage, number, last, made.name, many))
            found += self._copies(made, number)
        return found

    def _last_reads(self) -> dict[Storage, int]:
        found: dict[Storage, int] = {}
        for number, turn in enumerate(self.order):
            for read in (turn.node,) if turn.kind == "wait" else self.calls[turn.node].reads:
                found[self._storage(read)] = number
        return found

    def _copies(self, node: Node, start: int) -> list[Block]:
        """Return what a message holds beside its result: what it sends, put in rows, and what it received, not yet put together."""
        if self.order[start].kind != "start":
            return []
        wait = next((self.place[turn] for turn in self.order[start].users), start)
        sent, received = copies_of(node, self.mesh)
        held = [one for read in operands(node) for one in self.sizes.bytes_of(read)] if sent else []
        held += self.sizes.bytes_of(node) if received else []
        held += [one for read in operands(node) for one in self.sizes.bytes_of(read)] if adds_up_rows(node) else []
        return [Block(TEMPORARY, one, self.stage, start, wait, node.name) for one in held]

    def _storage(self, node: Node) -> Storage:
        """Return the call, and which of its results, whose memory a node looks at."""
        if node not in self._storages:
            self._storages[node] = self._find_storage(node)
        return self._storages[node]

    def _find_storage(self, node: Node) -> Storage:
        call = self.calls[node]
        whole = _whole(node) if call.is_item else node
        if not self._is_other_name(whole):
            return whole.name, cast(int, node.args[1]) if call.is_item else 0
        if call.is_item and self.calls[whole].axes is not None:  # of a bucket in groups of one
            return self._storage(self.calls[whole].operands[cast(int, node.args[1])])
        return self._storage(self.calls[whole].reads[0])

    def _is_other_name(self, node: Node) -> bool:
        """Return whether a call's result is its operand: a view, another type of a collective's, a group of one rank."""
        if node not in self._other_names:
            call = self.calls[node]
            renamed = call.axes is not None and bool(call.operands) and collective_name(node) in RENAMES
            self._other_names[node] = renamed or call.is_alone(self.mesh) or call.is_view
        return self._other_names[node]


def peak(blocks: Sequence[Block], stage: str, bytes_of: Callable[[Monomial], Any]) -> tuple[Any, Any]:
    """Return the most bytes that the blocks of a stage take together, and the number of the node at which they do.

    Args:
        bytes_of: the value of a monomial: a number, or an array of one length for as many results.
    """
    mine = [block for block in blocks if block.stage == stage]
    if not mine:
        return 0, 0
    counts = np.array([block.count for block in mine], dtype=np.float64)
    values = np.broadcast_arrays(*(np.atleast_1d(np.asarray(bytes_of(block.bytes), dtype=np.float64)) for block in mine))
    amounts = np.stack(values) * counts[:, None]
    change = np.zeros((max(block.dies for block in mine) + 3, amounts.shape[1]))
    np.add.at(change, [block.born + 1 for block in mine], amounts)
    np.subtract.at(change, [block.dies + 2 for block in mine], amounts)
    held = np.cumsum(change, axis=0)
    return held.max(axis=0), held.argmax(axis=0) - 1


def _whole(item: Node) -> Node:
    """Return the call of several results of which ``item`` is one."""
    return cast(Node, item.args[0])
