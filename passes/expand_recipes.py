"""Replace a call whose rule has a recipe, where the recipe's factor is really split, by the recipe.

Before:  %y: f32[8@x, 64@z] = aten.layer_norm(%x, [64], %w, %b)
After:   %s: f32[8@x, 1] +z   = aten.sum(%x, [1], True)
         %a: f32[8@x, 1]      = all_reduce(%s, axis=z)
         %r: f32[8@x, 1] ~z   = spread(%a, axis=z)
         %mu: f32[8@x, 1] ~z  = aten.div(%r, 64)  ...

Requires: insert_collectives.
Ensures: no call splits a factor that its op needs whole. Idempotent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from partir.assignment import split_axes
from partir.errors import RuleError, source_line
from partir.graph import is_call, is_collective, layout_of, operands
from partir.infer import infer
from partir.layout import Layout
from partir.mesh import Mesh
from partir.passes.factorise_dims import bind
from partir.relayout import relayout
from partir.rules import Binding
from partir.rules import expressions as ex

aten = torch.ops.aten
Value = Node | int | float | bool | None

INFIX: dict[str, Any] = {
    "+": aten.add.Tensor,
    "-": aten.sub.Tensor,
    "*": aten.mul.Tensor,
    "/": aten.div.Tensor,
    "==": aten.eq.Tensor,
    "!=": aten.ne.Tensor,
    "<=": aten.le.Tensor,
    ">=": aten.ge.Tensor,
    "<": aten.lt.Tensor,
    ">": aten.gt.Tensor,
}


def expand_recipes(graph_module: GraphModule, mesh: Mesh) -> GraphModule:
    """Return the graph with recipes in place of the calls that need them."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if not is_call(node) or is_collective(node) or "binding" not in node.meta:
            continue
        factor = _split_recipe(node, mesh)
        if factor is None:
            continue
        with graph.inserting_before(node):
            value = _Expansion(graph, node, factor, mesh).run()
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module


def _split_recipe(node: Node, mesh: Mesh) -> str | None:
    binding = cast(Binding, node.meta["binding"])
    assignment = node.meta.get("assignment", {})
    for factor in binding.splits:
        if mesh.extent(split_axes(assignment, (factor,))) > 1:
            return factor
    return None


