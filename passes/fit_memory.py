"""Fit a step into a budget of bytes: choose what the backward makes again instead of keeping it.

    everything gathered is kept ("fast") -> does not fit
    values in the order of bytes freed for each second of making them again, best first:
      %gelu            512 kB   computed again from %linear
      %all_gather      256 kB   gathered again from its shard
      ...
    as many of them as it takes, by the predicted peak of each choice, until it fits

A value is made again from what is kept, from inputs, or from operands that are made again with it: a matrix product too, which comes
last. Numbers that a generator of torch's draws are never drawn again.

Requires: a joint graph. Ensures: the predicted peak of what is returned is within the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from partir.errors import PartirError
from partir.graph import tensors_of
from partir.mesh import Mesh
from partir.passes.differentiate import Joint, made_again_in, parts_of
from partir.passes.node_facts import GATHERS, collective, is_getitem, is_random, operands
from partir.passes.partition import Partition
from partir.quantities import spell_bytes
from partir.records import message_of
from partir.work import node_bytes, node_flops

BYTES_OF_A_BYTE_RECEIVED = 8  # of memory traffic that take as long, where links are fast
FLOPS_OF_A_BYTE = 300

Again = frozenset[Node]


@dataclass(frozen=True)
class Rung:
    """What can be made again together.

    Args:
        nodes: that the backward runs again.
        freed: bytes that need not be kept.
        cost: of running them, in bytes of memory traffic.
    """

    nodes: Again
    freed: int
    cost: float


def fit_memory(joint: Joint, budget: int, peak_of: Callable[[Again], int]) -> Again:
    """Return the forward nodes that the backward makes again, as few as fit.

    Args:
        joint: forward and backward in one graph.
        budget: bytes that one rank may hold.
        peak_of: the predicted peak of a step for what is made again.

    Raises:
        PartirError: nothing fits; says how far the closest choice is.
    """
    fast = made_again_in(joint, "fast")
    if not joint.has_backward or peak_of(fast) <= budget:
        return _checked({peak_of(fast): fast}, budget)
    choices = [fast]
    for rung in rungs(joint, fast):
        choices.append(choices[-1] | rung.nodes)
    fits = _first_that_fits(choices, budget, peak_of)
    if fits is not None:
        return fits
    tried = {peak_of(again): again for again in (made_again_in(joint, "low"), *_some(choices))}
    return _checked(tried, budget)


def _first_that_fits(choices: Sequence[Again], budget: int, peak_of: Callable[[Again], int]) -> Again | None:
    """Return the first choice that fits, if the last one does: peaks fall from one to the next, but for small steps."""
    if peak_of(choices[-1]) > budget:
        return None
    low, high = 0, len(choices) - 1  # what does not fit, and what does
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if peak_of(choices[middle]) <= budget else (middle, high)
    return choices[high]


def _some(choices: Sequence[Again], number: int = 8) -> list[Again]:
    return [choices[place * (len(choices) - 1) // number] for place in range(1, number + 1)]


def _checked(tried: dict[int, Again], budget: int) -> Again:
    least = min(tried)
    if least <= budget:
        return tried[least]
    raise PartirError(
        f"memory: no choice of what to keep fits into {spell_bytes(budget)} on each rank: the closest needs {spell_bytes(least)} "
        f"({least:,} bytes) at its peak, parameters and AdamW's moments among them. Give more memory, more ranks or a smaller batch."
    )


def rungs(joint: Joint, fast: Again) -> list[Rung]:
    """Return what can be made again, that first which frees most bytes for its cost."""
    parts = parts_of(joint, fast)
    kept = set(parts.saved)
    groups: dict[Node, list[Node]] = {}
    for node in parts.saved:
        if node.op == "call_function":
            groups.setdefault(operands(node)[0] if is_getitem(node) else node, []).append(node)
    found = [rung for members in groups.values() if (rung := _rung(members, kept, fast, joint.mesh)) is not None]
    return sorted(found, key=lambda rung: -rung.freed / rung.cost)


def _rung(members: Sequence[Node], kept: set[Node], fast: Again, mesh: Mesh) -> Rung | None:
    """Return how to make values again from what is kept beside them; an operand of half the size or less is kept for it."""
    most = sum(map(size_of, members))
    nodes: dict[Node, None] = dict.fromkeys(members)
    stack, held = list(members), 0
    while stack:
        for read in operands(stack.pop()):
            if read.op == "placeholder" or read in nodes or (read in kept and read not in members):
                continue
            if read not in fast and 0 < size_of(read) <= most // 2:
                held += size_of(read)
                continue
            nodes[read] = None
            stack.append(read)
    again = frozenset(nodes)
    if any(is_random(node) for node in again) or most <= held:
        return None
    return Rung(again, most - held, max(1.0, sum(_cost(node, mesh) for node in again)))


def _cost(node: Node, mesh: Mesh) -> float:
    received = message_of(node, mesh)[1] if collective(node) is not None else 0
    return BYTES_OF_A_BYTE_RECEIVED * received + node_bytes(node) + node_flops(node) / FLOPS_OF_A_BYTE


def size_of(node: Node) -> int:
    """Return the bytes of a value, 0 of a call with several results, which are values themselves."""
    value = node.meta.get("val")
    return value.numel() * value.dtype.itemsize if isinstance(value, torch.Tensor) else 0


def say(parts: Partition, budget: int, peak: int) -> tuple[str, ...]:
    """Return notes on what was chosen."""
    forward = set(parts.forward)
    again = [node for node in parts.backward if node in forward and not is_getitem(node)]
    gathered = [node for node in again if collective(node) in GATHERS]
    computed = [node for node in again if collective(node) is None and node_bytes(node)]
    kept = [node for node in parts.saved if node.op == "call_function"]
    kept_gathered = [node for node in kept if collective(operands(node)[0] if is_getitem(node) else node) in GATHERS]
    return (
        f"memory: {spell_bytes(budget)} asked, predicted peak {spell_bytes(peak)} ({peak:,} bytes) on each rank",
        f"memory: {len(kept)} values kept, {_sum(kept)}, of them {len(kept_gathered)} gathered, {_sum(kept_gathered)}",
        f"memory: made again in the backward: {len(gathered)} gathered, {_sum(gathered)}, {len(computed)} computed, {_sum(computed)}",
    )


def _sum(nodes: Sequence[Node]) -> str:
    return spell_bytes(sum(t.numel() * t.dtype.itemsize for node in nodes for t in tensors_of(node)))
