"""What a collective holds beside its operand and its result while its message is under way, as the distributed runtime sends it."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch.fx import Node

from partir.collectives import split_axes
from partir.graph import collective_name, operands, tensor_of
from partir.mesh import Mesh

RENAMES = ("spread", "settle")
"""Collectives whose result is their operand under another type."""


def copies_of(node: Node, mesh: Mesh) -> tuple[bool, bool]:
    """Return whether a message sends a copy of its operand, and whether it receives rows that are put together in a copy.

    A message has one row a member. The operand's first dim is such rows as it is, where the group is ordered by rank.
    """
    name = collective_name(node)
    if name.endswith("_bucket") or name == "all_to_all":
        return True, True
    if name not in ("all_gather", "all_gather_same", "reduce_scatter"):
        return False, False
    operand = tensor_of(operands(node)[0])
    axes = split_axes(_argument(node, "axis"))
    in_rows = _argument(node, "dim") % operand.dim() == 0 and _argument(node, "blocks") == 1 and _by_rank(axes, mesh)
    if name == "reduce_scatter":
        return not (in_rows and operand.is_contiguous()), False
    return not operand.is_contiguous(), not in_rows


def adds_up_rows(node: Node) -> bool:
    """Return whether a sum between ranks holds all that it receives, as much as it sends, until it is added up.

    NCCL adds up what arrives. On gloo the runtime does, in the order of the members, so that sums are bitwise those of the simulated mesh.
    """
    on_gloo = dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo"
    return on_gloo and collective_name(node) in ("reduce_scatter", "reduce_scatter_bucket")


def _by_rank(axes: tuple[str, ...], mesh: Mesh) -> bool:
    """Return whether the members of a group over axes, row-major in their order, are in the order of their ranks."""
    places = [mesh.names.index(axis) for axis in axes if mesh[axis] > 1]
    return places == sorted(places)


def _argument(node: Node, name: str) -> Any:
    if name in node.kwargs:
        return node.kwargs[name]
    place, argument = next((n, one) for n, one in enumerate(cast(Any, node.target)._schema.arguments) if one.name == name)
    return node.args[place] if place < len(node.args) else argument.default_value
