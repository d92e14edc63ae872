"""When each block of a program's graphs is made and freed, and what one rank of torch.distributed holds at most.

    forward   outputs and saved values stay; anything else goes after its last reader
    backward  saved values stay to its end, as the runtimes keep them; gradients stay; anything else goes

The nodes are numbered as that runtime runs them (`partir.overlap`): a message's result exists from its start, a copy of what is sent
from there to its wait, and a result that must be put together from rows once more at its wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch.fx import GraphModule, Node

from partir.cost.messages import adds_up_rows, copies_of, is_same
from partir.cost.monomial import Monomial, Values
from partir.errors import module_path
from partir.graph import is_collective, is_getitem, is_view, operands
from partir.mesh import Mesh
from partir.overlap import as_run
from partir.program import Program
from partir.records import layer_of

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
            if turn.kind == "wait" or is_getitem(made) or self._is_other_name(made):
                continue
            for place, held in enumerate(self.sizes.bytes_of(made)):
                storage = (made.name, place)
                last = self.end if storage in kept else dies.get(storage, number)
                many = self.counts.get(layer_of(module_path(made.meta)), 1) if storage in kept else 1
                found.append(Block(kept.get(storage, TEMPORARY), held, self.stage, number, last, made.name, many))
            found += self._copies(made, number)
        return found

    def _last_reads(self) -> dict[Storage, int]:
        found: dict[Storage, int] = {}
        for number, turn in enumerate(self.order):
            for read in [turn.node] if turn.kind == "wait" else turn.node.all_input_nodes:
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
        whole = _whole(node) if is_getitem(node) else node
        if not self._is_other_name(whole):
            return whole.name, cast(int, node.args[1]) if whole is not node else 0
        if whole is not node and is_collective(whole):  # of a bucket in groups of one
            return self._storage(operands(whole)[cast(int, node.args[1])])
        return self._storage(whole.all_input_nodes[0])

    def _is_other_name(self, node: Node) -> bool:
        if node not in self._other_names:
            self._other_names[node] = is_same(node, self.mesh) if is_collective(node) else _is_view(node)
        return self._other_names[node]


def peak(blocks: Sequence[Block], stage: str, sizes: Values) -> tuple[Any, Any]:
    """Return the most bytes that the blocks of a stage take together, and the number of the node at which they do.

    Args:
        sizes: numbers, or arrays of one length, for as many results.
    """
    mine = [block for block in blocks if block.stage == stage]
    if not mine:
        return 0, 0
    length = max(block.dies for block in mine) + 3
    amounts = [np.atleast_1d(np.asarray(block.bytes.value(sizes) * block.count, dtype=np.float64)) for block in mine]
    change = np.zeros((length, max(len(amount) for amount in amounts)))
    for block, amount in zip(mine, amounts, strict=True):
        change[block.born + 1] += amount
        change[block.dies + 2] -= amount
    held = np.cumsum(change, axis=0)
    return held.max(axis=0), held.argmax(axis=0) - 1


def _whole(item: Node) -> Node:
    """Return the call of several results of which ``item`` is one."""
    return cast(Node, item.args[0])


def _is_view(node: Node) -> bool:
    return _looks(node) if node.target is torch.ops.aten.reshape.default else is_view(node)


def _looks(node: Node) -> bool:
    """Return whether a reshape looks at its operand: as a fake one does."""
    read, made = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return read.is_contiguous() or made.stride() == read.stride()
