"""Replace in-place ops by their functional forms; keep every other op as it is.

    Before: %v = aten.view(%h, [-1]); %a = aten.add_(%v, 1); %y = aten.mul(%h, 2)
    After:  %v = aten.view(%h, [-1]); %a = aten.add(%v, 1); %g = aten.reshape(%a, [3, 4]); %y = aten.mul(%g, 2)

Requires: a flat graph.
Ensures: no op writes into an argument; values that were written through a view are put together again by scatters.
torch's own functionalization takes high-level ops (linear, layer_norm) apart, so this one works on the graph.
"""

from __future__ import annotations

import operator
import re
from typing import Any, NoReturn, cast

import torch
from torch import fx

from partir.errors import TraceError, source_line
from partir.passes.flatten_regions import reachable
from partir.passes.torch_ops import is_op, name_of, overload, schema_of, writes_into
from partir.passes.views import View, find_view, scatter

aten = torch.ops.aten


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
        self.views: dict[fx.Node, View] = {}
        self.same: dict[fx.Node, fx.Node] = {}
        self.latest: dict[fx.Node, fx.Node] = {}
        self.versions: dict[fx.Node, int] = {}

    def visit(self, node: fx.Node) -> None:
        """Give a node the newest values of its arguments, or replace it if it writes."""
        if node.op == "placeholder":
            return
        with self.graph.inserting_before(node):
            if not _writes(node):
                view = find_view(node)
                if view is not None:
                    view.parent = self.same.get(view.parent, view.parent)
                    view.version = self._version(view.parent)
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
        if view.target is aten.detach.default and view.parent in self.reached:
            _refuse(writer, "it writes through a detach into a value that has a gradient")
        whole = self.read(view.parent)
        scattered = scatter(view, whole, value)
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

    def _functional(self, node: fx.Node) -> fx.Node:
        """Insert the functional form of an in-place op and return its value."""
        op: Any = node.target
        args = cast("tuple[Any, ...]", fx.map_arg(node.args, self.read))
        kwargs = cast("dict[str, Any]", fx.map_arg(node.kwargs, self.read))
        old = cast("torch.Tensor", args[0].meta["val"])
        if op is aten.copy_.default or op is aten.fill_.Tensor:
            return self._fitted(node, args[1], old)
        if op is aten.zero_.default or op is aten.fill_.Scalar:
            return self.create(node, aten.full_like.default, args[0], args[1] if len(args) > 1 else 0)
        functional = functional_op(op)
        if functional is None or (torch.Tag.inplace_view in op.tags and self.same.get(args[0], args[0]) in self.views):
            _refuse(node, "this op has no functional form")
        args += _defaults(op, functional, len(args), kwargs)
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
    name = name_of(target).split("::")[1] if is_op(target) else target.__name__
    return graph.create_node("call_function", target, args, kwargs or {}, name=name)


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _writes(node: fx.Node) -> bool:
    if node.op != "call_function" or not is_op(node.target):
        return False
    if node.target in (aten.batch_norm.default, aten.instance_norm.default):
        return bool(node.args[5]) and node.args[3] is not None
    return writes_into(node.target)


def functional_op(op: Any) -> Any:
    """Return ``aten.add.Tensor`` for ``aten.add_.Tensor``, or None."""
    if op in _RENAMED:
        return _RENAMED[op]
    namespace, name = name_of(op).split("::")
    match = re.fullmatch(r"__i(\w+)__", name)
    if match is None and not name.endswith("_"):
        return None
    functional = overload(namespace, f"__{match[1]}__" if match else name[:-1], schema_of(op).overload_name)
    return None if functional is None or writes_into(functional) else functional


def _defaults(op: Any, functional: Any, given: int, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the defaults of an in-place op for arguments that its functional form has no default for: `x.bernoulli_()`."""
    needed = [argument for argument in schema_of(functional).arguments if not argument.has_default_value()]
    missing = schema_of(op).arguments[given : len(needed)]
    return tuple(argument.default_value for argument in missing if argument.name not in kwargs)


_RENAMED: dict[Any, Any] = {
    aten.normal_.default: aten.normal_functional.default,
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
    **dict.fromkeys((aten.set_.source_Tensor, aten.resize_.default, aten.as_strided_.default)),
}


def _refuse(node: fx.Node, reason: str) -> NoReturn:
    raise TraceError(f"{source_line(node.meta)}: the in-place op `{node.target}` cannot be captured: {reason}. Use x = op(x).")
