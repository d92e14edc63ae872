"""Derive the backward: from one rank's forward graph to forward and backward graphs with their saved values between.

Before
    %g: f32[16@x, 64@z] ~y  = all_gather(%x, axis=y, dim=0)
    %h: f32[256@y, 64@z] ~x = all_gather(%weight, axis=x, dim=0)
    %c: f32[16@x, 256@y] +z = aten.linear(%g, %h)
    %r: f32[16@x.z, 256@y]  = reduce_scatter(%c, axis=z, dim=0)
    return %r
After, the backward (the paper's Algorithm 2), memory="low"
    %e = all_gather(%d_r, axis=z, dim=0)
    %h = all_gather(%weight, axis=x, dim=0)
    %d_x = reduce_scatter(mm(%e, %h), axis=y, dim=0)
    %g = all_gather(%x, axis=y, dim=0)
    %d_weight = reduce_scatter(mm(t(%e), %g), axis=x, dim=0)
    return %d_x, %d_weight

Nothing here knows a layout: AOTAutograd runs each collective's backward formula, which the types of the forward graph
make right.

Requires: a local graph with flat results whose types have been verified, each placeholder with ``meta["val"]``.
Ensures: each gradient has its input's local shape and dtype; no spread or settle; equal collectives are one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from partir.collectives import split_axes
from partir.errors import VerifyError
from partir.mesh import Mesh, use_mesh
from partir.passes import aot
from partir.passes.checkpoints import region_of
from partir.passes.extract_graphs import extract_backward, extract_forward
from partir.passes.node_facts import IDENTITIES, collective, op_name, operands, shape_and_dtype
from partir.passes.partition import Partition, inside_regions, made_again, output_needs_copy, partition
from partir.passes.share_gathers import merge_repeated, share_gathers
from partir.passes.widen_reductions import widen_reductions
from partir.program import Slot


@dataclass(frozen=True)
class Differentiated:
    """The two graphs of a program.

    Args:
        forward: ``(*inputs) -> (*outputs, *saved)``.
        backward: ``(*saved, *tangents) -> one gradient or None for each input``, or None.
        num_outputs: how many of the forward's results are outputs.
        differentiable: for each output, whether the backward takes its tangent.
        saved: names of the saved values, as nodes of ``forward``.
    """

    forward: GraphModule
    backward: GraphModule | None
    num_outputs: int
    differentiable: tuple[bool, ...]
    saved: tuple[str, ...]


def differentiate(
    lowered: GraphModule,
    mesh: Mesh,
    input_slots: Sequence[Slot],
    output_slots: Sequence[Slot],
    memory: str = "low",
    training: bool = True,
) -> Differentiated:
    """Return the forward and backward graphs of a lowered graph.

    Args:
        lowered: one rank's forward graph, a placeholder for each input slot.
        mesh: what the collectives' axes mean.
        input_slots: which inputs are differentiable, and the layouts that their gradients must have.
        output_slots: which outputs may be asked for a gradient.
        memory: ``"low"`` saves shards and gathers again in the backward, ``"fast"`` saves what was gathered.
        training: False for a forward alone.

    Raises:
        VerifyError: a gradient that does not arrive in its input's local shape and dtype.
    """
    return split(join(lowered, mesh, input_slots, output_slots, training), memory)


@dataclass(frozen=True, eq=False)
class Joint:
    """Forward and backward of a lowered graph in one graph; splitting it changes nothing, so that both memory modes can have it.

    Args:
        graph: ``(*primals, *tangents) -> (*outputs, *gradients)``.
        shared: the lowered graph that it was traced from.
        differentiable: for each output, whether the backward takes its tangent.
    """

    graph: GraphModule
    shared: GraphModule
    mesh: Mesh
    inputs: Sequence[Slot]
    outputs: Sequence[Slot]
    differentiable: tuple[bool, ...]
    training: bool

    @property
    def has_backward(self) -> bool:
        """Whether an output has a gradient."""
        return any(self.differentiable)


def join(
    lowered: GraphModule,
    mesh: Mesh,
    input_slots: Sequence[Slot],
    output_slots: Sequence[Slot],
    training: bool = True,
    reduce_dtype: torch.dtype | None = None,
) -> Joint:
    """Return the joint graph of a lowered graph; see `differentiate`. Sums between ranks are in ``reduce_dtype``, where it is wider."""
    shared = share_gathers(lowered)
    placeholders = shared.graph.find_nodes(op="placeholder")
    assert len(placeholders) == len(input_slots), "one slot for each placeholder"
    wants = [training and slot.differentiable for slot in input_slots]
    joint, differentiable = _trace(shared, placeholders, mesh, wants, output_slots)
    simplify(joint.graph, mesh)
    if reduce_dtype is not None:
        widen_reductions(joint.graph, reduce_dtype)
    return Joint(joint, shared, mesh, input_slots, output_slots, differentiable, training)


def split(joint: Joint, memory: str) -> Differentiated:
    """Return the two graphs of a joint graph; see `differentiate`."""
    return extract(joint, parts_of(joint, made_again_in(joint, memory)))


def made_again_in(joint: Joint, memory: str) -> frozenset[Node]:
    """Return the forward nodes that the backward makes again with ``memory`` "low" or "fast"."""
    primals = joint.graph.graph.find_nodes(op="placeholder")[: len(joint.inputs)]
    wants = [joint.training and slot.differentiable for slot in joint.inputs]
    frozen = frozenset(primal for primal, want in zip(primals, wants, strict=True) if not want)
    origins = {node.name: node for node in joint.shared.graph.nodes}
    regions = {node: region for node in joint.graph.graph.nodes if (region := region_of(origins.get(aot.origin(node) or "")))}
    return made_again(joint.graph, memory, frozen) | inside_regions(joint.graph, regions)


def parts_of(joint: Joint, again: frozenset[Node]) -> Partition:
    """Return which nodes of a joint graph run where, for what is made again."""
    return partition(joint.graph, len(joint.outputs), again)


def extract(joint: Joint, parts: Partition) -> Differentiated:
    """Return the two graphs of a partitioned joint graph."""
    mesh, slots, outputs = joint.mesh, joint.inputs, joint.outputs
    check_outputs(parts, mesh, outputs)
    check_gradients(parts, mesh, slots)
    copies = [output_needs_copy(parts, index) for index in range(len(outputs))]
    forward = extract_forward(parts, joint.shared, mesh, slots, copies)
    results = cast("tuple[Node, ...]", forward.graph.output_node().args[0])
    saved = tuple(node.name for node in results[len(outputs) :])
    if all(gradient is None for gradient in parts.gradients):
        return Differentiated(forward, None, len(outputs), (False,) * len(outputs), ())
    tangents = [slot.name for slot, takes in zip(outputs, joint.differentiable, strict=True) if takes]
    backward = extract_backward(parts, joint.graph, joint.shared, forward, mesh, slots, tangents)
    return Differentiated(forward, backward, len(outputs), joint.differentiable, saved)


def _trace(
    module: GraphModule,
    placeholders: Sequence[Node],
    mesh: Mesh,
    wants: Sequence[bool],
    output_slots: Sequence[Slot],
) -> tuple[GraphModule, tuple[bool, ...]]:
    """Return the joint graph of ``module``; without a differentiable output, its forward alone."""
    values = [cast(torch.Tensor, node.meta["val"]) for node in placeholders]
    formulas = aot.present_formulas()
    arguments = aot.fake_arguments(values, wants, formulas.mode)
    with formulas.mode, use_mesh(mesh):
        asked = [slot.differentiable for slot in output_slots]
        return aot.export_joint(module, arguments, any(wants), asked, formulas.known)


def simplify(graph: Graph, mesh: Mesh) -> None:
    """Remove from a joint graph what only mattered to autograd: identities, double transposes, repeats."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if _is_identity(node, mesh):
            _replace(node, operands(node)[0])
        elif op_name(node) == "aten::t" and op_name(operands(node)[0]) == "aten::t":
            _replace(node, operands(operands(node)[0])[0])
    merge_repeated(graph)
    _drop_unread(graph)


