"""Leave out repeated layers of a traced graph: three stand for all, so that costs of 96 layers take no longer than those of four.

Before:  layers.0 -> layers.1 -> layers.2 -> ... -> layers.95 -> norm
After:   layers.0 -> layers.1 -> layers.2 -> layers.3 -> norm            layers.2 stands for 93

A layer repeats the one before it where both make the same calls of the same shapes on the same things, gradients flowing through the
same of them: their own values and parameters, the values of the layer before, or a value of no layer. The first layers that differ are
kept; then one that stands between two of its kind stands for all that are left out. Layers with an odd number of products are laid out
in turns, as the direction of their input is y or z: two between two then stand for all (a period of 2). `is_periodic` says whether a
period was right.

Requires: trace. Ensures: slots and outputs of what was left out are gone; ``counts`` says how many layers each kept one stands for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from partir.errors import module_path
from partir.graph import outputs_of, results_of
from partir.layer_span import Span
from partir.passes.structure import flatten
from partir.passes.trace import InputSlot, Traced
from partir.records import layer_of

SMALL = 4096  # constants of more elements are not compared: layers with them are not folded


@dataclass(frozen=True, eq=False)
class Folded:
    """A shorter trace.

    Args:
        traced: of fewer layers.
        period: after how many layers the next is laid out in the same way.
        spans: the lists of layers of which some were left out.
    """

    traced: Traced
    period: int = 1
    spans: tuple[Span, ...] = ()

    @cached_property
    def counts(self) -> dict[str, int]:
        """The path of a layer -> how many it stands for; 1 where it is not listed."""
        return {layer: count for span in self.spans for layer, count in span.counts().items()}


def fold_layers(traced: Traced, period: int | None = 1) -> Folded:
    """Return a trace whose repeated layers are left out; the trace itself where none can be.

    Args:
        period: after how many layers the next is laid out in the same way; None: nothing is left out.
    """
    if period is None:
        return Folded(traced)
    stack = _Stack(traced)
    spans: list[Span] = []
    replaced: dict[Node, Node] = {}
    for prefix in stack.prefixes():
        first, last = stack.repeats(prefix) or (0, 0)
        middle = first + 1 + (last - first - 1) % period  # from here to the last but one the layers are whole periods
        span = Span(prefix, first, middle, middle + period, last)
        if span.end < last:
            replaced |= stack.replacements(span)
            spans.append(span)
    return Folded(_without(traced, replaced) if replaced else traced, period, tuple(spans))


def is_periodic(annotated: GraphModule, folded: Folded) -> bool:
    """Return whether layers that are a period apart are laid out in the same way, so that those left out would be, too."""
    laid_out: dict[str, list[Any]] = {}
    for node in annotated.graph.nodes:
        facts = [node.meta.get(name) for name in ("layout", "operands", "computed", "state")]
        laid_out.setdefault(layer_of(module_path(node.meta)), []).append((str(node.target), facts))
    return all(
        laid_out.get(span.layer(number)) == laid_out.get(span.layer(number + span.period))
        for span in folded.spans
        for number in range(span.first, span.end + 1 - span.period)
    )


class _Stack:
    """The layers of a graph: lists of nodes by the path of a list and the number in it."""

    def __init__(self, traced: Traced) -> None:
        self.graph = traced.graph_module.graph
        slots = dict(zip(self.graph.find_nodes(op="placeholder"), traced.slots, strict=True))
        self.layers: dict[str, dict[int, list[Node]]] = {}
        self.place: dict[Node, tuple[str, int, int]] = {}
        self.parameters: dict[Node, str] = {}
        self.takes_gradient: dict[Node, bool] = {}
        for node in self.graph.nodes:
            if node.op == "output":
                continue
            trained = node.op == "placeholder" and slots[node].requires_grad
            self.takes_gradient[node] = trained or any(self.takes_gradient[read] for read in node.all_input_nodes)
            path = _layer(_path_of_slot(slots[node], node) if node.op == "placeholder" else module_path(node.meta))
            if path is None:
                continue
            prefix, number = path
            held = self.layers.setdefault(prefix, {}).setdefault(number, [])
            self.place[node] = (prefix, number, len(held))
            held.append(node)
            if node.op == "placeholder":
                self.parameters[node] = _name_in_layer(slots[node], f"{prefix}.{number}")

    def prefixes(self) -> list[str]:
        """Return the paths of the lists of layers."""
        return [prefix for prefix, layers in self.layers.items() if list(layers) == sorted(layers)]

    def repeats(self, prefix: str) -> tuple[int, int] | None:
        """Return the first and the last of the layers that repeat each other up to the end of a list."""
        layers = self.layers[prefix]
        numbers = list(layers)
        last = numbers[-1]
        if numbers != list(range(last + 1)):
            return None
        wanted = self._signature(prefix, last)
        first = last
        while first > 0 and self._signature(prefix, first - 1) == wanted:
            first -= 1
        return (first, last) if self._is_chain(prefix, first, last) else None

    def _signature(self, prefix: str, number: int) -> Any:
        return [self._call(node, prefix, number) for node in self.layers[prefix][number]]

    def _call(self, node: Node, prefix: str, number: int) -> Any:
        shapes = [(tuple(result.shape), result.dtype) for result in results_of(node)]
        if node.op == "placeholder":
            return "parameter", self.parameters[node], shapes, self.takes_gradient[node]
        flows = [self.takes_gradient[read] for read in node.all_input_nodes]
        return str(node.target), _plain((node.args, node.kwargs), partial(self._name, prefix, number)), shapes, flows

    def _name(self, prefix: str, number: int, read: Node) -> Any:
        place = self.place.get(read)
        if place is None or place[0] != prefix:
            return "outside", read.name
        if place[1] == 0 and number > 1:  # what the first layer makes for all, as T5's position bias
            return "first", place[2]
        return number - place[1], place[2]

    def _is_chain(self, prefix: str, first: int, last: int) -> bool:
        """Return whether what stands between the kept and the last is read by the next layer, or as an output, alone."""
        for number in range(first + 1, last):
            for node in self.layers[prefix][number]:
                for user in node.users:
                    near = self.place.get(user, ("", -1, 0))
                    if user.op != "output" and (near[0] != prefix or near[1] not in (number, number + 1)):
                        return False
        return True

    def replacements(self, span: Span) -> dict[Node, Node]:
        """Return what stands for each node of the layers that are left out: the same of the last that is kept."""
        layers = self.layers[span.prefix]
        left_out = range(span.end + 1, span.last + 1)
        return {old: new for n in left_out for old, new in zip(layers[n], layers[span.end], strict=True)}


def _without(traced: Traced, replaced: Mapping[Node, Node]) -> Traced:
    graph = Graph()
    copies: dict[Node, Node] = {}
    slots: list[InputSlot] = []
    kept_slots = iter(traced.slots)
    for node in traced.graph_module.graph.nodes:
        slot = next(kept_slots) if node.op == "placeholder" else None
        if node in replaced or node.op == "output":
            continue
        copies[node] = graph.node_copy(node, lambda old: copies[replaced.get(old, old)])
        copies[node].meta = dict(node.meta)
        if slot is not None:
            slots.append(slot)
    outputs = outputs_of(traced.graph_module)
    kept = [number for number, value in enumerate(outputs) if value not in replaced or _is_users_only(number, outputs, replaced, traced)]
    result = graph.output(tuple(copies[replaced.get(outputs[number], outputs[number])] for number in kept))
    result.meta = dict(traced.graph_module.graph.output_node().meta)
    of_user = [number for number in kept if number < traced.num_outputs]
    structure = flatten(tuple(torch.empty(0) for _ in of_user))[1]
    mutated = tuple((kept.index(number), name) for number, name in traced.mutated_buffers if number in kept)
    return replace(
        traced, graph_module=GraphModule({}, graph), slots=tuple(slots), outputs=structure, mutated_buffers=mutated
    )


def _is_users_only(number: int, outputs: Sequence[Any], replaced: Mapping[Node, Node], traced: Traced) -> bool:
    """Return whether an output of a layer that is left out is the only one of its kind: it is then one of what is kept."""
    return number < traced.num_outputs and replaced[outputs[number]] not in outputs


def _path_of_slot(slot: InputSlot, node: Node) -> str:
    """Return the path of a parameter, or of the first reader of a constant that was made in forward; inputs have none."""
    if slot.kind == "constant":
        return module_path(next(iter(node.users)).meta) if node.users else ""
    return slot.name if slot.kind in ("parameter", "buffer") else ""


def _name_in_layer(slot: InputSlot, layer: str) -> str:
    """Return what tells a parameter, or a constant by its value, from the others of a layer."""
    if slot.value is None:
        return slot.name.removeprefix(layer)
    known = slot.value.numel() <= SMALL and not slot.value.is_meta
    return f"constant {cast(Any, slot.value).tolist()}" if known else slot.name


def _layer(path: str) -> tuple[str, int] | None:
    """Return the list and the number of the first layer on a path: ("blocks", 3) of ``blocks.3.mlp.fc1``."""
    parts = path.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdigit() and index > 0), None)
    return (".".join(parts[:at]), int(parts[at])) if at is not None else None


def _plain(value: Any, name: Any) -> Any:
    """Return arguments with names for nodes, comparable."""
    if isinstance(value, Node):
        return name(value)
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item, name) for item in cast("tuple[Any, ...]", value))
    if isinstance(value, dict):
        return tuple(sorted((key, _plain(item, name)) for key, item in cast("dict[str, Any]", value).items()))
    return str(value)
