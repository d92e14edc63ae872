"""What is asked about the calls of a graph again and again, found once: what each reads, whether it is a view, over which axes it sends.

The order of a rank, its memory and its steps are made for many meshes from one graph; reading fx nodes and schemas takes most of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch.fx import GraphModule, Node

from partir.collectives import split_axes
from partir.errors import module_path
from partir.graph import is_collective, is_getitem, is_view, operands
from partir.mesh import Mesh
from partir.records import axis_of, layer_of, message_of


@dataclass(eq=False, slots=True)
class Call:
    """One node of a graph that does not change any more.

    Args:
        node: of the graph.
        reads: the nodes that it reads, each once.
        layer: path of the list item that it belongs to, ``"blocks.0"``, or empty.
        is_item: it takes one result of a call with several.
        is_view: its result is its operand's storage, as the runtime runs it.
        is_light: it computes nothing: a view, an item, a cast.
        axes: of a collective's group; None: it is none.
        operands: of a collective.
        items: that are taken of a collective's results, and the number of each.
    """

    node: Node
    reads: tuple[Node, ...]
    layer: str
    is_item: bool
    is_view: bool
    is_light: bool
    axes: tuple[str, ...] | None
    operands: tuple[Node, ...]
    items: tuple[tuple[Node, int], ...]
    _moves: dict[int, bool] = field(default_factory=dict[int, bool])

    def is_alone(self, mesh: Mesh) -> bool:
        """Return whether it is a collective in groups of one rank, which hands its operand on."""
        return bool(self.operands) and mesh.extent(self.axes or ()) == 1

    def moves(self, mesh: Mesh) -> bool:
        """Return whether a collective sends a message on a mesh."""
        ranks = mesh.extent(self.axes or ())
        if ranks not in self._moves:
            self._moves[ranks] = bool(message_of(self.node, mesh)[1])
        return self._moves[ranks]


_known: WeakKeyDictionary[GraphModule, Mapping[Node, Call]] = WeakKeyDictionary()


def calls_of(graph_module: GraphModule) -> Mapping[Node, Call]:
    """Return what is known of every node of a program's graph, in order."""
    if graph_module not in _known:
        _known[graph_module] = {node: _call(node) for node in graph_module.graph.nodes}
    return _known[graph_module]


def is_light(node: Node) -> bool:
    """Return whether a node computes nothing: a view, one of several results, a cast."""
    return is_getitem(node) or is_view(node) or node.target is torch.ops.aten._to_copy.default


def _call(node: Node) -> Call:
    collective = is_collective(node)
    items = tuple((user, cast(int, user.args[1])) for user in node.users if is_getitem(user)) if collective else ()
    return Call(
        node,
        tuple(node.all_input_nodes),
        layer_of(module_path(node.meta)),
        is_getitem(node),
        _looks(node),
        is_light(node),
        split_axes(axis_of(node)) if collective else None,
        tuple(operands(node)) if collective else (),
        items,
    )


def _looks(node: Node) -> bool:
    """Return whether a call looks at its operand's storage; a reshape does where a fake one would."""
    if node.target is not torch.ops.aten.reshape.default:
        return is_view(node)
    read, made = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return read.is_contiguous() or made.stride() == read.stride()
