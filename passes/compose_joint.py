"""Put the joint graph of forward and backward together from the formulas of its calls, each of which torch derives once.

    %c = aten.linear(%a, %w)                       %t = aten.t(%w); %c = aten.mm(%a, %t)
    %r = aten.relu(%c)                      ->     %r = aten.relu(%c)
    return %r                                      %1 = aten.threshold_backward(%tangents_1, %r, 0)
                                                   %2 = aten.mm(%1, aten.t(%t)); %3 = aten.t(aten.mm(aten.t(%1), %a))
                                                   return %r, %2, %3

Autograd is local: the gradient of a call's operands depends on that call and on the gradient of its results. So a call of the same op
on operands of the same shapes, as 96 equal layers make them, is run on fake tensors once, its forward and its backward written down,
and copied wherever it occurs. Gradients of a value with several readers are added in the order in which autograd would.

A call that draws random numbers has a number of its own, its site, which its formula holds in a few constants: it is written once for a
site that no graph has, and read for each.

Ensures: ``(*primals, *tangents) -> (*outputs, *gradients)`` of ATen and partir ops; every node keeps the name of the call that it
serves, and which half it belongs to (`partir.passes.aot`).
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from partir.errors import PartirError, VerifyError, source_line
from partir.graph import Unprinted, create_call, is_getitem, outputs_of
from partir.mesh import current_mesh
from partir.passes.call_formulas import Formula, Given, Ref, Spec, Unwritten, results_in, write_formula
from partir.passes.share_gathers import argument_key

ORIGIN, BACKWARD = "partir", "is_backward"  # what torch's own tracing writes as well

ANY_SITE = 1 << 40  # more than any graph draws, and not near the constants that scramble bits

Value = tuple[Node, int]
"""A value of the lowered graph: the call (or placeholder) that makes it, and which of its results it is."""


@dataclass(frozen=True)
class _Written:
    """One call of the lowered graph in the joint graph: its formula and the nodes of it so far, by Ref."""

    formula: Formula
    nodes: dict[Ref, Node]


class _Composer:
    """The joint graph of one lowered graph, as far as it is written."""

    def __init__(self, module: GraphModule, formulas: dict[Hashable, Formula]) -> None:
        self.module = module
        self.graph = Graph()
        self._formulas = formulas
        self._nodes: dict[Value, Node] = {}
        self._needs: dict[Value, bool] = {}
        self._written: dict[Node, _Written] = {}
        self._gradients: dict[Value, Node] = {}

    def compose(self, arguments: Sequence[Tensor], wanted: Sequence[bool], training: bool) -> tuple[GraphModule, tuple[bool, ...]]:
        """Return the joint graph, and for each output whether it takes a tangent; see `compose_joint`."""
        primals = [self._primal(node, number, value) for number, (node, value) in enumerate(zip(self._placeholders(), arguments))]
        calls = [node for node in self.module.graph.nodes if node.op == "call_function" and not is_getitem(node)]
        for call in calls:
            self._forward(call)
        sources = [value_of(cast(Node, output)) for output in outputs_of(self.module)]
        takes = tuple(training and keep and self._needs[source] for source, keep in zip(sources, wanted, strict=True))
        results: list[Node | None] = [self._copy(self._nodes[source]) for source in sources]
        if any(takes):
            self._tangents(sources, takes, primals[-1] if primals else None)
            for call in reversed(calls):
                self._reverse(call)
            results += [self._gradients.get((node, 0)) for node in self._placeholders()]
        self.graph.output(results)
        return Unprinted(torch.nn.Module(), self.graph), takes

    def _placeholders(self) -> list[Node]:
        return list(self.module.graph.find_nodes(op="placeholder"))

    def _primal(self, node: Node, number: int, value: Tensor) -> Node:
        primal = self.graph.placeholder(f"primals_{number + 1}")
        primal.meta["val"] = value.detach()
        self._nodes[(node, 0)], self._needs[(node, 0)] = primal, value.requires_grad
        return primal

    def _tangents(self, sources: Sequence[Value], takes: Sequence[bool], last: Node | None) -> None:
        for number, source in enumerate(source for source, take in zip(sources, takes, strict=True) if take):
            with self.graph.inserting_after(last):
                last = self.graph.placeholder(f"tangents_{number + 1}")
            value = cast(Tensor, self._nodes[source].meta["val"])
            last.meta["val"] = torch.empty(tuple(value.shape), dtype=value.dtype, device=value.device)
            self._add_gradient(source, last, "" if source[0].op == "placeholder" else source[0].name)

    def _forward(self, call: Node) -> None:
        formula = self._formula(call, None)
        nodes = {Ref(-1, place): self._nodes[value_of(read)] for place, read in enumerate(call.all_input_nodes)}
        self._written[call] = _Written(formula, nodes)
        self._write(call, formula, backward=False)
        for place, (ref, needs) in enumerate(zip(formula.results, formula.requires_grad, strict=True)):
            if ref is not None:
                self._nodes[(call, place)], self._needs[(call, place)] = self._node(call, ref), needs

    def _reverse(self, call: Node) -> None:
        """Write the backward of a call of which some result has a gradient."""
        written = self._written[call]
        known = [self._gradients.get((call, place)) for place in range(len(written.formula.results))]
        needs = written.formula.requires_grad
        tangents = [tangent if need else None for tangent, need in zip(known, needs, strict=True)]
        if all(tangent is None for tangent in tangents):
            return
        formula = self._formula(call, tuple(None if t is None else Spec.of(t.meta["val"]) for t in tangents))
        given = [tangent for tangent in tangents if tangent is not None]
        written.nodes.update({Ref(-2, place): tangent for place, tangent in enumerate(given)})
        self._write(call, formula, backward=True)
        for read, ref in zip(call.all_input_nodes, formula.gradients, strict=True):
            if ref is not None:
                self._add_gradient(value_of(read), self._node(call, ref), call.name)

    def _formula(self, call: Node, given: Given | None) -> Formula:
        reads = call.all_input_nodes
        specs = tuple(Spec.of(self._nodes[value_of(read)].meta["val"], self._needs[value_of(read)]) for read in reads)
        place = {read: Ref(-1, number) for number, read in enumerate(reads)}
        args, kwargs = map_arg((call.args, call.kwargs), lambda read: cast(Any, place[read]))
        kwargs = {**kwargs, "site": ANY_SITE} if _site(call) is not None else kwargs
        mesh = None if getattr(call.target, "namespace", None) == "aten" else current_mesh()
        key = (call.target, argument_key(args), argument_key(kwargs), specs, mesh)
        found = self._formulas.get(key)
        if found is None:
            found = self._formulas[key] = self._run(call, args, kwargs, specs, None)
        if given is None or given == found.given:
            return found
        other = self._formulas.get((key, given))
        if other is None:
            other = self._formulas[(key, given)] = self._run(call, args, kwargs, specs, given)
        if [c.target for c in other.calls if not c.backward] != [c.target for c in found.calls if not c.backward]:
            raise Unwritten(f"{call.target} runs in another way the second time")
        return other

    def _run(self, call: Node, args: Any, kwargs: Any, specs: Sequence[Spec], given: Given | None) -> Formula:
        def run(operands: Sequence[Tensor]) -> Any:
            these, named = map_aggregate((args, kwargs), lambda a: operands[a.place] if isinstance(a, Ref) else a)
            return cast(Any, call.target)(*these, **named)

        try:
            return write_formula(run, specs, given)
        except (PartirError, Unwritten):
            raise
        except Exception as error:
            raise VerifyError(
                f"{source_line(call.meta)}: %{call.name} ({call.target}) does not run on local blocks: {error}"
            ) from error

    def _write(self, call: Node, formula: Formula, backward: bool) -> None:
        nodes, site = self._written[call].nodes, _site(call)

        def read(argument: Any) -> Any:
            return self._node(call, argument) if isinstance(argument, Ref) else _at_site(argument, site)

        for number, one in enumerate(formula.calls):
            if one.backward != backward:
                continue
            args, kwargs = map_aggregate((one.args, one.kwargs), read)
            node = self._call(one.target, args, kwargs, one.value, call.name, backward)
            if isinstance(one.value, Tensor):
                nodes[Ref(number, 0)] = node
                continue
            for place, value in enumerate(results_in(one.value)):
                if value is not None:
                    nodes[Ref(number, place)] = self._call(operator.getitem, (node, place), {}, value, call.name, backward)

    def _node(self, call: Node, ref: Ref) -> Node:
        return self._written[call].nodes[ref]

    def _call(self, target: Any, args: Any, kwargs: Any, value: Any, origin: str, backward: bool) -> Node:
        name = str(target.overloadpacket.__name__) if hasattr(target, "overloadpacket") else "getitem"
        node = create_call(self.graph, target, args, kwargs, name)
        node.meta = {"val": value, "custom": {ORIGIN: origin}, **({"partitioner_tag": BACKWARD} if backward else {})}
        return node

    def _copy(self, node: Node) -> Node:
        value = node.meta["val"].clone(memory_format=torch.contiguous_format)
        copy = self.graph.call_function(torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
        copy.meta = {"val": value}
        return copy

    def _add_gradient(self, value: Value, gradient: Node, origin: str) -> None:
        """Note a part of a value's gradient, added to what is known of it; ``origin``: the call that it comes from."""
        present = self._gradients.get(value)
        if present is not None:
            total = present.meta["val"] + gradient.meta["val"]
            gradient = self._call(torch.ops.aten.add.Tensor, (present, gradient), {}, total, origin, True)
        self._gradients[value] = gradient


