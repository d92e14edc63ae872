"""The derived backward: its collectives, what is saved, and what is refused."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch.fx import GraphModule, Node

from partir.errors import PartirError, VerifyError
from partir.layout import Layout
from partir.mesh import Mesh, use_mesh
from partir.passes import aot, compose_joint
from partir.passes.call_formulas import Spec, Unwritten, write_formula
from partir.passes.differentiate import Differentiated, differentiate
from partir.passes.node_facts import collective, is_view
from partir.passes.share_gathers import share_gathers
from partir.program import Slot
from tests.hand_lowered import HandLowered, aten, mlp, one_linear

MESH = Mesh.parse((2, 3, 2))


def derive(
    hand: HandLowered, results: list[tuple[Node, str]], memory: Any = "low", training: bool = True
) -> Differentiated:
    module, inputs, outputs = hand.finish(results)
    return differentiate(module, hand.mesh, inputs, outputs, memory, training)


def collectives(module: GraphModule | None) -> list[tuple[str, str]]:
    assert module is not None
    return [
        (name, str(node.args[1])) for node in module.graph.nodes if (name := collective(node)) and name != "coordinate"
    ]


def cannot_be_written(*_: Any) -> Any:
    raise Unwritten("on purpose")


def last(hand: HandLowered) -> Node:
    return list(hand.graph.nodes)[-1]


def linear_derived(memory: str, mesh: Mesh = MESH) -> Differentiated:
    hand = one_linear(mesh)
    return derive(hand, [(last(hand), "f64[48@x.z, 36@y]")], memory)


@pytest.mark.parametrize("composed", [True, False])
def test_aot_contract(composed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What both ways of ``passes/aot.py`` give: names, order, origins and tags of the joint graph."""
    if not composed:
        monkeypatch.setattr(aot, "compose_joint", cannot_be_written)
    hand = one_linear(MESH)
    whole = hand.call(aten.sum.default, last(hand))
    module, inputs, outputs = hand.finish(
        [(last(hand), "f64[] +x +y +z"), (cast(Node, whole.args[0]), "f64[48@x.z, 36@y]")]
    )
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    formulas = aot.Formulas()
    arguments = aot.fake_arguments(values, [True, True], formulas.mode)
    with formulas.mode, use_mesh(MESH):
        joint, takes = aot.export_joint(module, arguments, True, [True, False], formulas.known)
    names = [str(node.target) for node in joint.graph.find_nodes(op="placeholder")]
    assert names == ["primals_1", "primals_2", "tangents_1"]
    assert takes == (True, False)
    assert len(cast("list[Any]", joint.graph.output_node().args[0])) == len(outputs) + len(inputs)
    products = [node for node in joint.graph.nodes if node.target is aten.mm.default]
    assert [aot.origin(node) for node in products] == ["linear_default"] * 3
    assert [aot.is_backward(node) for node in products] == [False, True, True]


