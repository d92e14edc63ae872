"""Where a nan or inf comes from: walk back from the loss to the node that makes one of operands that have none.

    %log: nan on rank 1     <- its operand %sub has none: this is the node
    %mean: nan              <- its operand %log has one: go on
    %loss: nan

A value may well hold inf on purpose (a mask), so only what reaches the loss counts: nan is followed through nan, inf through inf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from partir.errors import NonFiniteError, source_line
from partir.printer import user_name
from partir.program import Program


@dataclass(frozen=True)
class Held:
    """What a value holds on one rank.

    Args:
        nan, inf: how many of its values are so.
        of: how many values there are.
        low, high: the smallest and largest finite one; 0 where there is none.
    """

    nan: int = 0
    inf: int = 0
    of: int = 0
    low: float = 0.0
    high: float = 0.0

    def has(self, kind: str) -> bool:
        """Return whether there is a "nan" or "inf"."""
        return bool(self.nan if kind == "nan" else self.inf)

    def __str__(self) -> str:
        bad = [f"{count} {kind}" for kind, count in (("nan", self.nan), ("inf", self.inf)) if count]
        finite = [] if self.nan + self.inf == self.of else [f"values from {self.low:.4g} to {self.high:.4g}"]
        return ", ".join([*bad, *finite]) or "no values"


Seen = Mapping[str, Sequence[Held | None]]
"""By the name of a node, what it held on each rank."""


def check_losses(outputs: Sequence[Tensor], program: Program, who: str, look: Callable[[], Seen] | None) -> None:
    """Raise if a 0-d output is nan or inf: it is the same on every rank, so all of them come to this at once.

    Args:
        outputs: of the program.
        who: the rank and the call, for the error.
        look: runs the forward again and returns what each value holds; None: the node is not looked for.

    Raises:
        NonFiniteError: one is.
    """
    losses = [(index, t) for index, t in enumerate(outputs) if t.dim() == 0 and t.is_floating_point()]
    index, loss = next(((index, t) for index, t in losses if not torch.isfinite(t.detach())), (0, None))
    if loss is None:
        return
    why = 'Pass check_finite="nodes" to parallelize and the node is named that made it'
    if look is not None:
        why = cause(program.forward, index, "nan" if loss.isnan() else "inf", look())
    raise NonFiniteError(f"{who}: the loss {program.outputs[index].name} is {loss.item()}. {why}.")


def held(value: Any) -> Held | None:
    """Count what a node's value holds; None for what is no floating tensor."""
    if isinstance(value, (list, tuple)):
        parts = [part for item in cast("Sequence[Any]", value) if (part := held(item)) is not None]
        return _together(parts) if parts else None
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    finite = value[torch.isfinite(value)]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)
    return Held(int(value.isnan().sum()), int(value.isinf().sum()), value.numel(), low, high)


def _together(parts: Sequence[Held]) -> Held:
    low, high = min(part.low for part in parts), max(part.high for part in parts)
    return Held(sum(part.nan for part in parts), sum(part.inf for part in parts), sum(part.of for part in parts), low, high)


def cause(program: GraphModule, output: int, kind: str, seen: Seen) -> str:
    """Say which node of a forward makes the first "nan" or "inf" that reaches an output, and of what.

    Args:
        output: which result of the graph it is that holds one.
    """
    node = cast("tuple[Node, ...]", program.graph.output_node().args[0])[output]
    while True:
        operands = [operand for operand in node.all_input_nodes if _ranks_with(kind, operand, seen)]
        if not operands:
            return _describe(node, kind, seen)
        node = operands[0]


def _ranks_with(kind: str, node: Node, seen: Seen) -> list[int]:
    return [rank for rank, one in enumerate(seen.get(node.name, ())) if one is not None and one.has(kind)]


def _describe(node: Node, kind: str, seen: Seen) -> str:
    ranks = _ranks_with(kind, node, seen)
    if not ranks:
        return f"no node was found to make it when the call was run again: %{node.name} held none"
    first = seen[node.name][ranks[0]]
    assert first is not None
    where = f"on rank {ranks[0]}" + (f" (and {len(ranks) - 1} more)" if len(ranks) > 1 else "")
    if node.op == "placeholder":
        return f"%{user_name(node)}, which enters the program, holds {first.nan} nan and {first.inf} inf of {first.of} {where}"
    line = f", {source_line(node.meta)}," if node.meta.get("stack_trace") else ""
    operands = [f"%{user_name(operand)}: {one}" for operand in node.all_input_nodes if (one := _on(operand, ranks[0], seen)) is not None]
    made_of = f" of {'; '.join(operands)}" if operands else ""
    number = first.nan if kind == "nan" else first.inf
    return f"%{node.name} = {node.target}{line} makes {number} {kind} of {first.of} values {where}{made_of}"


def _on(node: Node, rank: int, seen: Seen) -> Held | None:
    ranks = seen.get(node.name)
    return None if ranks is None else ranks[rank]
