"""Local graphs written by hand, as lowering writes them: fixtures of the differentiation and runtime tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from partir.collectives import overload
from partir.layout import DTYPES, Layout
from partir.mesh import Mesh, use_mesh
from partir.program import Slot, SlotKind

aten = torch.ops.aten


class HandLowered:
    """Builds a lowered graph whose placeholders and values carry layouts and local fakes."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.graph = Graph()
        self.inputs: list[Slot] = []
        self.named: dict[str, Node] = {}
        self._mode = FakeTensorMode()

    def input(self, name: str, layout: str, kind: SlotKind = "parameter") -> Node:
        """Add a placeholder."""
        parsed = Layout.parse(layout)
        slot = Slot(name, kind, parsed, parsed.shape, DTYPES[parsed.dtype], parsed.grad)
        node = self.graph.placeholder(name.replace(".", "_"))
        with self._mode:
            node.meta["val"] = torch.empty(slot.local_shape(self.mesh), dtype=slot.dtype)
        node.meta["layout"] = parsed
        self.inputs.append(slot)
        return node

    def call(self, target: Any, *args: Any, layout: str | None = None) -> Node:
        """Add a call of a torch op, or of the partir op with that name."""
        op: Any = overload(target) if isinstance(target, str) else target
        node = self.graph.call_function(op, args)
        node.meta["stack_trace"] = f'  File "model.py", line {len(self.graph.nodes)}, in forward'
        node.meta["reason"] = f"test {node.name}"
        node.meta["origin"] = node.name
        values = torch.fx.map_arg(args, lambda arg: arg.meta["val"])
        with self._mode, use_mesh(self.mesh):
            node.meta["val"] = op(*cast("tuple[Any, ...]", values))
        if layout is not None:
            node.meta["layout"] = Layout.parse(layout)
        return node

    def linear(self, x: Node, weight: Node, state: str) -> Node:
        """Add the law of three_d.md: gather both operands, multiply, reduce-scatter; returns C at rest."""
        other = "z" if state == "y" else "y"
        gathered = self.call("all_gather", x, state, 0)
        whole = self.call("all_gather", weight, "x", 0)
        product = self.call(aten.linear.default, gathered, whole)
        return self.call("reduce_scatter", product, other, 0)

    def finish(self, results: Sequence[tuple[Node, str]]) -> tuple[GraphModule, tuple[Slot, ...], tuple[Slot, ...]]:
        """Return the module and its slots; ``results`` are nodes and the layouts in which they leave."""
        self.graph.output(tuple(node for node, _ in results))
        outputs: list[Slot] = []
        for index, (_, text) in enumerate(results):
            layout = Layout.parse(text)
            outputs.append(Slot(f"output_{index}", "output", layout, layout.shape, DTYPES[layout.dtype], layout.grad))
        return GraphModule(torch.nn.Module(), self.graph), tuple(self.inputs), tuple(outputs)


def one_linear(mesh: Mesh, rows: int = 48, inner: int = 24, columns: int = 36) -> HandLowered:
    """``C = A W^T`` alone in state y; the caller finishes it with ``C`` as the last node."""
    hand = HandLowered(mesh)
    x = hand.input("x", f"f64[{rows}@x.y, {inner}@z]", "input")
    weight = hand.input("fc.weight", f"f64[{columns}@y.x, {inner}@z]")
    hand.linear(x, weight, "y")
    return hand


def mlp(mesh: Mesh, rows: int = 48, width: int = 24, hidden: int = 48) -> HandLowered:
    """Two linears with a bias and gelu between, and the mean of the squares as the loss: ``(loss, y)``."""
    hand = HandLowered(mesh)
    x = hand.input("x", f"f64[{rows}@x.y, {width}@z]", "input")
    first = hand.input("fc1.weight", f"f64[{hidden}@y.x, {width}@z]")
    bias = hand.input("fc1.bias", f"f64[{hidden}@y.z.x]")
    second = hand.input("fc2.weight", f"f64[{width}@z.x, {hidden}@y]")
    c = hand.linear(x, first, "y")
    b = hand.call("all_gather", hand.call("all_gather", bias, "x", 0), "z", 0)
    h = hand.call(aten.gelu.default, hand.call(aten.add.Tensor, c, b))
    y = hand.linear(h, second, "z")
    squares = hand.call(aten.sum.default, hand.call(aten.mul.Tensor, y, y))
    total = hand.call("all_reduce", squares, "x.y.z")
    hand.call(aten.div.Tensor, total, float(rows * width))
    hand.named["y"] = y
    return hand
