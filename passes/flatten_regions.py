"""Copy an exported graph into one flat graph: no nested regions, one placeholder for each tensor of the module.

    Before: %w = wrap_with_set_grad_enabled(False, submod, %x); %c = getitem(%w, 0); %y = aten.mul(%x, %c)
    After:  %c = aten.cos(%x); %d = aten.detach(%c); %y = aten.mul(%x, %d)

Requires: the graph of a program that `capture` made.
Ensures: every node is a placeholder, an ATen (or custom) op, a getitem, or the output; what was computed under no_grad
reaches the rest through aten.detach.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import fx

from partir.errors import TraceError, source_line
from partir.passes.checkpoints import region_key
from partir.passes.torch_ops import is_higher_order
from partir.passes.user_lines import user_stack
from partir.passes.write_casts import Autocasts, active_autocasts

_SET_GRAD = "wrap_with_set_grad_enabled"
_AUTOCAST = "wrap_with_autocast"
Value = Any


class Flattener:
    """Copies nodes of nested graphs into `graph`.

    ``meta["no_grad"]`` marks those that run without gradient, ``meta["autocast"]`` says which autocasts are on.
    """

    def __init__(self, graph: fx.Graph, wrapper: str) -> None:
        self.autocasts = active_autocasts()
        self.graph = graph
        self.wrapper = wrapper

    def copy(self, module: fx.GraphModule, env: dict[fx.Node, Value], grad: bool) -> Value:
        """Copy the ops of `module`, whose placeholders are in `env`; return what it outputs."""
        for node in module.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], lambda arg: env[arg])
            if node.op == "call_function":
                env[node] = self._copy_call(module, node, env, grad)
        raise AssertionError("a graph without output")

    def _copy_call(self, module: fx.GraphModule, node: fx.Node, env: dict[fx.Node, Value], grad: bool) -> Value:
        if node.target is operator.getitem and not isinstance(env[cast("fx.Node", node.args[0])], fx.Node):
            return env[cast("fx.Node", node.args[0])][node.args[1]]
        if is_higher_order(node.target):
            return self._copy_region(module, node, env, grad)
        new = self.graph.node_copy(node, lambda arg: env[arg])
        new.meta = clean_meta(node.meta, self.wrapper)
        if not grad:
            new.meta["no_grad"] = True
        if self.autocasts:
            new.meta["autocast"] = self.autocasts
        return new

    def _copy_region(self, module: fx.GraphModule, node: fx.Node, env: dict[fx.Node, Value], grad: bool) -> Value:
        name = node.target.name() if is_higher_order(node.target) else ""
        if name == _SET_GRAD:
            grad, at = bool(node.args[0]), 1
        elif name == _AUTOCAST:
            at = 4
        else:
            where = source_line(clean_meta(_meta_of_region(module, node), self.wrapper))
            raise TraceError(f"{where}: the higher-order op `{name}` cannot be captured. Write it as plain torch ops.")
        region = cast("fx.GraphModule", module.get_submodule(str(cast("fx.Node", node.args[at]).target)))
        inputs = [env[arg] if isinstance(arg, fx.Node) else arg for arg in node.args[at + 1 :]]
        inner = dict(zip((n for n in region.graph.nodes if n.op == "placeholder"), inputs, strict=True))
        around = self.autocasts
        if name == _AUTOCAST:
            self.autocasts = _inside(around, *cast("tuple[str, Any, bool]", node.args[:3]))
        try:
            return self.copy(region, inner, grad)
        finally:
            self.autocasts = around


def _inside(around: Autocasts, kind: str, dtype: torch.dtype | None, enabled: bool) -> Autocasts:
    """Return the autocasts that are on inside `torch.autocast(kind, dtype, enabled)`."""
    others = tuple(each for each in around if each[0] != kind)
    return (*others, (kind, dtype or torch.get_autocast_dtype(kind))) if enabled else others


def clean_meta(meta: Mapping[str, Any], wrapper: str) -> dict[str, Any]:
    """Keep the value, the user's frames and the module path of a node, without the traces of `capture`'s wrapper."""
    kept = {"val": meta["val"]} if "val" in meta else {}
    if meta.get("stack_trace"):
        kept["stack_trace"] = user_stack(str(meta["stack_trace"]))
    stack: dict[str, tuple[str, Any]] = {}
    modules: dict[str, tuple[str, Any]] = meta.get("nn_module_stack") or {}
    for key, (path, kind) in modules.items():
        if path:
            stack[key] = (path.removeprefix(wrapper + "."), kind)
    region = region_key(meta)
    if region is not None:
        stack = {region: ("", None), **stack}  # first: the last one is the module
    if stack:
        kept["nn_module_stack"] = stack
    return kept


def detach_no_grad(graph: fx.Graph, differentiable: set[fx.Node]) -> None:
    """Insert aten.detach between values computed under no_grad and their users elsewhere; drop the marks.

    Args:
        graph: flat graph, changed in place.
        differentiable: placeholders that may have a gradient; what depends on none of them needs no detach.
    """
    reached = reachable(differentiable)
    for node in list(graph.nodes):
        users = [user for user in node.users if "no_grad" not in user.meta and user.target is not operator.getitem]
        if "no_grad" not in node.meta or node not in reached or not users or not _is_float(node):
            continue
        with graph.inserting_after(node):
            detached = graph.call_function(torch.ops.aten.detach.default, (node,))
        detached.meta = {key: value for key, value in node.meta.items() if key != "no_grad"}
        for user in users:
            user.replace_input_with(node, detached)
    for node in graph.nodes:
        node.meta.pop("no_grad", None)


def reachable(nodes: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes and all that depends on them."""
    reached: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending += node.users
    return reached


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _meta_of_region(module: fx.GraphModule, node: fx.Node) -> Mapping[str, Any]:
    for argument in node.args:
        if isinstance(argument, fx.Node) and argument.op == "get_attr":
            inner = getattr(module, str(argument.target), None)
            metas = [n.meta for n in inner.graph.nodes if n.meta.get("stack_trace")] if isinstance(inner, fx.GraphModule) else []
            if metas:
                return cast("Mapping[str, Any]", metas[0])
    return node.meta
