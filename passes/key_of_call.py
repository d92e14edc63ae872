"""What tells calls apart whose results, numbers aside, are the same: such calls are run on fake tensors once."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.fx import Node, map_arg
from torch.utils._pytree import tree_leaves

from partir.passes.share_gathers import argument_key


def key_of_call(node: Node) -> Hashable:
    """Return all that the result of a call depends on but numbers: of calls that agree in it, one may be run for all."""
    reads = node.all_input_nodes
    place = {read: ("operand", number) for number, read in enumerate(reads)}
    kwargs = {name: value for name, value in node.kwargs.items() if name != "site"}  # the numbers of a draw, not its shape
    arguments = map_arg((node.args, kwargs), lambda read: place[read])
    return node.target, argument_key(arguments), tuple(_fact(value) for read in reads for value in tree_leaves(read.meta["val"]))


def _fact(value: torch.Tensor) -> Hashable:
    return tuple(value.shape), value.stride(), value.dtype, value.device, value.is_conj(), value.is_neg()