@dataclass
class _Expansion:
    graph: Graph
    node: Node
    factor: str
    mesh: Mesh

    def run(self) -> Node:
        binding = cast(Binding, self.node.meta["binding"])
        self.names: dict[str, Value] = _named_arguments(self.node)
        self.dims: dict[Node, tuple[frozenset[str], ...]] = {
            operand: tuple(frozenset(names) for names in dims)
            for operand, dims in zip(operands(self.node), binding.operands)
        }
        value: Value = None
        for name, expression in binding.splits[self.factor].statements:
            value = self.names[name] = self.evaluate(expression)
        return self.finish(cast(Node, value))

    def finish(self, value: Node) -> Node:
        """Drop the dims that the recipe kept as size 1, in the result's dtype and layout."""
        wanted = cast(torch.Tensor, self.node.meta["val"])
        if value.meta["val"].dtype != wanted.dtype:
            value = self.call(aten._to_copy.default, (value,), {"dtype": wanted.dtype}, self.dims[value])
        if value.meta["val"].shape != wanted.shape:
            binding = cast(Binding, self.node.meta["binding"])
            names = tuple(frozenset(dim) for dim in binding.results[0])
            value = self.call(aten.reshape.default, (value, list(wanted.shape)), {}, names)
        for step in relayout(layout_of(value), layout_of(self.node), self.mesh).steps:
            value = self.collective(step.op, value, dict(step.kwargs), step.result)
        return value

    def evaluate(self, expression: ex.Expression) -> Value:
        match expression:
            case ex.Constant(value):
                return value
            case ex.Name(name):
                return self.names[name]
            case ex.Lookup("size", factors):
                return self._size(factors)
            case ex.Reduce(kind, factors, inner):
                return self.reduce(kind, factors, cast(Node, self.evaluate(inner)))
            case ex.Unary(_, inner):
                value = self.evaluate(inner)
                return self.pointwise(aten.neg.default, (value,)) if isinstance(value, Node) else -cast(float, value)
            case ex.Binary(sign, left, right):
                return self.binary(sign, self.evaluate(left), self.evaluate(right))
            case ex.Call(function, items):
                return self.function(function, [self.evaluate(item) for item in items])
            case _:
                raise RuleError(
                    f"{source_line(self.node.meta)}: `{expression}` in the recipe of {self.node.target} is not understood."
                )

    def _size(self, factors: Sequence[str]) -> int:
        binding = cast(Binding, self.node.meta["binding"])
        return math.prod(binding.sizes[factor] for factor in factors)

    def binary(self, sign: str, left: Value, right: Value) -> Value:
        if not isinstance(left, Node) and not isinstance(right, Node):
            return ex.OPERATORS[sign](left, right)
        if not isinstance(left, Node) or right is None:
            return self._number_first(sign, left, right)
        return self.pointwise(INFIX[sign], (left, right))

    def _number_first(self, sign: str, left: Value, right: Value) -> Value:
        """An absent bias or weight adds nothing and scales nothing."""
        if left is None or right is None:
            return right if left is None else left
        if sign in "+*":
            return self.pointwise(INFIX[sign], (right, left))
        negated = (
            self.pointwise(aten.neg.default, (right,))
            if sign == "-"
            else self.pointwise(aten.reciprocal.default, (right,))
        )
        return self.pointwise(INFIX["+" if sign == "-" else "*"], (negated, left))

    def function(self, name: str, items: Sequence[Value]) -> Value:
        if name == "default":
            return items[1] if items[0] is None else items[0]
        packet = getattr(aten, name)
        overload = packet.self if name == "where" else packet.default
        return self.pointwise(overload, tuple(items))

    def pointwise(self, target: Any, args: tuple[Value, ...]) -> Node:
        names: list[frozenset[str]] = []
        for operand in [arg for arg in args if isinstance(arg, Node)]:
            dims = self.dims[operand]
            names = [frozenset()] * (len(dims) - len(names)) + names
            offset = len(names) - len(dims)
            names = names[:offset] + [a | b for a, b in zip(names[offset:], dims)]
        return self.call(target, args, {}, tuple(names))

    def reduce(self, kind: str, factors: Sequence[str], value: Node) -> Node:
        names = self.dims[value]
        dims = [index for index, dim in enumerate(names) if dim & set(factors)]
        kept = tuple(frozenset() if index in dims else dim for index, dim in enumerate(names))
        if kind == "max":
            value = self.call(aten.detach.default, (value,), {}, names)
            value = self.call(aten.amax.default, (value, dims, True), {}, kept)
        else:
            value = self.call(aten.sum.dim_IntList, (value, dims, True), {}, kept)
        return self.make_whole(value)

    def make_whole(self, value: Node) -> Node:
        """Reduce what is pending over every axis of the factor at once, and spread it to meet split values."""
        held = layout_of(value)
        if not held.pending:
            return value
        axis = ".".join(axis for axis, _ in held.pending)
        kind = held.pending[0][1]
        whole = Layout(held.dtype, held.dims, (), held.varied, held.grad)
        value = self.collective(
            "all_reduce", value, {"axis": axis, "op": kind} if kind == "max" else {"axis": axis}, whole
        )
        if not held.grad:
            return value
        spread = Layout(held.dtype, held.dims, (), (*held.varied, *(a for a, _ in held.pending)), True)
        return self.collective("spread", value, {"axis": axis}, spread)

    def collective(self, op: str, value: Node, kwargs: dict[str, Any], layout: Layout) -> Node:
        new = self.graph.call_function(getattr(torch.ops.partir, op).default, (value,), kwargs)
        where = source_line(self.node.meta)
        new.meta = {
            "val": value.meta["val"],
            "layout": layout,
            "origin": self.node.name,
            "reason": f"{self.factor} of {self.node.name}, {where}",
        }
        new.meta |= _trace_of(self.node)
        self.dims[new] = self.dims[value]
        return new

    def call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[frozenset[str], ...]
    ) -> Node:
        new = self.graph.call_function(target, args, kwargs)
        new.meta = {"origin": self.node.name, "reason": "recipe", **_trace_of(self.node)}
        new.meta["val"] = _fake(target, args, kwargs)
        new.meta["binding"] = bind(new)
        layouts = [layout_of(operand) for operand in operands(new)]
        grad = any(layout.grad for layout in layouts) and target is not aten.detach.default
        layout = infer(new.meta["binding"], layouts, (new.meta["val"],), (grad,), self.mesh)[0]
        new.meta["layout"] = layout
        self.dims[new] = names
        return new


def _named_arguments(node: Node) -> dict[str, Any]:
    """Return operands and attributes by the names that the rule's text gives them; absent operands are None."""
    binding = cast(Binding, node.meta["binding"])
    absent = {name: None for name in binding.schema_names}
    return absent | dict(binding.attributes) | dict(zip(binding.names, operands(node)))


def _fake(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    modes = [a.meta["val"].fake_mode for a in args if isinstance(a, Node)]
    values = [a.meta["val"] if isinstance(a, Node) else a for a in args]
    with modes[0] if modes else FakeTensorMode():
        return cast(torch.Tensor, target(*values, **kwargs))


def _trace_of(node: Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
