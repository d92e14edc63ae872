"""Views: which ops show the memory of their operand, and which op puts a changed view back into it.

Before: %v = aten.select(%x, 0, 1); %w is the new value of %v
After:  %y = aten.select_scatter(%x, %w, 0, 1) is the new value of %x
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from partir.passes.torch_ops import is_op, schema_of, share_memory

aten = torch.ops.aten


@dataclass
class View:
    """A node that shows ``target(parent, *rest)``; ``node`` held its value when the root had ``version`` writes."""

    node: fx.Node
    parent: fx.Node
    target: Any
    rest: tuple[Any, ...]
    version: int


def find_view(node: fx.Node) -> View | None:
    """Return what a node shows, its parent as the graph has it and its version 0; None if it is no view."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    parent, target, rest = node.args[0], node.target, node.args[1:]
    if target is operator.getitem and parent.target in _PARTS:
        whole = cast("fx.Node", parent.args[0])
        target, rest = _PARTS[parent.target](whole.meta["val"], parent.args[1:], cast("int", node.args[1]))
        return View(node, whole, target, tuple(rest), 0)
    return View(node, parent, target, tuple(rest), 0) if _aliases(node, parent) else None


def scatter(view: View, whole: fx.Node, value: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """Return the op that puts `value`, shown by a view, back into `whole`."""
    rest = view.rest
    if view.target in _SCATTERS:
        return _SCATTERS[view.target], (whole, value, *rest)
    if view.target is aten.narrow.default:
        dim, start, length = cast("tuple[int, int, int]", rest)
        return aten.slice_scatter.default, (whole, value, dim, start, start + length)
    if view.target in (aten.transpose.int, aten.t.default):
        return view.target, (value, *rest)
    if view.target is aten.permute.default:
        dims = [dim % len(cast("list[int]", rest[0])) for dim in cast("list[int]", rest[0])]
        return aten.permute.default, (value, [dims.index(dim) for dim in range(len(dims))])
    same_order = whole.meta["val"].numel() == value.meta["val"].numel() and view.target not in _REORDERING
    return (aten.reshape.default, (value, list(whole.meta["val"].shape))) if same_order else None


_SCATTERS = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
_REORDERING = (
    aten.expand.default,
    aten.as_strided.default,
    aten.movedim.int,
    aten.movedim.intlist,
    aten.unfold.default,
)


def _split_part(whole: torch.Tensor, rest: Sequence[Any], index: int) -> tuple[Any, tuple[Any, ...]]:
    dim = rest[1] if len(rest) > 1 else 0
    given: Any = rest[0]
    sizes: list[int] = [given] * whole.shape[dim] if isinstance(given, int) else list(given)
    start = sum(sizes[:index])
    return aten.slice.Tensor, (dim, start, min(start + sizes[index], whole.shape[dim]))


def _chunk_part(whole: torch.Tensor, rest: Sequence[Any], index: int) -> tuple[Any, tuple[Any, ...]]:
    dim = rest[1] if len(rest) > 1 else 0
    return _split_part(whole, (-(-whole.shape[dim] // rest[0]), dim), index)


def _unbind_part(whole: torch.Tensor, rest: Sequence[Any], index: int) -> tuple[Any, tuple[Any, ...]]:
    return aten.select.int, (rest[0] if rest else 0, index)


_PARTS: dict[Any, Callable[[torch.Tensor, Sequence[Any], int], tuple[Any, tuple[Any, ...]]]] = {
    aten.split.Tensor: _split_part,
    aten.split.sizes: _split_part,
    aten.split_with_sizes.default: _split_part,
    aten.chunk.default: _chunk_part,
    aten.unbind.int: _unbind_part,
}


def _aliases(node: fx.Node, parent: fx.Node) -> bool:
    """Tell whether a node shows the memory of `parent`, by its schema and by the storages seen while tracing."""
    if not is_op(node.target):
        return False
    schema = schema_of(node.target)
    if schema.arguments[0].alias_info is None or not any(result.alias_info is not None for result in schema.returns):
        return False
    mine, theirs = node.meta.get("val"), parent.meta.get("val")
    return isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor) and share_memory(mine, theirs)