def test_equal_calls_share_a_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers of one shape are differentiated as one; only where the gradient lies otherwise is a formula written again."""
    written: list[Any] = []
    original = compose_joint.write_formula
    monkeypatch.setattr(compose_joint, "write_formula", lambda run, *rest: written.append(rest) or original(run, *rest))
    counts: list[int] = []
    for depth in (3, 12):
        hand = HandLowered(MESH)
        value = hand.input("x", "f64[48@x.y, 24@z]")
        for number in range(depth):
            value = hand.call(aten.tanh.default, value) if number % 2 else hand.call(aten.sigmoid.default, value)
        written.clear()
        derive(hand, [(value, "f64[48@x.y, 24@z]")])
        counts.append(len(written))
    assert counts == [2, 2]


def test_a_result_that_is_none_keeps_the_others_in_place() -> None:
    """The backward of a convolution whose input needs no gradient gives None first."""
    x, weight = Spec.of(torch.empty(2, 3, 8)), Spec.of(torch.empty(4, 3, 3), needs_gradient=True)
    formula = write_formula(lambda reads: aten.convolution.default(*reads, None, [1], [0], [1], False, [0], 1), [x, weight], None)
    (gradient,) = (ref for ref in formula.gradients if ref is not None)
    call = formula.calls[gradient.call]
    assert call.target is aten.convolution_backward.default and call.value[0] is None
    assert call.value[gradient.place].shape == (4, 3, 3)


def test_a_formula_that_writes_in_place_is_left_to_autograd() -> None:
    operands = [Spec.of(torch.empty(3), needs_gradient=True)]
    with pytest.raises(Unwritten, match=r"aten.zero_.default writes in place"):
        write_formula(lambda reads: (reads[0] * 2).clone().zero_(), operands, None)


def test_backward_of_a_linear_is_algorithm_2() -> None:
    derived = linear_derived("fast")
    assert collectives(derived.forward) == [("all_gather", "y"), ("all_gather", "x"), ("reduce_scatter", "z")]
    assert collectives(derived.backward) == [("all_gather", "z"), ("reduce_scatter", "x"), ("reduce_scatter", "y")]


def test_low_memory_gathers_operands_again() -> None:
    derived = linear_derived("low")
    assert sorted(collectives(derived.backward)) == [
        ("all_gather", "x"),
        ("all_gather", "y"),
        ("all_gather", "z"),
        ("reduce_scatter", "x"),
        ("reduce_scatter", "y"),
    ]
    assert derived.saved == ("x", "fc_weight")
    assert linear_derived("fast").saved == ("all_gather", "all_gather_1")


def test_groups_of_one_rank_move_nothing() -> None:
    derived = linear_derived("low", Mesh.parse((1, 4, 1)))
    assert collectives(derived.forward) == [("all_gather", "y")]
    assert sorted(collectives(derived.backward)) == [("all_gather", "y"), ("reduce_scatter", "y")]


def test_signatures() -> None:
    hand = mlp(MESH)
    derived = derive(hand, [(last(hand), "f64[]"), (hand.named["y"], "f64[48@x.y, 24@z]")])
    assert derived.backward is not None
    inputs = [str(node.target) for node in derived.backward.graph.find_nodes(op="placeholder")]
    assert inputs == [*derived.saved, "d_output_0", "d_output_1"]
    gradients = cast("tuple[Any, ...]", derived.backward.graph.output_node().args[0])
    assert [str(node) for node in gradients] == ["d_x", "d_fc1_weight", "d_fc1_bias", "d_fc2_weight"]
    assert derived.differentiable == (True, True)


def test_nodes_keep_their_origin() -> None:
    derived = linear_derived("low")
    assert derived.backward is not None
    for module, stage in ((derived.forward, "forward"), (derived.backward, "backward")):
        for node in module.graph.nodes:
            if node.op == "call_function":
                assert node.meta["stage"] == stage
                assert "model.py" in node.meta["stack_trace"]
                assert node.meta["origin"] and node.meta["reason"]
    again = [str(node) for node in derived.backward.graph.nodes if node.meta.get("again")]
    assert sorted(again) == ["all_gather", "all_gather_1"]


def attention_inputs(hand: HandLowered) -> Node:
    """q, k and v of one gathered input, each from a gather of its own, added up."""
    x = hand.input("x", "f64[48@x.y, 24@z]", "input")
    products: list[Node] = []
    for name in ("q", "k", "v"):
        weight = hand.input(name, "f64[36@y.x, 24@z]")
        products.append(hand.linear(x, weight, "y"))
    return hand.call(aten.add.Tensor, hand.call(aten.add.Tensor, products[0], products[1]), products[2])


def test_repeated_gathers_are_shared_with_their_backward() -> None:
    hand = HandLowered(MESH)
    derived = derive(hand, [(attention_inputs(hand), "f64[48@x.z, 36@y]")], "fast")
    assert collectives(derived.forward).count(("all_gather", "y")) == 1
    assert collectives(derived.backward).count(("reduce_scatter", "y")) == 1
    assert collectives(derived.backward).count(("all_gather", "z")) == 1


def test_share_gathers_is_pure_and_idempotent() -> None:
    hand = HandLowered(MESH)
    module, _, _ = hand.finish([(attention_inputs(hand), "f64[48@x.z, 36@y]")])
    before = str(module.graph)
    once = share_gathers(module)
    assert str(module.graph) == before
    assert str(share_gathers(once).graph) == str(once.graph) != before


@pytest.mark.parametrize("memory", ["low", "fast"])
def test_no_view_is_saved(memory: str) -> None:
    hand = HandLowered(MESH)
    x = hand.input("x", "f64[48@x.z, 36@y]", "input")
    scale = hand.input("scale", "f64[1]")
    wide = hand.call(aten.expand.default, hand.call(aten.exp.default, scale), [12, 12])
    turned = hand.call(aten.permute.default, hand.call(aten.sin.default, x), [1, 0])
    product = hand.call(aten.mul.Tensor, hand.call(aten.mul.Tensor, turned, wide), turned)
    derived = derive(hand, [(product, "f64[36@y, 48@x.z]")], memory)
    saved = cast("tuple[Node, ...]", derived.forward.graph.output_node().args[0])[1:]
    assert not [node for node in saved if is_view(node)]
    assert "exp" in derived.saved and "sin" in derived.saved


def test_what_is_made_of_gathered_weights_is_not_saved() -> None:
    hand = HandLowered(MESH)
    x = hand.input("x", "f64[48@x.z, 36@y]", "input")
    weight = hand.input("weight", "f64[36@y.z.x]")
    whole = hand.call("all_gather", hand.call("all_gather", weight, "x", 0), "z", 0)
    one_more = hand.call(aten.add.Tensor, hand.call(aten.view.default, whole, [1, 12]), 1.0)
    y = hand.call(aten.mul.Tensor, x, one_more)
    assert derive(hand, [(y, "f64[48@x.z, 36@y]")], "low").saved == ("x", "weight")


def dropout(hand: HandLowered) -> Node:
    """A mask made from a seed and this rank's coordinate alone."""
    x = hand.input("x", "f64[48@x.z, 36@y]", "input")
    seed = hand.input("seed", "i64[]", "seed")
    place = hand.call("coordinate", "x.z", torch.device("cpu"))
    index = hand.call(aten.add.Tensor, hand.call(aten.arange.default, 144), hand.call(aten.mul.Tensor, place, 144))
    mixed = hand.call(aten.remainder.Scalar, hand.call(aten.mul.Tensor, index, seed), 7)
    mask = hand.call(aten.view.default, hand.call(aten.gt.Scalar, mixed, 3), [12, 12])
    return hand.call(aten.where.self, mask, hand.call(aten.sin.default, x), hand.call(aten.zeros_like.default, x))


