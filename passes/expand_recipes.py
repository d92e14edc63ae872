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

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from partir.assignment import split_axes
from partir.graph import gives_gradient, is_call, is_collective, is_getitem, layout_of, layouts_of, operands
from partir.infer import infer
from partir.layout import Layout
from partir.mesh import Mesh
from partir.passes.factorise_dims import bind
from partir.passes.key_of_call import key_of_call
from partir.precision import is_half
from partir.relayout import relayout
from partir.rules import Binding
from partir.rules.recipe import run_body
from partir.subdims import carry


def expand_recipes(graph_module: GraphModule, mesh: Mesh) -> GraphModule:
    """Return the graph with recipes in place of the calls that need them."""
    graph, known = graph_module.graph, dict[Hashable, tuple[Any, Binding]]()
    for node in list(graph.nodes):
        if not is_call(node) or is_collective(node) or "binding" not in node.meta:
            continue
        factor = _split_factor(node, mesh)
        if factor is not None:
            with graph.inserting_before(node):
                _replace(graph, node, _Expansion(graph, node, factor, mesh, known).run())
    graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module


def _split_factor(node: Node, mesh: Mesh) -> str | None:
    binding = cast(Binding, node.meta["binding"])
    assignment = node.meta.get("assignment", {})
    direct = frozenset[str]() if any(layout.grad for layout in layouts_of(node)) else binding.maxima
    needed = [factor for factor in binding.splits if factor not in direct]
    padded = node.meta.get("pads", {})
    return next((factor for factor in needed if factor in padded or mesh.extent(split_axes(assignment, (factor,))) > 1), None)


def _replace(graph: Graph, node: Node, results: list[Node]) -> None:
    if isinstance(node.meta["val"], torch.Tensor):
        node.replace_all_uses_with(results[0])
    else:
        for item in [user for user in node.users if is_getitem(user)]:
            item.replace_all_uses_with(results[cast(int, item.args[1])])
            graph.erase_node(item)
    graph.erase_node(node)


@dataclass
class _Expansion:
    """A recipe's backend (rules.recipe.Backend) that writes nodes with global sizes and layouts.

    ``known``: the results and bindings of calls of the graph so far, for most recipes repeat each other.
    """

    graph: Graph
    node: Node
    factor: str
    mesh: Mesh
    known: dict[Hashable, tuple[Any, Binding]]
    narrow: dict[Node, torch.dtype] = field(default_factory=dict[Node, torch.dtype])

    def run(self) -> list[Node]:
        """Return one node a result, in the dtype and layout of the call's."""
        binding = cast(Binding, self.node.meta["binding"])
        body = binding.splits[self.factor]
        reads = [self._widened(operand) for operand in operands(self.node)]
        results = run_body(body, binding, reads, self, self.node.meta.get("pads"))
        values = self.node.meta["val"] if not isinstance(self.node.meta["val"], torch.Tensor) else (self.node.meta["val"],)
        return [self._finish(r, v.dtype, w) for r, v, w in zip(results, values, layouts_of(self.node))]

    def _widened(self, value: Node) -> Node:
        """Compute on 16-bit values in float32, as torch's own kernels do: a float16 square or cube of a root overflows."""
        dtype = self.dtype(value)
        if not is_half(dtype):
            return value
        wide = self.call(torch.ops.aten._to_copy.default, value, dtype=torch.float32)
        self.narrow[wide] = dtype
        return wide

    def _finish(self, value: Node, dtype: torch.dtype, wanted: Layout) -> Node:
        if value.meta["val"].dtype != dtype:
            value = self.call(torch.ops.aten._to_copy.default, value, dtype=dtype)
        for step in relayout(layout_of(value), wanted, self.mesh).steps:
            value = self._collective(step.op, value, dict(step.kwargs), step.result, f"result of {self.node.name}")
        return value

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        """Write a call; its layout follows from its operands'."""
        new = self.graph.call_function(op, args, kwargs)
        new.meta = {"origin": self.node.name, "reason": "recipe", **_trace_of(self.node)}
        key = key_of_call(new)
        if key not in self.known:
            new.meta["val"] = _fake(op, args, kwargs)
            self.known[key] = new.meta["val"], bind(new)
        new.meta["val"], new.meta["binding"] = self.known[key]
        new.meta["subdims"] = carry(new.meta["binding"], [operand.meta["subdims"][0] for operand in operands(new)])
        layouts = [layout_of(operand) for operand in operands(new)]
        differentiable = new.meta["val"].is_floating_point() or new.meta["val"].is_complex()
        grad = differentiable and any(layout.grad for layout in layouts) and gives_gradient(new)
        new.meta["layout"] = infer(new.meta["binding"], layouts, (new.meta["val"],), (grad,), self.mesh)[0]
        return new

    def reduce(self, kind: str, factors: tuple[str, ...], value: Node) -> Node:
        """Reduce what is pending over every axis of the factors at once, and spread it to meet split values."""
        held = layout_of(value)
        if not held.pending:
            return value
        axes = tuple(axis for axis, _ in held.pending)
        arguments = {"axis": ".".join(axes), **({"op": "max"} if kind == "max" else {})}
        whole = replace(held, pending=())
        reason = f"{kind} over {', '.join(factors)} in {self.node.name}"
        value = self._collective("all_reduce", value, arguments, whole, reason)
        if not held.grad:
            return value
        spread = replace(whole, varied=(*held.varied, *axes))
        return self._collective("spread", value, {"axis": ".".join(axes)}, spread, reason)

    def dtype(self, value: Node) -> torch.dtype:
        """Return the dtype of a node's tensor; of an operand that was widened, its own."""
        return self.narrow.get(value, cast(torch.dtype, value.meta["val"].dtype))

    def _collective(self, op: str, value: Node, kwargs: dict[str, Any], layout: Layout, reason: str) -> Node:
        new = self.graph.call_function(getattr(torch.ops.partir, op).default, (value,), kwargs)
        new.meta = {key: value.meta[key] for key in ("val", "subdims")}
        new.meta |= {"layout": layout, "origin": self.node.name, "reason": reason, **_trace_of(self.node)}
        return new


def _fake(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    modes = [arg.meta["val"].fake_mode for arg in args if isinstance(arg, Node)]
    values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
    with modes[0] if modes else FakeTensorMode(), torch.no_grad():
        return op(*values, **kwargs)


def _trace_of(node: Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
