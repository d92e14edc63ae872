"""Say whether a program compiled for a mesh is, without the axes that another mesh lacks, the program of that other mesh.

    (x=2, y=2, z=2)   %g = all_gather(%x, axis=y)  %h = all_gather(%w, axis=x)  %c = linear(%g, %h)  %r = reduce_scatter(%c, axis=z)
    (x=1, y=8, z=4)   %g = all_gather(%x, axis=y)                               %c = linear(%g, %w)  %r = reduce_scatter(%c, axis=z)

It is where the other mesh, laid out anew, gives the same layouts and the same collectives but for those axes; where no op runs in
another way for being whole along them (a layer norm whose hidden dim is split is a recipe, a look-up masks ids); and where no two
collectives become one.

Requires: the graphs of `insert_collectives` for both meshes, and the first's lowered graph.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from torch.fx import Graph, GraphModule, Node, map_arg

from partir.assignment import split_axes
from partir.collectives import split_axes as axes_in
from partir.graph import collective_name, is_collective, is_getitem, layouts_of, operands, tensors_of
from partir.layout import Layout
from partir.mesh import Mesh
from partir.passes.bucket_vectors import layer_of
from partir.passes.node_facts import IDENTITIES, collective, is_view
from partir.passes.partition import is_gathered
from partir.passes.share_gathers import argument_key
from partir.records import axis_of

if TYPE_CHECKING:
    from partir.passes.pipeline import Lowered

UNORDERED = ("all_reduce", "spread", "settle")
"""Collectives to which the order of the axes of a group makes no difference."""


def is_same_program(low: Lowered, other: GraphModule, on: Mesh) -> bool:
    """Return whether a program without some axes is that of a mesh which lacks them; see `is_laid_out_alike`."""
    return is_laid_out_alike(low, other, on) and not other_forms(low, on.split_axes())


def is_laid_out_alike(low: Lowered, other: GraphModule, on: Mesh) -> bool:
    """Return whether a program without some axes differs from that of a mesh which lacks them by nothing but `other_forms`.

    Args:
        low: what the program was derived from.
        other: the graph with collectives of the other mesh.
        on: the other mesh.
    """
    axes = on.split_axes()
    if not set(axes) <= set(low.mesh.split_axes()):
        return False
    known = _without_axes.setdefault(low, {})
    if axes not in known:
        less = without(low.mesh, axes)
        known[axes] = None if _become_one(low.graph.graph, low.mesh, less) else list(_calls(low.collectives.graph, less))
    return known[axes] is not None and known[axes] == list(_calls(other.graph, on))


_without_axes: WeakKeyDictionary[Lowered, dict[tuple[str, ...], list[tuple[Any, ...]] | None]] = WeakKeyDictionary()
"""The calls of a graph where only some axes have more than one rank; None where calls become one. Many meshes are compared with them."""


def other_forms(low: Lowered, axes: Collection[str]) -> frozenset[str]:
    """Return the calls that run in another way on blocks where only ``axes`` have more than one rank."""
    less = without(low.mesh, axes)
    return frozenset(node.name for node in low.annotated.graph.nodes if _forms(node, low.mesh) != _forms(node, less))


def without(mesh: Mesh, axes: Collection[str]) -> Mesh:
    """Return a mesh with one rank along every axis but some."""
    return Mesh(mesh.names, tuple(size if name in axes else 1 for name, size in zip(mesh.names, mesh.sizes)))


def _forms(node: Node, mesh: Mesh) -> Sequence[bool]:
    """Return which factors are split of those that decide how an op runs on blocks."""
    binding = node.meta.get("binding")
    if binding is None or is_collective(node):
        return ()
    deciding = [*binding.splits, *sorted(binding.offsets), *(factor for _, _, factor in binding.index)]
    return [mesh.extent(split_axes(node.meta.get("assignment", {}), (factor,))) > 1 for factor in deciding]


def _calls(graph: Graph, mesh: Mesh) -> Iterator[tuple[Any, ...]]:
    """Yield what each call is, in order, with axes of one rank left out."""
    place: dict[Node, int] = {}
    for number, (node, reads) in enumerate(_kept(graph, mesh)):
        place[node] = number
        read = tuple(place[one] for one in reads)
        if node.op != "call_function":
            yield node.op, read, _split(node, mesh)
        elif is_collective(node):
            axes = _present(axis_of(node), mesh)
            yield collective_name(node), sorted(axes) if collective_name(node) in UNORDERED else axes, read, _split(node, mesh)
        else:
            yield str(node.target), read, node.meta.get("state"), _split(node, mesh)


def _kept(graph: Graph, mesh: Mesh) -> Iterator[tuple[Node, list[Node]]]:
    """Yield the nodes that do something on a mesh, and what they read of those: a collective in groups of one hands its operand on."""
    behind: dict[Node, Node] = {}
    for node in graph.nodes:
        reads = [behind[read] if read in behind else read for read in node.all_input_nodes]
        if _is_alone(node, mesh):
            behind[node] = reads[0]
        else:
            yield node, reads


def _split(node: Node, mesh: Mesh) -> Hashable:
    """Return which axes split which dims of a node's results, sizes left out: they differ where dims are padded."""
    if node.op == "output" or node.meta.get("layout") is None:
        return ()
    return tuple(_pattern(layout.strip(mesh)) for layout in layouts_of(node))