def test_masks_are_made_again_from_the_seed() -> None:
    hand = HandLowered(MESH)
    assert sorted(derive(hand, [(dropout(hand), "f64[48@x.z, 36@y]")], "low").saved) == ["seed", "x"]
    hand = HandLowered(MESH)
    assert "gt" in derive(hand, [(dropout(hand), "f64[48@x.z, 36@y]")], "fast").saved


def test_random_numbers_of_a_generator_are_saved() -> None:
    hand = HandLowered(MESH)
    x = hand.input("x", "f64[48@x.z, 36@y]", "input")
    noise = hand.call(aten.rand.default, [12, 12])
    derived = derive(hand, [(hand.call(aten.mul.Tensor, x, noise), "f64[48@x.z, 36@y]")], "low")
    assert "rand" in derived.saved


def test_outputs_never_alias() -> None:
    """An input, a view of an input, the same value twice and a saved value are copied; a fresh value is not."""
    hand = HandLowered(MESH)
    x = hand.input("x", "f64[48@x.z, 36@y]", "input")
    y = hand.call(aten.exp.default, x)
    fresh = hand.call(aten.neg.default, hand.call(aten.exp.default, y))
    rows = "f64[48@x.z, 36@y]"
    view = hand.call(aten.view.default, fresh, [144])
    derived = derive(hand, [(x, rows), (fresh, rows), (view, "f64[1728@x.y.z]"), (y, rows)])
    outputs = cast("tuple[Node, ...]", derived.forward.graph.output_node().args[0])[:4]
    copied = [node.target is aten.clone.default for node in outputs]
    assert copied == [True, False, True, True]


def test_outputs_without_gradient() -> None:
    hand = HandLowered(MESH)
    x = hand.input("x", "f64[48@x.z, 36@y]", "input")
    ids = hand.input("ids", "i64[48@x.z]", "input")
    hand.input("unused", "f64[36]")
    mask = hand.call(aten.gt.Scalar, ids, 0)
    cut = hand.call(aten.detach.default, hand.call(aten.exp.default, x))
    derived = derive(
        hand,
        [(mask, "bool[48@x.z]"), (hand.call(aten.sin.default, x), "f64[48@x.z, 36@y]"), (cut, "f64[48@x.z, 36@y]")],
    )
    assert derived.differentiable == (False, True, False)
    assert derived.backward is not None
    gradients = cast("tuple[Any, ...]", derived.backward.graph.output_node().args[0])
    assert [str(node) for node in gradients] == ["d_x", "None", "None"]


