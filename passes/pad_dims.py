"""Pad the sub-dims that no axis divides, through the whole graph: every value that has one is computed with its pad.

Before:  %logits: f32[4, 16, 37] = aten.linear(%x, %w)               (y=4; %w: f32[37, 64])
         %sum:    f32[4, 16]     = aten.sum(%logits, [2])
After:   %w_pad:  f32[40, 64]    = pad_dim(%w, dim=0, padded=40)
         %logits: f32[4, 16, 40] = aten.linear(%x, %w_pad)
         %mask:   f32[4, 16, 40] = mask_pads(%logits, dim=2, size=37, padded=40)
         %sum:    f32[4, 16]     = aten.sum(%mask, [2])

Inputs, parameters and outputs keep their sizes: the pad is made where one is read, and cut where an op needs a dim whole or the
program ends.

Requires: factorise_dims; choose_pads' choice.
Ensures: calls whose factors are padded have ``meta["pads"]``, factor -> its pads; values ``meta["result_pads"]``. Bindings are
    stale: factorise_dims runs again.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from partir.errors import source_line
from partir.graph import Unprinted, is_getitem, operands, outputs_of, replace_operands, results_of, with_attributes
from partir.pads import Pad, Pads
from partir.passes.checkpoints import region_of
from partir.passes.torch_ops import VIEWS, name_of
from partir.rules import Binding
from partir.subdims import SubDim

aten = torch.ops.aten
Place = tuple[int, int]
Form = frozenset[Place]
NATURAL: Form = frozenset()
KEPT = ("nn_module_stack", "stack_trace", "site")


def pad_dims(graph_module: GraphModule, padded: Mapping[int, int]) -> GraphModule:
    """Return the graph with pads.

    Args:
        padded: key of a sub-dim -> its padded size; empty: the graph is returned as it is.
    """
    if not padded:
        return graph_module
    padder = _Padder(padded)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            padder.placeholder(node)
        elif is_getitem(node):
            continue
        elif node.op == "call_function":
            padder.call(node)
    values = [padder.read(value, NATURAL) if isinstance(value, Node) else value for value in outputs_of(graph_module)]
    output = padder.graph.output(tuple(values))
    output.meta = dict(graph_module.graph.output_node().meta)
    padder.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return Unprinted({}, padder.graph)


@dataclass
class _Padder:
    """Writes the padded graph. A form of a value says which of its sub-dims, by (dim, place), have their pad."""

    padded: Mapping[int, int]
    graph: Graph = field(default_factory=Graph)
    values: dict[Node, dict[Form, Node]] = field(default_factory=dict[Node, dict[Form, Node]])
    noted: set[int] = field(default_factory=set[int])

    def placeholder(self, node: Node) -> None:
        new = self.graph.placeholder(node.name)
        new.meta = dict(node.meta)
        self.values[node] = {NATURAL: new}

    def read(self, node: Node, form: Form) -> Node:
        """Return a value in a form; the one that it was computed in comes first, others are made from it once."""
        forms = self.values[node]
        if form not in forms:
            have, value = next(iter(forms.items()))
            forms[form] = self._convert(node, value, have, form)
        return forms[form]

    def call(self, node: Node) -> None:
        binding = cast(Binding, node.meta["binding"])
        pads = self._allowed(node, binding)
        reads = [self.read(o, _form(node, dims, pads)) for o, dims in zip(operands(node), binding.operands)]
        for factor in sorted(binding.sums.intersection(pads) - {name for _, _, name in binding.index}):
            self._mask(node, binding, factor, pads, reads)
        forms = [_form(node, dims, pads) for dims in binding.results]
        new = self._write(node, binding, reads, pads)
        new.meta["pads"] = {name: self._pads(node, (name,), pads) for name in sorted(pads)}
        new.meta["result_pads"] = tuple(tuple(self._pads(node, names, pads) for names in dims) for dims in binding.results)
        new.meta["pad_notes"] = self._notes(node, pads)
        if isinstance(node.meta["val"], torch.Tensor):
            self.values[node] = {forms[0]: new}
            return
        for item in [user for user in node.users if is_getitem(user)]:
            index = cast(int, item.args[1])
            self.values[item] = {forms[index]: self._call(item, operator.getitem, (new, index), name=item.name)}

    def _allowed(self, node: Node, binding: Binding) -> frozenset[str]:
        """Return the call's factors that may have pads: an op that needs a factor whole needs it without."""
        unsplit = binding.unsplit | node.meta["broken"]
        indexed = {factor for _, _, factor in binding.index}
        found: set[str] = set()
        for name, subdims in node.meta["factors"].items():
            if name in unsplit or (name in indexed and len(subdims) > 1):
                continue
            if any(subdim.key in self.padded for subdim in subdims) and (name not in binding.sums or _values_with(node, binding, name)):
                found.add(name)
        return frozenset(found)

    def _size(self, subdim: SubDim, has_pad: bool) -> int:
        return self.padded.get(subdim.key, subdim.size) if has_pad else subdim.size

    def _named_pads(self, node: Node, names: Sequence[str], pads: frozenset[str]) -> list[tuple[str, Pad]]:
        """Return the pads of a dim of these factors, each with its factor."""
        flat = [(name, subdim) for name in names for subdim in node.meta["factors"].get(name, ())]
        sizes = [self._size(subdim, name in pads) for name, subdim in flat]
        found = [Pad(prod(sizes[at + 1 :]), subdim.size, sizes[at]) for at, (_, subdim) in enumerate(flat)]
        return [(name, pad) for (name, _), pad in zip(flat, found) if pad.size != pad.padded]

    def _pads(self, node: Node, names: Sequence[str], pads: frozenset[str]) -> Pads:
        return tuple(pad for _, pad in self._named_pads(node, names, pads))

    def _mask(self, node: Node, binding: Binding, factor: str, pads: frozenset[str], reads: list[Node]) -> None:
        """Mask the pad of a summed factor in one operand, the smallest: copies in the others then count nothing."""
        place = min(_values_with(node, binding, factor), key=lambda place: reads[place].meta["val"].numel())
        for dim, names in enumerate(binding.operands[place]):
            if factor not in names:
                continue
            for name, pad in self._named_pads(node, names, pads):
                if name == factor:
                    arguments = (reads[place], dim, pad.block, pad.size, pad.padded)
                    reads[place] = self._call(node, torch.ops.partir_local.mask_pads.default, arguments)

    def _write(self, node: Node, binding: Binding, reads: Sequence[Node], pads: frozenset[str]) -> Node:
        sizes = {
            name: prod(self._size(subdim, name in pads) for subdim in subdims)
            for name, subdims in node.meta["factors"].items()
            if name in pads
        }
        if node.target in VIEWS:  # where a pad was made or cut, strides differ from those that a view was written for
            return self._call(node, aten.reshape.default, (reads[0], list(binding.shape(binding.results[0], sizes))), name=node.name)
        args, kwargs = replace_operands(node, reads)
        if sizes:
            args, kwargs = with_attributes(node, args, kwargs, binding.localise(sizes))
        if any(name in pads for name in binding.splits):
            return self._promise(node, binding, args, kwargs, sizes)
        return self._call(node, cast(Any, node.target), args, kwargs, node.name)

    def _promise(
        self, node: Node, binding: Binding, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Mapping[str, int]
    ) -> Node:
        """Write a call that its recipe will replace: the op itself need not accept the padded sizes."""
        new = self.graph.call_function(cast(Any, node.target), args, kwargs, name=node.name)
        new.meta = _kept(node)
        results = [t.new_empty(binding.shape(dims, sizes)) for t, dims in zip(results_of(node), binding.results)]
        new.meta["val"] = results[0] if isinstance(node.meta["val"], torch.Tensor) else tuple(results)
        return new

    def _convert(self, node: Node, value: Node, have: Form, want: Form) -> Node:
        """Cut the pads that are not wanted, make those that are missing."""
        shape: list[list[int]] = []
        for dim, subdims in enumerate(node.meta["subdims"][0]):
            shape.append([self._size(subdim, (dim, place) in have) for place, subdim in enumerate(subdims)])
        for dim, place in sorted(have ^ want):
            subdim = node.meta["subdims"][0][dim][place]
            value = self._change(node, value, shape, (dim, place), self._size(subdim, (dim, place) in want))
        return value

    def _change(self, node: Node, value: Node, shape: list[list[int]], at: Place, size: int) -> Node:
        """Write one pad or cut: the sub-dim gets a dim of its own for it."""
        dim, place = at
        before, now, behind = prod(shape[dim][:place]), shape[dim][place], prod(shape[dim][place + 1 :])
        around = [prod(sizes) for sizes in shape]
        apart = [n for n in (before,) if n > 1], [n for n in (behind,) if n > 1]
        alone = not apart[0] and not apart[1]
        if not alone:
            shaped = [*around[:dim], *apart[0], now, *apart[1], *around[dim + 1 :]]
            value = self._call(node, aten.reshape.default, (value, shaped))
        op = torch.ops.partir_local.pad_dim.default if size > now else torch.ops.partir_local.unpad_dim.default
        value = self._call(node, op, (value, dim + len(apart[0]), size))
        shape[dim][place] = size
        if not alone:
            value = self._call(node, aten.reshape.default, (value, [prod(sizes) for sizes in shape]))
        return value

    def _call(
        self, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, name: str | None = None
    ) -> Node:
        """Write a call on behalf of a node of the old graph."""
        new = self.graph.call_function(target, args, kwargs or {}, name=name or name_of(target).partition("::")[2])
        new.meta = _kept(node)
        filled = torch.fx.map_arg((new.args, new.kwargs), lambda n: n.meta["val"])
        with _mode_of(node), torch.no_grad():
            new.meta["val"] = target(*cast("tuple[Any, ...]", filled[0]), **cast("dict[str, Any]", filled[1]))
        return new

    def _notes(self, node: Node, pads: frozenset[str]) -> tuple[str, ...]:
        """Say once of each padded sub-dim what is done and what it costs, at the first call that computes with it."""
        found: list[str] = []
        for name in sorted(pads):
            for subdim in node.meta["factors"][name]:
                if subdim.key not in self.padded or subdim.key in self.noted:
                    continue
                self.noted.add(subdim.key)
                size = self.padded[subdim.key]
                more = 100 * (size / subdim.size - 1)
                found.append(f"{source_line(node.meta)}: a dim of {subdim.size} is padded to {size}: {more:.2g}% more work along it")
        return tuple(found)