def _pattern(layout: Layout) -> Hashable:
    dims = tuple((tuple(part.axes for part in dim.parts if part.axes), dim.axes) for dim in layout.dims)
    return dims, layout.pending, layout.varied, layout.grad, layout.owner


def _present(axis: str, mesh: Mesh) -> tuple[str, ...]:
    return tuple(name for name in axes_in(axis) if mesh[name] > 1)


def _become_one(graph: Graph, mesh: Mesh, less: Mesh) -> bool:
    """Return whether calls that differ by axes of one rank alone would be merged, vectors gathered together that are not, or values
    kept that are made or sent again because what they are made of was gathered.
    """
    if less == mesh:
        return False
    if not _repeated(graph, less) <= _repeated(graph, mesh) or _vectors_meet(graph, less):
        return True
    return any(_is_worth_keeping(node, less) for node in _gathered(graph, mesh) - _gathered(graph, less))


def _is_worth_keeping(node: Node, mesh: Mesh) -> bool:
    """Return whether a call makes more than a vector, or sends it, on a mesh."""
    if _is_alone(node, mesh) or is_view(node) or is_getitem(node) or collective(node) in IDENTITIES:
        return False
    return collective(node) == "all_to_all" or any(result.dim() > 1 for result in tensors_of(node))


def _gathered(graph: Graph, mesh: Mesh) -> set[Node]:
    """Return what a collective gathers, moved or combined elementwise at most: what ``memory="low"`` makes again."""
    found: set[Node] = set()
    inputs = set(graph.find_nodes(op="placeholder"))
    for node in graph.nodes:
        if _is_alone(node, mesh):
            gathered = node.all_input_nodes[0] in found
        else:
            gathered = node.op == "call_function" and is_gathered(node, found, inputs)
        if gathered:
            found.add(node)
    return found


def _is_alone(node: Node, mesh: Mesh) -> bool:
    """Return whether a node is a collective in groups of one rank, which hands its operand on."""
    return is_collective(node) and bool(operands(node)) and mesh.extent(axes_in(axis_of(node))) == 1


def _repeated(graph: Graph, mesh: Mesh) -> set[str]:
    """Return the names of the calls that repeat another, as `share_gathers` finds them."""
    first: dict[Hashable, Node] = {}
    behind: dict[Node, Node] = {}
    found: set[str] = set()
    for node in graph.nodes:
        if node in behind or node.op != "call_function":
            continue
        if _is_alone(node, mesh):
            behind |= _handed_on(node, behind)
        elif is_collective(node) or is_view(node) or is_getitem(node):
            kept = first.setdefault(_key(node, behind, mesh), node)
            if kept is not node:
                behind[node] = kept
                found.add(node.name)
    return found


def _vectors_meet(graph: Graph, mesh: Mesh) -> bool:
    """Return whether vectors of one layer that are gathered one by one, for another gather comes before, would be gathered together."""
    found: set[Hashable] = set()
    for node in graph.nodes:
        if is_collective(node) and collective_name(node) in ("all_gather", "all_gather_bucket") and tensors_of(node)[0].dim() == 1:
            kind = layer_of(node), tensors_of(node)[0].dtype, _present(axis_of(node), mesh)
            if kind[2] and kind in found and any(_is_alone(read, mesh) for read in _behind(node)):
                return True
            found.add(kind)
    return False


def _behind(node: Node) -> Iterator[Node]:
    """Yield the collectives between a parameter and a node."""
    while node.op == "call_function" and (is_collective(node) or is_getitem(node)) and node.all_input_nodes:
        node = node.all_input_nodes[0]
        if is_collective(node):
            yield node


def _handed_on(node: Node, behind: Mapping[Node, Node]) -> dict[Node, Node]:
    """Return what stands for a collective in groups of one, or for each result of a bucket."""
    reads = [behind.get(read, read) for read in operands(node)]
    if not collective_name(node).endswith("_bucket"):
        return {node: reads[0]}
    return {user: reads[cast(int, user.args[1])] for user in node.users}


def _key(node: Node, behind: Mapping[Node, Node], mesh: Mesh) -> Hashable:
    args, kwargs = map_arg((node.args, node.kwargs), lambda read: behind.get(read, read))
    if is_collective(node):
        axis: Any = axis_of(node)
        args, kwargs = (tuple(_present(axis, mesh) if a == axis else a for a in args), {k: v for k, v in kwargs.items() if k != "axis"})
        return collective_name(node), _present(axis, mesh), argument_key(args), argument_key(kwargs)
    return node.target, argument_key(args), argument_key(kwargs)