def _is_identity(node: Node, mesh: Mesh) -> bool:
    """Return whether a node hands its operand on: a change of type alone, or a collective in groups of one rank."""
    name = collective(node)
    if name is None:
        return op_name(node) in ("aten::detach", "aten::alias")
    if name in IDENTITIES:
        return True
    lone = name not in ("coordinate", "all_gather_bucket", "reduce_scatter_bucket")
    return lone and mesh.extent(split_axes(cast(str, node.args[1]))) == 1


def _replace(node: Node, by: Node) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _drop_unread(graph: Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not aot.is_check(node):
            graph.erase_node(node)


def check_outputs(parts: Partition, mesh: Mesh, output_slots: Sequence[Slot]) -> None:
    """Check that each output has the local shape and dtype that its slot says.

    Raises:
        VerifyError: naming the output, with expected and actual.
    """
    for slot, output in zip(output_slots, parts.outputs, strict=True):
        _check_block(slot, mesh, shape_and_dtype(output), f"{slot.name}: it")


def check_gradients(parts: Partition, mesh: Mesh, input_slots: Sequence[Slot]) -> None:
    """Check that each gradient has the local shape and dtype of its input.

    Raises:
        VerifyError: naming the input, with expected and actual.
    """
    for slot, gradient in zip(input_slots, parts.gradients, strict=False):
        if gradient is None:
            continue
        _check_block(slot, mesh, shape_and_dtype(gradient), f"{slot.name}: its gradient")


def _check_block(slot: Slot, mesh: Mesh, actual: object, subject: str) -> None:
    expected = (slot.local_shape(mesh), slot.dtype)
    if actual != expected:
        raise VerifyError(
            f"{subject} is {_spell(actual)} on each rank, but the {slot.kind} {slot.layout} on mesh {mesh} needs "
            f"{_spell(expected)}. A collective is missing, doubled or along the wrong axis."
        )


def _spell(fact: Any) -> str:
    return "not a tensor" if fact is None else f"{str(fact[1]).removeprefix('torch.')}{list(fact[0])}"
