"""verify_graph refuses every graph that is wrong: one collective dropped or doubled, one type, axis or layout changed.

Negative controls on a lowered GPT block. What is refused here would run, most of it with the right loss and wrong gradients.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from examples.models.gpt import Block, GPTConfig
from partir.checks import verify_graph
from partir.dims import Dim, Part
from partir.errors import VerifyError
from partir.graph import collective_name, is_collective, layout_of, layouts_of
from partir.layout import Layout
from partir.mesh import Mesh
from partir.passes.run_passes import copy_graph
from tests.passes_run import PassRun, run_passes

MESH = Mesh.parse((2, 2, 2))


class GPTBlock(nn.Module):
    """A block between an embedding and a loss, so that every kind of collective of a GPT is there."""

    def __init__(self) -> None:
        super().__init__()
        config = GPTConfig(vocab_size=16, block_size=8, num_layers=1, num_heads=4, hidden=16)
        self.embedding = nn.Embedding(16, 16)
        self.block = Block(config)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        y = self.block(self.embedding(ids))
        return y, y.square().mean()


@lru_cache
def passes() -> dict[str, PassRun]:
    torch.manual_seed(0)
    return run_passes(GPTBlock(), (torch.randint(0, 16, (8, 2)),), (2, 2, 2), outputs="whole")


def lowered() -> GraphModule:
    """Return a fresh copy of the lowered graph."""
    return copy_graph(passes()["bucket_vectors"].after)


def refusal(graph: GraphModule, stage: str = "lowered") -> str:
    """Return the text of the error with which verify_graph refuses a graph."""
    with pytest.raises(VerifyError) as caught:
        verify_graph(graph, MESH, stage)
    return str(caught.value)


def collectives(graph: GraphModule) -> list[Node]:
    return [node for node in graph.graph.nodes if is_collective(node)]


def drop(node: Node) -> None:
    """Take a collective away: readers get what it read."""
    for user in list(node.users):
        if collective_name(node).endswith("_bucket"):
            user.replace_all_uses_with(node.args[0][user.args[1]])  # pyright: ignore
            node.graph.erase_node(user)
    if node.users:
        node.replace_all_uses_with(node.all_input_nodes[0])
    node.graph.erase_node(node)


def double(node: Node) -> None:
    """Run a collective twice in a row."""
    graph = node.graph
    with graph.inserting_after(node):
        again = graph.node_copy(node, lambda old: old)
    again.meta = dict(node.meta)
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    items = [user for user in again.users if user.op == "call_function"]
    if collective_name(node).endswith("_bucket"):
        with graph.inserting_before(again):
            read = [_item(graph, node, index) for index in range(len(node.meta["layout"]))]
        again.args = (read, *again.args[1:])
        assert items
    else:
        again.args = (node, *again.args[1:])


def _item(graph: torch.fx.Graph, bucket: Node, index: int) -> Node:
    item = graph.call_function(operator.getitem, (bucket, index))
    item.meta = {"val": bucket.meta["val"][index], "layout": bucket.meta["layout"][index]}
    return item


@pytest.mark.parametrize("stage", ["insert_collectives", "expand_recipes", "localize_shapes", "bucket_vectors"])
def test_the_graphs_themselves_are_accepted(stage: str) -> None:
    run = passes()[stage]
    verify_graph(run.after, MESH, run.check or "lowered")


def test_the_graph_has_every_collective_of_a_block() -> None:
    found = {collective_name(node) for node in collectives(lowered())}
    assert found >= {"all_gather", "all_gather_same", "reduce_scatter", "all_reduce", "slice", "spread", "settle", "once", "zero_pad"}
    assert "all_gather_bucket" in found


@pytest.mark.parametrize("change", [drop, double])
def test_each_collective_dropped_or_doubled(change: Callable[[Node], None]) -> None:
    names = [node.name for node in collectives(lowered())]
    assert len(names) > 30
    for name in names:
        graph = lowered()
        change(next(node for node in graph.graph.nodes if node.name == name))
        assert re.match(r"lowered graph, check_\w+: .*: %\w+: ", refusal(graph)), name


AXES = ("x", "y", "z")


def retyped(layout: Layout, axis: str) -> Iterator[Layout]:
    """Yield a layout with every other type that it may have along one axis that does not split it."""
    if layout.type(axis) == "S":
        return
    pending = tuple(item for item in layout.pending if item[0] != axis)
    varied = tuple(name for name in layout.varied if name != axis)
    others = {"P": replace(layout, pending=(*pending, (axis, "sum")), varied=varied), "I": replace(layout, pending=pending, varied=varied)}
    if layout.grad:
        others["R"] = replace(layout, pending=pending, varied=(*varied, axis))
    yield from (other for other in others.values() if other != layout)


def test_a_type_marked_wrong_on_any_value() -> None:
    """~ for I, I for ~, P for either, along each axis of each value, and a value that claims to have no gradient."""
    count = 0
    for index, node in enumerate(lowered().graph.nodes):
        layouts = layouts_of(node) if node.op != "output" else ()
        for place, layout in enumerate(layouts):
            wrong = [other for axis in AXES for other in retyped(layout, axis)]
            if layout.grad and node.op != "placeholder":
                wrong.append(replace(layout, varied=(), grad=False))
            for other in wrong:
                graph = lowered()
                target = list(graph.graph.nodes)[index]
                target.meta["layout"] = other if isinstance(target.meta["layout"], Layout) else _with(layouts, place, other)
                text = refusal(graph)
                assert re.match(r"lowered graph, check_\w+: .*: %\w+: ", text), f"{node.name} {layout} as {other}: {text}"
                count += 1
    assert count > 200


def _with(layouts: tuple[Layout, ...], place: int, other: Layout) -> tuple[Layout, ...]:
    return (*layouts[:place], other, *layouts[place + 1 :])


def swapped(layout: Layout, one: str, other: str) -> Layout:
    """Exchange two axes in a layout, wherever they are."""
    names = {one: other, other: one}

    def axes(old: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(names.get(axis, axis) for axis in old)

    dims = tuple(Dim(tuple(Part(part.size, axes(part.axes)) for part in dim.parts), axes(dim.axes)) for dim in layout.dims)
    pending = tuple((names.get(axis, axis), kind) for axis, kind in layout.pending)
    return replace(layout, dims=dims, pending=pending, varied=axes(layout.varied))


@pytest.mark.parametrize("one, other", [("x", "y"), ("y", "z"), ("x", "z")])
def test_two_axes_swapped_in_one_layout(one: str, other: str) -> None:
    for index, node in enumerate(lowered().graph.nodes):
        if node.op == "output" or not isinstance(node.meta["layout"], Layout):
            continue
        wrong = swapped(node.meta["layout"], one, other)
        if wrong == node.meta["layout"] or not node.users:
            continue
        graph = lowered()
        list(graph.graph.nodes)[index].meta["layout"] = wrong
        assert "%" in refusal(graph), f"{node.name}: {wrong}"


@pytest.mark.parametrize("one, other", [("x", "y"), ("y", "z"), ("x", "z")])
def test_two_axes_swapped_in_one_collective(one: str, other: str) -> None:
    names = {one: other, other: one}
    for index, node in enumerate(lowered().graph.nodes):
        if not is_collective(node):
            continue
        axis = str(node.kwargs.get("axis") or node.args[1])
        wrong = ".".join(names.get(name, name) for name in axis.split("."))
        if set(wrong.split(".")) == set(axis.split(".")):
            continue
        graph = lowered()
        target = list(graph.graph.nodes)[index]
        if "axis" in target.kwargs:
            target.kwargs = {**target.kwargs, "axis": wrong}
        else:
            target.args = (target.args[0], wrong, *target.args[2:])
        text = refusal(graph)
        assert f"%{node.name}: " in text and "check_collectives" in text


def replace_op(node: Node, op: str, layout: Layout | None = None) -> None:
    node.target = getattr(torch.ops.partir, op).default
    if layout is not None:
        node.meta["layout"] = layout


def output_gather(graph: GraphModule) -> Node:
    """Return the last gather of the whole output."""
    first = graph.graph.output_node().args[0]
    node: Any = first[0] if isinstance(first, (tuple, list)) else first
    assert collective_name(node) == "all_gather_same"
    return node


def test_trap_an_output_gathered_as_R() -> None:
    """S->R at an output gives gradients times the number of ranks."""
    graph = lowered()
    node = output_gather(graph)
    replace_op(node, "all_gather")
    assert f"%{node.name}: is f32[8, 2, 16], but all_gather of" in refusal(graph)
    replace_op(node, "all_gather", replace(layout_of(node), varied=(str(node.kwargs["axis"]),)))
    assert re.search(rf"check_outputs: .*%{node.name}: leaves as f32\[8, 2, 16\] ~\w; outputs are I, S or N: settle", refusal(graph))


def test_trap_the_sums_of_a_norm_reduced_without_spread() -> None:
    """P->I where P->R is needed: the reference gave gradients 25% wrong."""
    graph = lowered()
    spreads = [n for n in collectives(graph) if collective_name(n) == "spread" and collective_name_or_none(n.args[0]) == "all_reduce"]
    assert len(spreads) >= 4
    for spread in spreads:
        graph = lowered()
        node = next(other for other in graph.graph.nodes if other.name == spread.name)
        reader = next(iter(node.users))
        drop(node)
        text = refusal(graph)
        assert f"%{reader.name}: " in text and "check_calls" in text


def collective_name_or_none(node: Any) -> str | None:
    return collective_name(node) if isinstance(node, Node) and is_collective(node) else None


def test_a_parameter_that_arrives_as_R() -> None:
    """Marked ~y at rest, without its spread: right forward, and its gradient never summed over y."""
    graph = lowered()
    node = next(n for n in collectives(graph) if collective_name(n) == "spread" and n.args[0].op == "placeholder")  # pyright: ignore
    source: Any = node.args[0]
    source.meta["layout"] = layout_of(node)
    drop(node)
    assert re.search(rf"check_inputs: .*%{source.name}: arrives as .* ~y; inputs are I, S or N: spread it before use", refusal(graph))


def test_a_recipe_left_unexpanded() -> None:
    """A layer_norm whose hidden dim is split runs on a part of what it needs whole."""
    run = passes()["insert_collectives"]
    verify_graph(run.after, MESH, "collectives")
    text = refusal(run.after)
    assert re.search(r"gpt.py:\d+ \(block\.norm1\): %layer_norm: ", text)


def test_an_output_that_leaves_in_blocks_where_it_is_wanted_whole() -> None:
    graph = lowered()
    node = output_gather(graph)
    drop(node)
    assert re.search(r"check_outputs: .*leaves as f32\[.*\], output 0 is to leave as f32\[8, 2, 16\]", refusal(graph))


def test_an_output_that_is_still_a_sum() -> None:
    graph = lowered()
    loss: Any = graph.graph.output_node().args[0]
    chain = [loss[1]]
    while collective_name_or_none(chain[-1]) == "settle":
        chain.append(chain[-1].args[0])
    for node in chain[:-1]:
        drop(node)
    assert re.search(r"check_outputs: .*leaves as f32\[\] ~x ~y ~z; outputs are I, S or N: settle or reduce it first", refusal(graph))


def test_axes_that_do_not_divide() -> None:
    graph = lowered()
    node = next(n for n in graph.graph.nodes if n.op == "placeholder" and n.users)
    node.meta["layout"] = Layout("f32", (Dim((Part(7, ("x",)),)),))
    assert "size 7 is not divisible by x=2" in refusal(graph)


def test_a_value_without_a_layout() -> None:
    graph = lowered()
    node = list(graph.graph.nodes)[-2]
    del node.meta["layout"]
    assert f"%{node.name}: has no layout" in refusal(graph)
