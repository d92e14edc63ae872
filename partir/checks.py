"""Checks of graphs between passes: small functions that return reasons, and ``verify_graph`` that raises them.

Types are checked on the forward graph, before differentiation: if it type-checks, the derived backward is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from partir.collectives import apply
from partir.errors import PartirError, VerifyError, source_line
from partir.graph import (
    collective_name,
    gives_gradient,
    is_call,
    is_collective,
    is_getitem,
    layout_of,
    layouts_of,
    operands,
    outputs_of,
)
from partir.infer import infer
from partir.layout import DTYPES, Layout
from partir.mesh import Mesh


def verify_graph(graph_module: GraphModule, mesh: Mesh, stage: str) -> None:
    """Check a graph whose nodes have layouts.

    Args:
        stage: "annotated" (choices only), "collectives" (inserted; recipes still to be expanded), "lowered".

    Raises:
        VerifyError: names the pass's stage, the node, the user's line and the law that is broken.
    """
    checks = [check_lint, check_layouts]
    if stage != "annotated":
        calls = check_calls if stage == "lowered" else check_calls_before_recipes
        checks += [check_inputs, check_collectives, calls, check_gradients, check_outputs]
    for check in checks:
        for node, reason in check(graph_module, mesh):
            where = f"{source_line(node.meta)}: %{node.name}: " if node is not None else ""
            raise VerifyError(f"{stage} graph, {check.__name__}: {where}{reason}")


Reasons = Iterator[tuple[Node | None, str]]


def check_lint(graph_module: GraphModule, mesh: Mesh) -> Reasons:
    """The graph is well formed."""
    try:
        graph_module.graph.lint()
    except RuntimeError as error:
        yield None, str(error)


def check_layouts(graph_module: GraphModule, mesh: Mesh) -> Reasons:
    """Every value has a layout whose axes divide its dims."""
    for node in graph_module.graph.nodes:
        if node.op == "output":
            continue
        if node.meta.get("layout") is None:
            yield node, "has no layout"
            continue
        for layout in layouts_of(node):
            try:
                layout.local_shape(mesh)
            except PartirError as error:
                yield node, str(error)


def check_inputs(graph_module: GraphModule, mesh: Mesh) -> Reasons:
    """Inputs are I, S or N: an R would arrive without the sum of its gradient, a P unfinished."""
    for node in graph_module.graph.nodes:
        if node.op != "placeholder":
            continue
        layout = layout_of(node).strip(mesh)
        if layout.varied or layout.pending:
            yield node, f"arrives as {layout}; inputs are I, S or N: spread it before use"


def check_collectives(graph_module: GraphModule, mesh: Mesh) -> Reasons:
    """Each collective alone: what it makes of its operand's layout is its own layout."""
    for node in graph_module.graph.nodes:
        if not is_collective(node) or collective_name(node) == "coordinate":
            continue
        operand: Any = [layout_of(o).strip(mesh) for o in operands(node)]
        if not collective_name(node).endswith("_bucket"):
            operand = operand[0]
        try:
            expected = apply(collective_name(node), operand, mesh, **_arguments(node))
        except PartirError as error:
            yield node, str(error)
            continue
        found = layouts_of(node) if isinstance(expected, tuple) else layout_of(node)
        if _canonical(expected, mesh) != _canonical(found, mesh):
            yield node, f"is {found}, but {collective_name(node)} of {operand} is {expected}"


def _canonical(layout: Any, mesh: Mesh) -> Any:
    return layout.canonical(mesh) if isinstance(layout, Layout) else tuple(item.canonical(mesh) for item in layout)


def _arguments(node: Node) -> dict[str, Any]:
    """Return a collective's arguments but its operand, by name."""
    schema = [argument.name for argument in cast(Any, node.target)._schema.arguments]
    return dict(zip(schema[1:], node.args[1:])) | dict(node.kwargs)


def check_calls(graph_module: GraphModule, mesh: Mesh) -> Reasons:
    """Operands of a local call may meet, its result has the type that follows, and no op runs on a part of what it needs whole."""
    yield from _check_calls(graph_module, mesh, recipes=False)


def check_calls_before_recipes(graph_module: GraphModule, mesh: Mesh) -> Reasons:
    """As check_calls, where calls that have a recipe may still be split."""
    yield from _check_calls(graph_module, mesh, recipes=True)


def _check_calls(graph_module: GraphModule, mesh: Mesh, recipes: bool) -> Reasons:
    for node in graph_module.graph.nodes:
        if is_getitem(node):
            yield from _check_getitem(node, mesh)
        if not is_call(node) or is_collective(node):
            continue
        binding = node.meta.get("binding")
        if binding is None:
            yield node, "has no rule"
            continue
        layouts = [layout_of(operand) for operand in operands(node)][: len(binding.operands)]
        claimed = layouts_of(node)
        outputs = [torch.empty(layout.shape, dtype=DTYPES[layout.dtype], device="meta") for layout in claimed]
        if node.target is torch.ops.aten._to_copy.default:
            yield from _check_cast(node, layouts[0], claimed[0])
            continue
        try:
            expected = infer(binding, layouts, outputs, [layout.grad for layout in claimed], mesh, claimed, recipes)
        except PartirError as error:
            yield node, str(error)
            continue
        if _canonical(claimed, mesh) != _canonical(expected, mesh):
            yield node, f"is {'; '.join(map(str, claimed))}, its operands make it {'; '.join(map(str, expected))}"


def _check_cast(node: Node, operand: Layout, claimed: Layout) -> Reasons:
    """A cast leaves every block where it is, however a dim is split; what is pending stays so, for it is linear."""
    expected = replace(operand, dtype=claimed.dtype)
    if claimed != expected and replace(claimed, grad=expected.grad, varied=expected.varied) != expected:
        yield node, f"is {claimed}, a cast of {operand} is {expected}"


def _check_getitem(node: Node, mesh: Mesh) -> Reasons:
    source, index = cast(Node, node.args[0]), cast(int, node.args[1])
    if layouts_of(source)[index] != layout_of(node):
        yield node, f"is {layout_of(node)}, its source's result {index} is {layouts_of(source)[index]}"


def check_gradients(graph_module: GraphModule, mesh: Mesh) -> Reasons:
    """A floating result of a call has a gradient where an operand has one: what is called N must not be differentiated."""
    for node in graph_module.graph.nodes:
        if not is_call(node) or is_collective(node):
            continue
        wanted = gives_gradient(node) and any(layout_of(operand).grad for operand in operands(node))
        for layout in layouts_of(node):
            if layout.grad != wanted and DTYPES[layout.dtype].is_floating_point and not _has_maximum(layout):
                yield node, f"is {layout}, but {'an' if wanted else 'no'} operand has a gradient, so it has {'one' if wanted else 'none'}"


def _has_maximum(layout: Layout) -> bool:
    return any(kind == "max" for _, kind in layout.pending)


def check_outputs(graph_module: GraphModule, mesh: Mesh) -> Reasons:
    """Outputs are I, S or N, and whole or in blocks as wanted: an R would leave with a gradient counted once a rank, a P unfinished."""
    wanted = graph_module.graph.output_node().meta.get("layouts")
    for index, value in enumerate(outputs_of(graph_module)):
        if not isinstance(value, Node):
            continue
        layout = layout_of(value).strip(mesh)
        if layout.varied or layout.pending:
            yield value, f"leaves as {layout}; outputs are I, S or N: settle or reduce it first"
        elif wanted is not None and layout.canonical(mesh).dims != wanted[index].canonical(mesh).dims:
            yield value, f"leaves as {layout}, output {index} is to leave as {wanted[index]}"