def _site(call: Node) -> int | None:
    """Return the site of a call that draws random numbers."""
    return cast("int | None", call.kwargs.get("site"))


def _at_site(argument: Any, site: int | None) -> Any:
    """Return a formula's argument for a site: of ``2 * ANY_SITE + 1`` it is ``2 * site + 1``."""
    if site is None or type(argument) is not int:
        return argument
    times, more = divmod(argument, ANY_SITE)
    return times * site + more if times in (1, 2) and more in (0, 1) else argument


def value_of(node: Node) -> Value:
    """Return the call that makes a node's value, and which of its results it is."""
    return (cast(Node, node.args[0]), cast(int, node.args[1])) if is_getitem(node) else (node, 0)


def compose_joint(
    module: GraphModule, arguments: Sequence[Tensor], wanted: Sequence[bool], training: bool, formulas: dict[Hashable, Formula]
) -> tuple[GraphModule, tuple[bool, ...]]:
    """Return the joint graph of a lowered graph.

    Args:
        module: placeholders and flat results are tensors.
        arguments: fake tensors, ``requires_grad`` where a gradient is asked for; their mode is on.
        wanted: for each output, whether its tangent may be asked for.
        training: False for a forward alone.
        formulas: that are known in this mode; new ones are added.

    Returns:
        the joint (or forward) graph, each of whose outputs is a copy, and for each output whether it takes a tangent.

    Raises:
        Unwritten: some call's formula cannot be written down.
    """
    return _Composer(module, formulas).compose(arguments, wanted, training)
