"""Choose a layout for every value: each product by the 3-D law, each other op by what its operands agree on.

Before:  %fc1: f32[16, 256]  = aten.linear(%x, %w)
After:   %fc1: f32[16@x.z, 256@y]  from f32[16@x, 64@z] ~y and f32[256@y, 64@z] ~x, direction z, state y

A product runs in the state in which its operands rest. Another call's candidates are assignments of axes to its factors; the
cheapest in bytes, forward plus backward, wins; on a tie the first. Parameters are laid where their first use wants them, and
further split along the axes that it does not use.
Only choices are made here; insert_collectives realises them.

Requires: factorise_dims.
Ensures: ``meta["layout"]`` (at rest), ``["operands"]``, ``["computed"]``, and for products ``["state"]`` and ``["direction"]``;
    ``["notes"]``, what could not be split and why; ``["why"]``, what decided the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from partir.assignment import Assignment, Call, SubFactor, merge, operand_layouts, project, result_layouts
from partir.errors import LayoutError, source_line
from partir.graph import gives_gradient, is_call, is_getitem, layouts_of, operands, results_of
from partir.law import first_split, is_lawful, place_axes, scatter_rows, states_to_try
from partir.layout import Layout, dtype_name
from partir.mesh import Mesh
from partir.passes.given import Given
from partir.passes.place_parameters import check_vectors, note_of_copies, parameter_layout
from partir.relayout import relayout
from partir.rules.placement import Placement

CAST = torch.ops.aten._to_copy.default
Candidate = tuple[str | None, dict[SubFactor, tuple[str, ...]], str]


@dataclass(frozen=True)
class Choice:
    """One way to run a call, what it costs, and what proposed it."""

    state: str | None
    assignment: Assignment
    operands: tuple[Layout, ...]
    computed: tuple[Layout, ...]
    rest: tuple[Layout, ...]
    bytes: float
    why: str


def annotate_layouts(
    graph_module: GraphModule, mesh: Mesh, placement: Placement, given: Given, vectors: str = "balanced"
) -> GraphModule:
    """Return the graph with layouts on its nodes.

    Args:
        mesh: the ranks.
        placement: the law, read from its rule file.
        given: what is fixed already.
        vectors: ``"balanced"`` or ``"diagonal"``.

    Raises:
        MeshError: diagonal vectors on a mesh whose y and z differ.
    """
    check_vectors(vectors, mesh, placement)
    annotator = _Annotator(mesh, placement, given, vectors)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            annotator.placeholder(node)
        elif is_getitem(node):
            annotator.getitem(node)
        elif is_call(node):
            annotator.call(node)
        elif node.op == "output":
            annotator.finish(node)
    return graph_module


class _Annotator:
    def __init__(self, mesh: Mesh, placement: Placement, given: Given, vectors: str) -> None:
        self.mesh = mesh
        self.placement = placement
        self.given = given
        self.vectors = vectors
        self.state = placement.start

    def placeholder(self, node: Node) -> None:
        fixed = self.given.layouts.get(node.name)
        grad = self.given.grads.get(node.name, False)
        node.meta["grad"] = grad
        node.meta["from_inputs"] = node.name in self.given.inputs
        if fixed is not None:
            node.meta["layout"], node.meta["why"] = fixed, "given"
        elif node.name in self.given.parameters:
            node.meta["layout"] = None
        else:
            node.meta["layout"], node.meta["why"] = Layout.whole(node.meta["val"], grad), "every rank is given it whole"

    def getitem(self, node: Node) -> None:
        source, index = cast(Node, node.args[0]), cast(int, node.args[1])
        node.meta["grad"] = source.meta["grads"][index]
        node.meta["from_inputs"] = source.meta["from_inputs"]
        node.meta["layout"] = None if source.meta["layout"] is None else source.meta["layout"][index]
        node.meta["why"] = f"result {index} of {source.name}"

    def call(self, node: Node) -> None:
        read = operands(node)
        grad = any(operand.meta["grad"] for operand in read) and gives_gradient(node)
        node.meta["from_inputs"] = any(operand.meta["from_inputs"] for operand in read)
        grads = tuple(grad and (r.is_floating_point() or r.is_complex()) for r in results_of(node))
        node.meta["grads"], node.meta["grad"] = grads, grads[0] if grads else False
        if len(read) == 1 and read[0].meta["layout"] is None:
            node.meta["layout"] = None
            return
        if node.target is CAST and read[0].meta["layout"].split_axes and node.name not in self.given.layouts:
            self._record(node, self._cast(node))
            return
        for operand in read:
            if self._must_be_decided_first(node, operand):
                self.decide(operand, None, f"nothing else decides how {node.name} runs")
        choice = self._choose(node)
        self._decide_operands(node, choice)
        self._record(node, choice)

    def _decide_operands(self, node: Node, choice: Choice) -> None:
        for operand, layout in zip(operands(node), choice.operands):
            if operand.meta["layout"] is None:
                self.decide(operand, layout, f"its first use, {node.name}, reads it as {layout.strip(self.mesh)}")

    def _must_be_decided_first(self, node: Node, operand: Node) -> bool:
        """A value made of parameters alone takes the layout its use wants; where nothing else decides, it decides."""
        if operand.meta["layout"] is not None or node.meta["binding"].product:
            return False
        return all(other.meta["layout"] is None for other in operands(node)) and operand is operands(node)[0]

    def decide(self, node: Node, wanted: Layout | None, why: str) -> None:
        """Lay out a value that depends on parameters alone as its first use wants it; ``why`` says which."""
        if wanted is None:
            wanted = Layout.whole(results_of(node)[0], node.meta["grad"])
        if node.op == "placeholder":
            node.meta["layout"] = self._at_rest(node, wanted)
            more = [axis for axis in node.meta["layout"].strip(self.mesh).split_axes if axis not in wanted.split_axes]
            node.meta["why"] = why + (f"; split further along {', '.join(more)}" if more else "")
            node.meta["notes"] = note_of_copies(self.given.parameters.get(node.name, node.name), node.meta["layout"], self.mesh)
            return
        if is_getitem(node):
            self._decide_result(cast(Node, node.args[0]), cast(int, node.args[1]), wanted, why)
            node.meta["layout"] = layouts_of(cast(Node, node.args[0]))[cast(int, node.args[1])]
            return
        self._decide_result(node, 0, wanted, why)

    def _at_rest(self, node: Node, wanted: Layout) -> Layout:
        return parameter_layout(wanted, node.meta["grad"], self.mesh, self.placement, self.vectors)

    def _decide_result(self, node: Node, index: int, wanted: Layout, why: str) -> None:
        if node.meta["layout"] is not None:
            return
        if node.target is CAST:
            self._decide_cast(node, wanted, why)
            return
        call = Call.of(node, node.meta["grad"])
        flipped = replace(call, binding=replace(call.binding, operands=call.binding.results), inputs=call.outputs)
        assignment = project(flipped, index, wanted, self.mesh)
        present = [operand.meta["layout"] for operand in operands(node)]
        choice = self._evaluate(node, call, (None, assignment, why), present)
        self._decide_operands(node, choice)
        self._record(node, choice)

    def _decide_cast(self, node: Node, wanted: Layout, why: str) -> None:
        """Cast a parameter's own block, before it is gathered: the copy rests as the parameter does."""
        source = operands(node)[0]
        self.decide(source, replace(wanted, dtype=dtype_name(results_of(source)[0].dtype)), why)
        self._record(node, self._cast(node))

    def _cast(self, node: Node) -> Choice:
        """A cast leaves each block where it is, however a dim is split."""
        held = cast(Layout, operands(node)[0].meta["layout"])
        grad, dtype = node.meta["grads"][0], dtype_name(results_of(node)[0].dtype)
        made = replace(held, dtype=dtype, grad=grad, varied=held.varied if grad else ())
        return Choice(None, {}, (held,), (made,), (made,), 0, "a cast stays where its operand is")

    def _choose(self, node: Node) -> Choice:
        call = Call.of(node, node.meta["grad"])
        present = [operand.meta["layout"] for operand in operands(node)]
        try:
            choices = [self._evaluate(node, call, candidate, present) for candidate in self._candidates(node, call, present)]
        except LayoutError as error:
            raise _of_empty(node) or error from None
        pinned = self.given.layouts.get(node.name)
        if pinned is not None:
            choices = [_pin(choice, pinned) for choice in choices]
        return min(choices, key=lambda choice: choice.bytes)

    def _candidates(self, node: Node, call: Call, present: Sequence[Layout | None]) -> Iterator[Candidate]:
        if is_lawful(call):
            yield from self._lawful(node, call, present)
            return
        split = [(index, layout) for index, layout in enumerate(present) if layout is not None and layout.split_axes]
        projections = [project(call, index, layout, self.mesh) for index, layout in split]
        order = sorted(range(len(projections)), key=lambda i: -sum(len(axes) for axes in projections[i].values()))
        for first in order:
            merged = projections[first]
            for other in order:
                merged = merge(merged, projections[other])
            where = f"blocks stay where {_split_operands(node)[first].name} has them"
            yield None, merged, where
            rows = {pair: axes for pair, axes in merged.items() if pair[0] not in call.binding.sums and pair[0] not in call.binding.maxima}
            if rows and rows != merged:
                yield None, rows, f"{where}, what is summed over made whole"
        first = first_split(call, self.placement, self.mesh) if node.meta["grad"] and node.meta["from_inputs"] else {}
        alone = "no operand is split" + (": it splits as the input of a first product" if first else "")
        yield (None, {}, "it runs whole on every rank") if projections else (None, first, alone)

    def _lawful(self, node: Node, call: Call, present: Sequence[Layout | None]) -> Iterator[Candidate]:
        product = call.binding.product
        assert product is not None
        groups = {"m": product.m, "k": product.k, "n": product.n}
        for state in states_to_try(call, self.placement, present, self.mesh):
            law = self.placement.states[state]
            assignment: dict[SubFactor, tuple[str, ...]] = {}
            for letter in ("k", "n", "m"):
                axes = tuple(axis for axis in law[letter] if axis in self.mesh.names)
                place_axes(call, groups[letter], axes, assignment, self.mesh)
            yield state, assignment, f"the law in state {state}"

    def _evaluate(self, node: Node, call: Call, candidate: Candidate, present: Sequence[Layout | None]) -> Choice:
        state, assignment, why = candidate
        wanted = operand_layouts(call, assignment, present, self.mesh)
        computed = result_layouts(call, assignment, wanted, node.meta["grads"], self.mesh)
        rest = tuple(self._rest(call, state, assignment, layout, index) for index, layout in enumerate(computed))
        total = sum(self._operand_bytes(operand, layout) for operand, layout in zip(operands(node), wanted))
        total += sum(relayout(before, after, self.mesh).bytes for before, after in zip(computed, rest))
        return Choice(state, assignment, wanted, computed, rest, total, why)

    def _operand_bytes(self, operand: Node, wanted: Layout) -> float:
        present = operand.meta["layout"]
        if present is None:
            if operand.op != "placeholder" and not (operand.target is CAST and operands(operand)[0].op == "placeholder"):
                return 0.0
            present = self._at_rest(operand, wanted)
        return relayout(present, wanted, self.mesh).bytes

    def _rest(self, call: Call, state: str | None, assignment: Assignment, computed: Layout, index: int) -> Layout:
        """A product's pending sum is scattered over its rows, innermost; any other pending reduction is made whole."""
        rest = scatter_rows(call, assignment, computed, index, self.mesh) if state else computed
        return replace(rest, pending=(), grad=rest.grad and not any(kind == "max" for _, kind in rest.pending))

    def _record(self, node: Node, choice: Choice) -> None:
        node.meta["operands"] = choice.operands
        multiple = not isinstance(node.meta["val"], torch.Tensor)
        node.meta["layout"] = choice.rest if multiple else choice.rest[0]
        node.meta["computed"] = choice.computed if multiple else choice.computed[0]
        node.meta["state"] = choice.state
        node.meta["assignment"] = choice.assignment
        node.meta["direction"] = choice.rest[0].direction if choice.rest else None
        node.meta["notes"] = self._notes(node, choice)
        node.meta["why"] = choice.why

    def _notes(self, node: Node, choice: Choice) -> tuple[str, ...]:
        """Say what is padded, and of a call that torch counts FLOPs of, along which axes every rank does the same work."""
        padded: tuple[str, ...] = node.meta.get("pad_notes", ())
        used = {axis for axes in choice.assignment.values() for axis in axes}
        idle = [axis for axis in self.mesh.split_axes() if axis not in used]
        if not idle or not (choice.state or getattr(node.target, "overloadpacket", None) in flop_registry):
            return padded
        times = self.mesh.extent(idle)
        where = f"{source_line(node.meta)}: {node.name} {list(results_of(node)[0].shape)}"
        why = "no size is left for" if choice.state else "fewest bytes move with nothing split along"
        return (*padded, f"{where}: {why} {', '.join(idle)}: computed {times} times, the same on these ranks")

    def finish(self, node: Node) -> None:
        """A parameter that nothing uses rests as if used whole."""
        for placeholder in [n for n in node.graph.nodes if n.op == "placeholder"]:
            if placeholder.meta["layout"] is None:
                self.decide(placeholder, None, "nothing computes with it")
        for value in node.all_input_nodes:
            if value.meta["layout"] is None:
                self.decide(value, None, "it leaves the program as it is")


def _of_empty(node: Node) -> LayoutError | None:
    """Return what to say where a call cannot be laid out for a tensor without elements."""
    for operand in operands(node):
        if results_of(operand)[0].numel() == 0:
            where = f"{source_line(node.meta)}: {node.name} reads {operand.name} {list(results_of(operand)[0].shape)}"
            return LayoutError(f"{where}, which has no elements to divide among ranks. Leave batches without rows out.")
    return None


def _split_operands(node: Node) -> list[Node]:
    return [operand for operand in operands(node) if operand.meta["layout"] is not None and operand.meta["layout"].split_axes]


def _pin(choice: Choice, pinned: Layout) -> Choice:
    """Let a value rest where the user wants it."""
    return replace(choice, rest=(replace(pinned, grad=choice.rest[0].grad), *choice.rest[1:]))
