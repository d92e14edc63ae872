"""Replace in-place ops by their functional forms; keep every other op as it is.

    Before: %v = aten.view(%h, [-1]); %a = aten.add_(%v, 1); %y = aten.mul(%h, 2)
    After:  %v = aten.view(%h, [-1]); %a = aten.add(%v, 1); %g = aten.reshape(%a, [3, 4]); %y = aten.mul(%g, 2)

Requires: a flat graph.
Ensures: no op writes into an argument; values that were written through a view are put together again by scatters.
torch's own functionalization takes high-level ops (linear, layer_norm, attention) apart, so this one works on the graph.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import fx

from partir.errors import TraceError, source_line
from partir.passes.flatten_regions import reachable

aten = torch.ops.aten


@dataclass
class _View:
    """A node that shows ``target(parent, *rest)``; ``node`` held its value when the root had ``version`` writes."""

    node: fx.Node
    parent: fx.Node
    target: Any
    rest: tuple[Any, ...]
    version: int


def functionalize(graph: fx.Graph, differentiable: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Remove the in-place ops of a graph, in place; return the new value of each placeholder that was written.

    Args:
        graph: flat graph; ``meta["no_grad"]`` marks what ran without gradient.
        differentiable: placeholders that may have a gradient.

    Raises:
        TraceError: a write that has no functional form.
    """
    nodes = list(graph.nodes)
    if not any(_writes(node) for node in nodes):
        return {}
    writer = _Writer(graph, reachable(differentiable))
    for node in nodes:
        writer.visit(node)
    for node in reversed(nodes):
        if _writes(node):
            graph.erase_node(node)
    return {root: value for root, value in writer.latest.items() if root.op == "placeholder"}


class _Writer:
    """Walks a graph in order and knows of each tensor its newest value."""

    def __init__(self, graph: fx.Graph, reached: set[fx.Node]) -> None:
        self.graph = graph
        self.reached = reached
        self.views: dict[fx.Node, _View] = {}
        self.same: dict[fx.Node, fx.Node] = {}
        self.latest: dict[fx.Node, fx.Node] = {}
        self.versions: dict[fx.Node, int] = {}

    def visit(self, node: fx.Node) -> None:
        """Give a node the newest values of its arguments, or replace it if it writes."""
        if node.op == "placeholder":
            return
        with self.graph.inserting_before(node):
            if not _writes(node):
                view = self._view(node)
                if view is not None:
                    self.views[node] = view
                node.args = fx.map_arg(node.args, self.read)
                node.kwargs = fx.map_arg(node.kwargs, self.read)
            elif node.target is aten.batch_norm.default:
                self._batch_norm(node)
            else:
                target = cast("fx.Node", node.args[0])
                self._refuse_hidden_gradient(node, target)
                self.write(node, target, self._functional(node))
                self.same[node] = self.same.get(target, target)

    def read(self, node: fx.Node) -> fx.Node:
        """Return a node that holds the present value of `node`."""
        node = self.same.get(node, node)
        view = self.views.get(node)
        if view is None:
            return self.latest.get(node, node)
        version = self._version(node)
        if view.version != version:
            view.node = self.create(node, view.target, self.read(view.parent), *view.rest)
            view.version = version
        return view.node

    def write(self, writer: fx.Node, node: fx.Node, value: fx.Node) -> None:
        """Let `node`, and through it every tensor that shares its memory, have the new value."""
        node = self.same.get(node, node)
        view = self.views.get(node)
        if view is None:
            self.latest[node] = value
            self.versions[node] = self.versions.get(node, 0) + 1
            return
        whole = self.read(view.parent)
        scattered = _scatter(view, whole, value)
        if scattered is None:
            _refuse(writer, f"it writes through a view made by `{view.target}`, which has no inverse")
        target, arguments = scattered
        self.write(writer, view.parent, self.create(writer, target, *arguments))
        view.node, view.version = value, self._version(node)

    def create(self, like: fx.Node, target: Any, *args: Any) -> fx.Node:
        """Insert an op whose fake value is worked out here; where it comes from is copied from `like`."""
        node = call(self.graph, target, args)
        with torch.no_grad():
            value = target(*fx.map_arg(args, lambda arg: arg.meta["val"]))
        node.meta = {**like.meta, "val": value}
        return node

    def _version(self, node: fx.Node) -> int:
        while node in self.views or node in self.same:
            node = self.same[node] if node in self.same else self.views[node].parent
        return self.versions.get(node, 0)

    def _view(self, node: fx.Node) -> _View | None:
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            return None
        parent, target, rest = node.args[0], node.target, node.args[1:]
        if target is operator.getitem and parent.target in _PARTS:
            whole = cast("fx.Node", parent.args[0])
            target, rest = _PARTS[parent.target](whole.meta["val"], parent.args[1:], cast("int", node.args[1]))
            parent = whole
        elif not _aliases(node, parent):
            return None
        parent = self.same.get(parent, parent)
        return _View(node, parent, target, tuple(rest), self._version(parent))

    def _functional(self, node: fx.Node) -> fx.Node:
        """Insert the functional form of an in-place op and return its value."""
        op = cast("torch._ops.OpOverload", node.target)
        args = cast("tuple[Any, ...]", fx.map_arg(node.args, self.read))
        kwargs = cast("dict[str, Any]", fx.map_arg(node.kwargs, self.read))
        old = cast("torch.Tensor", args[0].meta["val"])
        if op is aten.copy_.default or op is aten.fill_.Tensor:
            return self._fitted(node, args[1], old)
        if op is aten.zero_.default or op is aten.fill_.Scalar:
            return self.create(node, aten.full_like.default, args[0], args[1] if len(args) > 1 else 0)
        functional = _functional_op(op)
        if functional is None or (torch.Tag.inplace_view in op.tags and self.same.get(args[0], args[0]) in self.views):
            _refuse(node, "this op has no functional form")
        value = call(self.graph, functional, args, kwargs)
        with torch.no_grad():
            result = functional(*fx.map_arg(args, _value), **fx.map_arg(kwargs, _value))
        value.meta = {**node.meta, "val": result}
        return value if torch.Tag.inplace_view in op.tags else self._fitted(node, value, old)

    def _fitted(self, node: fx.Node, value: fx.Node, old: torch.Tensor) -> fx.Node:
        """Convert and expand `value` to the dtype and shape that it is written into."""
        if value.meta["val"].dtype != old.dtype:
            like = {**node.meta, "val": value.meta["val"].to(old.dtype)}
            value = call(self.graph, aten._to_copy.default, (value,), {"dtype": old.dtype})
            value.meta = like
        if value.meta["val"].shape != old.shape:
            value = self.create(node, aten.expand.default, value, list(old.shape))
        return value

    def _batch_norm(self, node: fx.Node) -> None:
        """Make the running statistics of a training batch norm results instead of hidden writes."""
        x, weight, bias, mean, variance, training, momentum, eps = cast("tuple[Any, ...]", node.args[:8])
        read = [self.read(arg) if isinstance(arg, fx.Node) else arg for arg in (x, weight, bias, mean, variance)]
        norm = self.create(node, aten._native_batch_norm_legit_functional.default, *read, training, momentum, eps)
        parts = [self.create(node, operator.getitem, norm, index) for index in (0, 3, 4)]
        node.replace_all_uses_with(parts[0])
        for buffer, value in zip((mean, variance), parts[1:], strict=True):
            value.meta["no_grad"] = True
            self.write(node, buffer, value)

    def _refuse_hidden_gradient(self, node: fx.Node, target: fx.Node) -> None:
        target = self.same.get(target, target)
        if "no_grad" in node.meta and target in self.reached and "no_grad" not in target.meta and target.op != "placeholder":
            _refuse(node, "it writes under no_grad into a value that has a gradient")


