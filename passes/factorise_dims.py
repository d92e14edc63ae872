"""Name the sub-dims of every dim, backward and forward through the whole graph, before any axis is placed.

Before:  %qkv: f32[4, 16, 2304]   (chunked in 3, later viewed as 12 heads of 64)
After:   %qkv: f32[4, 16, (3*12*64)], and so is dim 0 of the weight that made it

Requires: every call has a rule.
Ensures: each call has ``meta["binding"]``; ``meta["factors"]``, factor -> sub-dims; ``meta["broken"]``, the factors whose
    operands have no common sub-dims (split by nobody in that call). Each value has ``meta["subdims"]``, a tuple of
    sub-dims for each dim of each result.
Idempotent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from partir import rules
from partir.errors import RuleError, source_line
from partir.graph import is_call, is_getitem, operands, results_of
from partir.pads import PAD_RULES
from partir.rules import Binding
from partir.subdims import Piece, avoid, frozen, leaves, tie

Dims = list[list[Piece]]


def factorise_dims(graph_module: GraphModule) -> GraphModule:
    """Return the graph with bindings and sub-dims on its nodes."""
    values: dict[Node, list[Dims]] = {}
    factors: dict[Node, dict[str, list[Piece]]] = {}
    for node in graph_module.graph.nodes:
        if node.op == "output":
            continue
        if is_getitem(node):
            values[node] = [values[cast(Node, node.args[0])][cast(int, node.args[1])]]
            continue
        values[node] = [[[Piece(int(size))] for size in result.shape] for result in results_of(node)]
        if is_call(node):
            node.meta["binding"] = bind(node)
            factors[node] = _tie_factors(node, values)
    keys: dict[int, int] = {}
    for node, dims in values.items():
        node.meta["subdims"] = tuple(tuple(frozen(dim, keys) for dim in result) for result in dims)
    for node, pieces in factors.items():
        node.meta["factors"] = {name: frozen(dim, keys) for name, dim in pieces.items()}
        node.meta["broken"] = _broken(node, pieces, values)
    return graph_module


def bind(node: Node) -> Binding:
    """Return the rule of a call, applied to its operands.

    Raises:
        RuleError: the op has no rule.
    """
    rule = rules.find(node.target)
    if rule is None:
        raise RuleError(f"{source_line(node.meta)}: {node.target} has no rule; write one: op {node.target}(x[* k], ...) -> y[* n]")
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return rule.bind(cast("tuple[Any, ...]", args), cast("dict[str, Any]", kwargs), node.meta["val"])


def _tie_factors(node: Node, values: dict[Node, list[Dims]]) -> dict[str, list[Piece]]:
    binding: Binding = node.meta["binding"]
    pieces = {name: [Piece(size)] for name, size in binding.sizes.items()}
    for factors, dims in _bound_dims(node, values):
        for names, dim in zip(factors, dims):
            tie(dim, [piece for name in names for piece in pieces[name]])
    for name in binding.whole:
        if _is_consumed(name, binding):
            avoid(pieces[name])
    return pieces


def _bound_dims(node: Node, values: dict[Node, list[Dims]]) -> list[tuple[Sequence[Sequence[str]], Dims]]:
    binding: Binding = node.meta["binding"]
    read = [values[operand][0] for operand in operands(node)]
    return list(zip([*binding.operands, *binding.results], [*read, *values[node]]))


def _is_consumed(name: str, binding: Binding) -> bool:
    """A chunk or a select takes the factor apart: it shares a dim, or no result has it. What is padded is meant to be split."""
    if binding.rule in PAD_RULES:
        return False
    shared = any(name in dim and len(dim) > 1 for dims in (*binding.operands, *binding.results) for dim in dims)
    kept = any(name in dim for dims in binding.results for dim in dims)
    summed = name in binding.sums or name in binding.maxima
    return shared or not (kept or summed)


def _broken(node: Node, pieces: dict[str, list[Piece]], values: dict[Node, list[Dims]]) -> frozenset[str]:
    found: set[str] = set()
    for factors, dims in _bound_dims(node, values):
        for names, dim in zip(factors, dims):
            wanted = leaves([piece for name in names for piece in pieces[name]])
            if [id(piece) for piece in wanted] != [id(piece) for piece in leaves(dim)]:
                found.update(names)
    return frozenset(found)