def _kept(node: Node) -> dict[str, Any]:
    """Return what a call on behalf of a node keeps of it; a placeholder has no line, its first reader has."""
    if node.op != "placeholder":
        return {key: node.meta[key] for key in KEPT if key in node.meta}
    reader = next((user for user in node.users if "stack_trace" in user.meta), node)
    kept = {key: reader.meta[key] for key in ("nn_module_stack", "stack_trace") if key in reader.meta}
    region = region_of(reader)  # a pad is made once, outside of what a checkpoint encloses
    if region is not None:
        kept["nn_module_stack"] = {key: path for key, path in kept["nn_module_stack"].items() if key != region}
    return kept


def _values_with(node: Node, binding: Binding, factor: str) -> list[int]:
    """Return the operands with a summed factor in which zeros count nothing: not the places where a sum goes."""
    holders = [place for place, dims in enumerate(binding.operands) if any(factor in names for names in dims)]
    read = operands(node)
    values = [place for place in holders if is_inexact(read[place].meta["val"])]
    return values or (holders if len(holders) == 1 else [])


def is_inexact(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds fractions."""
    return tensor.is_floating_point() or tensor.is_complex()


def _form(node: Node, dims: Sequence[Sequence[str]], pads: frozenset[str]) -> Form:
    places: set[Place] = set()
    for dim, names in enumerate(dims):
        flat = [name for name in names for _ in node.meta["factors"].get(name, ())]
        places |= {(dim, place) for place, name in enumerate(flat) if name in pads}
    return frozenset(places)


def _mode_of(node: Node) -> Any:
    value = next(r for n in (node, *node.all_input_nodes) for r in results_of(n) if hasattr(r, "fake_mode"))
    return cast(Any, value).fake_mode