@pytest.mark.parametrize("training", [True, False])
def test_forward_alone(training: bool) -> None:
    hand = HandLowered(MESH)
    x = hand.input("x", "f64[48@x.z, 36@y] nograd" if training else "f64[48@x.z, 36@y]", "input")
    derived = derive(hand, [(hand.call(aten.sin.default, x), "f64[48@x.z, 36@y]")], training=training)
    assert derived.backward is None and derived.saved == () and derived.differentiable == (False,)


def test_spread_and_settle_are_erased_and_the_gradient_is_reduced() -> None:
    hand = HandLowered(MESH)
    x = hand.input("x", "f64[48@x.z, 36@y]", "input")
    scale = hand.input("scale", "f64[]")
    spread = hand.call("spread", scale, "x.y.z")
    derived = derive(hand, [(hand.call(aten.mul.Tensor, x, spread), "f64[48@x.z, 36@y]")])
    assert collectives(derived.forward) == []
    assert collectives(derived.backward) == [("all_reduce", "x.y.z")]


def test_buckets_are_gathered_again() -> None:
    hand = HandLowered(MESH)
    x = hand.input("x", "f64[48@x.z, 36@y]", "input")
    weight, bias = (hand.input(name, "f64[36@y.x]") for name in ("weight", "bias"))
    bucket = hand.call("all_gather_bucket", [weight, bias], "x")
    first, second = hand.call(operator.getitem, bucket, 0), hand.call(operator.getitem, bucket, 1)
    y = hand.call(aten.add.Tensor, hand.call(aten.mul.Tensor, x, first), second)
    derived = derive(hand, [(y, "f64[48@x.z, 36@y]")])
    assert collectives(derived.forward) == [("all_gather_bucket", "x")]
    assert collectives(derived.backward) == [("all_gather_bucket", "x"), ("reduce_scatter_bucket", "x")]
    assert derived.saved == ("x", "weight", "bias")


def change(hand: HandLowered, index: int, how: Callable[[HandLowered, Node], None]) -> None:
    moving = [node for node in hand.graph.nodes if collective(node) in ("all_gather", "reduce_scatter")]
    how(hand, moving[index])


def drop(hand: HandLowered, node: Node) -> None:
    before = cast(Node, node.args[0])
    hand.named.update({name: before for name, named in hand.named.items() if named is node})
    node.replace_all_uses_with(before)
    hand.graph.erase_node(node)


def double(hand: HandLowered, node: Node) -> None:
    with hand.graph.inserting_after(node):
        second = hand.graph.call_function(cast(Any, node.target), (node, *node.args[1:]))
    node.replace_all_uses_with(second, lambda user: user is not second)


@pytest.mark.parametrize("how", [drop, double])
@pytest.mark.parametrize("index", range(8))
def test_a_dropped_or_doubled_collective_is_refused(index: int, how: Callable[[HandLowered, Node], None]) -> None:
    hand = mlp(MESH)
    change(hand, index, how)
    with pytest.raises(PartirError):
        derive(hand, [(last(hand), "f64[]"), (hand.named["y"], "f64[48@x.y, 24@z]")])


def test_a_gradient_of_another_shape_names_the_parameter() -> None:
    hand = HandLowered(MESH)
    x = hand.input("x", "f64[48@x.z, 36@y]", "input")
    scale = hand.input("norm.weight", "f64[36@y]")
    y = hand.call(aten.mul.Tensor, x, scale)
    module, inputs, outputs = hand.finish([(y, "f64[48@x.z, 36@y]")])
    wrong: tuple[Slot, ...] = (inputs[0], replace(inputs[1], layout=Layout.parse("f64[36@y.x]")))
    with pytest.raises(VerifyError, match=r"norm\.weight: its gradient is float64\[12\].*needs float64\[6\]"):
        differentiate(module, MESH, wrong, outputs)
    assert differentiate(module, MESH, inputs, outputs).backward is not None