def call(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
    """Insert a call named after its op, as `torch.export` names them: ``add``, not ``add_tensor``."""
    name = target._schema.name.split("::")[1] if isinstance(target, torch._ops.OpOverload) else target.__name__
    return graph.create_node("call_function", target, args, kwargs or {}, name=name)


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _writes(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target in (aten.batch_norm.default, aten.instance_norm.default):
        return bool(node.args[5]) and node.args[3] is not None
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in node.target._schema.arguments)


def _aliases(node: fx.Node, parent: fx.Node) -> bool:
    """Tell whether a node shows the memory of `parent`, by its schema and by the storages seen while tracing."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns, arguments = node.target._schema.returns, node.target._schema.arguments
    if not any(result.alias_info is not None for result in returns) or arguments[0].alias_info is None:
        return False
    mine, theirs = node.meta.get("val"), parent.meta.get("val")
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return False
    return mine.untyped_storage()._cdata == theirs.untyped_storage()._cdata


def _functional_op(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return ``aten.add.Tensor`` for ``aten.add_.Tensor``."""
    if op in _RENAMED:
        return _RENAMED[op]
    namespace, name = op._schema.name.split("::")
    match = re.fullmatch(r"__i(\w+)__", name)
    if match is None and not name.endswith("_"):
        return None
    packet = getattr(getattr(torch.ops, namespace), f"__{match[1]}__" if match else name.removesuffix("_"), None)
    found = getattr(packet, op._overloadname, None)
    if found is None or any(argument.alias_info and argument.alias_info.is_write for argument in found._schema.arguments):
        return None
    return cast("torch._ops.OpOverload", found)


_RENAMED = {
    aten.normal_.default: aten.normal_functional.default,
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
    **dict.fromkeys((aten.set_.source_Tensor, aten.resize_.default, aten.as_strided_.default)),
}


def _scatter(view: _View, whole: fx.Node, value: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
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
_REORDERING = (aten.expand.default, aten.as_strided.default, aten.movedim.int, aten.movedim.intlist, aten.unfold.default)


def _split_part(whole: torch.Tensor, rest: tuple[Any, ...], index: int) -> tuple[Any, tuple[Any, ...]]:
    dim = rest[1] if len(rest) > 1 else 0
    sizes = rest[0] if isinstance(rest[0], (list, tuple)) else [rest[0]] * whole.shape[dim]
    start = sum(cast("list[int]", sizes)[:index])
    return aten.slice.Tensor, (dim, start, min(start + sizes[index], whole.shape[dim]))


def _chunk_part(whole: torch.Tensor, rest: tuple[Any, ...], index: int) -> tuple[Any, tuple[Any, ...]]:
    dim = rest[1] if len(rest) > 1 else 0
    return _split_part(whole, (-(-whole.shape[dim] // rest[0]), dim), index)


def _unbind_part(whole: torch.Tensor, rest: tuple[Any, ...], index: int) -> tuple[Any, tuple[Any, ...]]:
    return aten.select.int, (rest[0] if rest else 0, index)


_PARTS: dict[Any, Callable[[torch.Tensor, tuple[Any, ...], int], tuple[Any, tuple[Any, ...]]]] = {
    aten.split.Tensor: _split_part,
    aten.split.sizes: _split_part,
    aten.split_with_sizes.default: _split_part,
    aten.chunk.default: _chunk_part,
    aten.unbind.int: _unbind_part,
}


def _refuse(node: fx.Node, reason: str) -> NoReturn:
    raise TraceError(f"{source_line(node.meta)}: the in-place op `{node.target}` cannot be captured: {reason}. Use x = op(x).")
