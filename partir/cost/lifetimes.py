"""When each block of a program's graphs is made and freed, and what one rank holds at most.

    forward   outputs and saved values stay; anything else goes after its last reader
    backward  saved values stay to its end, as the runtimes keep them; gradients stay; anything else goes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch.fx import GraphModule, Node

from partir.cost.monomial import Monomial, Values
from partir.cost.sizes import ProgramSizes
from partir.errors import module_path
from partir.graph import is_getitem
from partir.program import Program
from partir.records import layer_of

SAVED, GRADIENTS, TEMPORARY, OUTPUTS = "saved activations", "gradients", "temporaries", "outputs"
Storage = tuple[Node, int]


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


def blocks_of(program: Program, sizes: ProgramSizes, counts: Mapping[str, int]) -> tuple[Block, ...]:
    """Return every storage that a step makes, forward and backward; ``counts``: how many layers a layer stands for."""
    results = cast("tuple[Any, ...]", program.forward.graph.output_node().args[0])
    count = program.num_outputs
    kept = {(_storage(n)): OUTPUTS for n in results[:count] if isinstance(n, Node)}
    kept |= {(_storage(n)): SAVED for n in results[count:] if isinstance(n, Node)}
    found = _blocks(program.forward, "forward", kept, sizes, counts)
    if program.backward is None:
        return tuple(found)
    end = len(program.backward.graph.nodes)
    found += [
        replace(block, stage="backward", born=-1, dies=end) for block in found if block.kind in (SAVED, OUTPUTS)
    ]
    gradients = cast("tuple[Any, ...]", program.backward.graph.output_node().args[0])
    kept = {(_storage(n)): GRADIENTS for n in gradients if isinstance(n, Node)}
    return (*found, *_blocks(program.backward, "backward", kept, sizes, counts))


def _blocks(
    module: GraphModule, stage: str, kept: Mapping[Storage, str], sizes: ProgramSizes, counts: Mapping[str, int]
) -> list[Block]:
    order = {node: number for number, node in enumerate(module.graph.nodes)}
    dies: dict[Storage, int] = {}
    for node, number in order.items():
        if node.op == "output":
            continue
        for read in node.all_input_nodes:
            dies[_storage(read)] = number
    found: list[Block] = []
    for node, number in order.items():
        if node.op != "call_function" or is_getitem(node) or _is_view(node):
            continue
        for place, (tensor, numel) in enumerate(zip(_tensors(node), sizes.numels(node), strict=True)):
            storage = (node, place)
            last = len(order) if storage in kept else dies.get(storage, number)
            many = counts.get(layer_of(module_path(node.meta)), 1) if storage in kept else 1
            found.append(Block(kept.get(storage, TEMPORARY), numel * tensor.dtype.itemsize, stage, number, last, node.name, many))
    return found


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


def _storage(node: Node) -> Storage:
    """Return the call, and which of its results, whose memory a node looks at."""
    while True:
        if is_getitem(node) and not _is_view(cast(Node, node.args[0])):
            return cast(Node, node.args[0]), cast(int, node.args[1])
        if not _is_view(node):
            return node, 0
        node = node.all_input_nodes[0]


def _is_view(node: Node) -> bool:
    if is_getitem(node):
        return _is_view(cast(Node, node.args[0]))
    if node.op != "call_function" or not hasattr(node.target, "_schema"):
        return False
    schema: Any = getattr(node.target, "_schema")  # noqa: B009
    if str(schema.name) == "aten::reshape":
        return _looks(node)
    aliases = [result.alias_info for result in schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _looks(node: Node) -> bool:
    """Return whether a reshape looks at its operand: as a fake one does."""
    read, made = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return read.is_contiguous() or made.stride() == read.stride()


def _tensors(node: Node) -> tuple[torch.Tensor, ...]:
    value: Any = node.meta["val"]
    return (value,) if isinstance(value, torch.Tensor) else tuple(one for one in value if isinstance(one, torch.Tensor))
