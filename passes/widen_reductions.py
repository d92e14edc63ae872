"""Reduce in another dtype: sums of 16-bit values between ranks are made in float32, where the user says so.

Before:  %d: bf16[256@y.x, 64@z] = reduce_scatter(%p, axis=x, dim=0)
         %g: f32[256@y.x, 64@z]  = aten._to_copy(%d, dtype=torch.float32)
After:   %w: f32[256@y, 64@z]    = aten._to_copy(%p, dtype=torch.float32)
         %g: f32[256@y.x, 64@z]  = reduce_scatter(%w, axis=x, dim=0)

Requires: a joint graph of forward and backward, simplified.
Ensures: every floating sum between ranks is in `dtype`, unless it was in a wider one; results are as they were. Idempotent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from partir.passes.node_facts import collective, is_getitem

CAST = torch.ops.aten._to_copy.default
REDUCTIONS = frozenset({"reduce_scatter", "reduce_scatter_bucket", "all_reduce", "reduce_to"})


def widen_reductions(graph: Graph, dtype: torch.dtype) -> None:
    """Make every sum between ranks in ``dtype``, in place."""
    for node in list(graph.nodes):
        if collective(node) in REDUCTIONS and not _is_maximum(node):
            _widen(node, dtype)
    for node in reversed(list(graph.nodes)):
        if node.target is CAST and not node.users:
            graph.erase_node(node)


def _is_maximum(node: Node) -> bool:
    return collective(node) == "all_reduce" and "max" in (*node.args[2:], *node.kwargs.values())


def _widen(node: Node, dtype: torch.dtype) -> None:
    """Put casts around a reduction; a cast back that is widened again falls away."""
    values = _values(node)
    narrow = values[0].dtype
    if not narrow.is_floating_point or narrow.itemsize >= dtype.itemsize:
        return
    reads = node.args[0]
    if isinstance(reads, Node):
        node.args = (_cast_before(node, reads, dtype), *node.args[1:])
        node.meta["val"] = _like(values[0], dtype)
        _cast_after(node, narrow)
        return
    node.args = ([_cast_before(node, read, dtype) for read in cast("Sequence[Node]", reads)], *node.args[1:])
    node.meta["val"] = [_like(value, dtype) for value in values]
    for item in [user for user in node.users if is_getitem(user)]:
        item.meta["val"] = _like(item.meta["val"], dtype)
        _cast_after(item, narrow)


def _cast_before(node: Node, read: Node, dtype: torch.dtype) -> Node:
    if read.target is CAST and isinstance(read.args[0], Node) and read.args[0].meta["val"].dtype == dtype:
        return read.args[0]
    with node.graph.inserting_before(node):
        return _cast(node, read, dtype)


def _cast_after(node: Node, dtype: torch.dtype) -> None:
    """Give readers of a widened sum its narrow value, and those that only widen it the sum itself."""
    users = list(node.users)
    for user in users:
        if user.target is CAST and user.meta["val"].dtype == node.meta["val"].dtype:
            user.replace_all_uses_with(node)
            node.graph.erase_node(user)
    readers = [user for user in users if user in node.users]
    if not readers:
        return
    with node.graph.inserting_after(node):
        back = _cast(node, node, dtype)
    for reader in readers:
        reader.replace_input_with(node, back)


def _cast(node: Node, source: Node, dtype: torch.dtype) -> Node:
    made = node.graph.call_function(CAST, (source,), {"dtype": dtype})
    made.meta = {**node.meta, "val": _like(source.meta["val"], dtype)}
    return made


def _like(value: Any, dtype: torch.dtype) -> Any:
    convert: Callable[..., Any] = value.to
    mode = getattr(value, "fake_mode", None)
    if mode is None:
        return convert(dtype)
    with mode:
        return convert(dtype)


def _values(node: Node) -> Sequence[torch.Tensor]:
    value = cast(Any, node.meta["val"])
    return [value] if isinstance(value, torch.Tensor) else list(value)
