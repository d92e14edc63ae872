"""How many elements each value of a program has on one rank, as a monomial in the sizes of axes, batch and sequence.

    %g: f32[16@x, 64, 128@z] ~y        16*64 -> B*S        128*B*S/(x*z)

What the compiler has laid out says its size itself. The rest (parts of an op that autograd took apart) is found from its
neighbours: a view or an elementwise op is as large as what it reads, a collective's operand as its result, and the result of
a product is one of the operands or the result of the op that it serves. A value that nobody can name keeps its number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from partir.collectives import split_axes
from partir.cost.monomial import Monomial
from partir.graph import collective_name, is_collective, is_getitem, operands, tensors_of
from partir.layout import Layout
from partir.mesh import Mesh
from partir.subdims import Sizes

Numels = tuple[Monomial | None, ...]
CONTRACTIONS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "dot", "mv", "einsum", "convolution", "convolution_backward")
RESHAPING = ("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "squeeze", "unsqueeze", "clone", "flatten", "unflatten")
SHRINKING = {"all_gather": 1, "all_gather_same": 1, "reduce_scatter": -1}


class ProgramSizes:
    """The monomials of every value of a program's graphs.

    Args:
        graphs: forward and backward.
        lowered: the graph that they were derived from; its nodes have layouts and sub-dims.
        mesh: the program's, for which every monomial's value is the true size.
        symbols: the key of a sub-dim -> the symbol of its size.
        values: the value of each symbol in the program.
    """

    def __init__(
        self, graphs: Sequence[GraphModule], lowered: GraphModule, mesh: Mesh, symbols: Mapping[int, str], values: Mapping[str, int]
    ) -> None:
        self.mesh, self.symbols = mesh, symbols
        self.values = {**values, **{axis: mesh[axis] for axis in mesh.names}}
        self._lowered = {node.name: node for node in lowered.graph.nodes}
        self._numels: dict[Node, Numels] = {}
        self._bytes: dict[Node, list[Monomial]] = {}
        self._by_name: dict[str, Numels] = {}
        self._tensors: dict[Node, tuple[torch.Tensor, ...]] = {}
        self._values: dict[Monomial, Any] = {}
        self._blocks: dict[Any, Monomial] = {}
        for number, graph in enumerate(graphs):
            self._name_known(graph, self._gradients(graph) if number else {})
            for _ in range(2):  # back first: what a collective reads is certain, what an op passes on is read off its shapes
                self._pass_back(reversed(graph.graph.nodes))
                self._pass_on(graph.graph.nodes)
            self._name_by_origin(graph)
            self._name_by_layout(graph)
            self._pass_on(graph.graph.nodes)
            self._pass_back(reversed(graph.graph.nodes))

    def numels(self, node: Node) -> tuple[Monomial, ...]:
        """Return the number of elements of each result of a node on one rank."""
        tensors = self._tensors_of(node)
        known = self._numels.get(node) or (None,) * len(tensors)
        if None not in known:
            return cast("tuple[Monomial, ...]", known)
        return tuple(one or Monomial.of(value.numel()) for one, value in zip(known, tensors, strict=True))

    def bytes_of(self, node: Node) -> Sequence[Monomial]:
        """Return the bytes of each result of a node on one rank."""
        if node not in self._bytes:
            pairs = zip(self.numels(node), self._tensors_of(node), strict=True)
            self._bytes[node] = [numel * tensor.dtype.itemsize for numel, tensor in pairs]
        return self._bytes[node]

    def is_named(self, node: Node) -> bool:
        """Return whether the sizes of a node are understood rather than numbers."""
        return all(one is not None for one in self._numels.get(node, (None,)))

    def numel(self, layout: Layout, sizes: Sizes | None) -> Monomial:
        """Return the number of elements of one block of a layout."""
        key = (layout, sizes, tuple(one.key for dim in sizes or () for one in dim))
        if key not in self._blocks:
            self._blocks[key] = block_numel(layout, sizes, self.symbols, self.mesh)
        return self._blocks[key]

    def value(self, size: Monomial) -> Any:
        """Return the value of a monomial in the program: an int where it is one."""
        if size not in self._values:
            self._values[size] = size.value(self.values)
        return self._values[size]

    def _tensors_of(self, node: Node) -> tuple[torch.Tensor, ...]:
        if node not in self._tensors:
            self._tensors[node] = tensors_of(node)
        return self._tensors[node]

    def _gradients(self, backward: GraphModule) -> dict[Node, Node]:
        """Return the input whose gradient each result of the backward is."""
        inputs = [node for node in self._lowered.values() if node.op == "placeholder"]
        pairs = zip(cast("tuple[Any, ...]", backward.graph.output_node().args[0]), inputs, strict=True)
        return {gradient: node for gradient, node in pairs if isinstance(gradient, Node)}

    def _name_known(self, graph: GraphModule, gradients: Mapping[Node, Node]) -> None:
        """Name what has a layout and whose dims are known; of anything else the neighbours say what its sizes are."""
        for node in graph.graph.nodes:
            layout = node.meta.get("layout")
            source = gradients.get(node) or self._lowered.get(node.name) or self._lowered.get(node.name.removeprefix("d_"))
            subdims: Sequence[Sizes] = source.meta.get("subdims", ()) if source is not None else ()
            layouts = () if layout is None else (layout,) if isinstance(layout, Layout) else cast("tuple[Layout, ...]", layout)
            if layouts and len(subdims) == len(layouts):
                self._set(node, tuple(self.numel(one, subdims[i]) for i, one in enumerate(layouts)))
            else:
                self._set(node, self._by_name.get(node.name, ()))

    def _name_by_layout(self, graph: GraphModule) -> None:
        """Name what is left and has a layout: its sizes are the program's, over the axes that split them."""
        for node in graph.graph.nodes:
            layout = node.meta.get("layout")
            if layout is not None:
                layouts = (layout,) if isinstance(layout, Layout) else cast("tuple[Layout, ...]", layout)
                known = self._numels.pop(node, (None,) * len(layouts))
                self._set(node, tuple(one or self.numel(layout, None) for one, layout in zip(known, layouts, strict=True)))

    def _set(self, node: Node, numels: Numels) -> bool:
        """Note sizes that agree with the program's own; return whether something new is known."""
        if node in self._numels and None not in self._numels[node]:
            return False
        tensors = self._tensors_of(node)
        if len(numels) != len(tensors):
            return False
        checked = tuple(one if one is not None and self.value(one) == value.numel() else None for one, value in zip(numels, tensors))
        if all(one is None for one in checked) or self._numels.get(node) == checked:
            return False
        self._numels[node] = checked
        self._by_name.setdefault(node.name, checked)
        return True

    def _known(self, node: Node) -> Monomial | None:
        found = self._numels.get(node, ())
        return found[0] if len(found) == 1 else None

    def _pass_on(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node.op != "call_function":
                continue
            if is_getitem(node):
                whole = self._numels.get(cast(Node, node.args[0]), ())
                index = cast(int, node.args[1])
                self._set(node, whole[index : index + 1])
            elif is_collective(node):
                self._through(node, operands(node)[:1], node, 1)
            elif len(self._tensors_of(node)) > 1:
                self._parts(node)
            elif _name(node) not in CONTRACTIONS:
                self._elementwise(node)

    def _elementwise(self, node: Node) -> None:
        """Each result is as large as an operand of its size; one without elements to compare stays a number."""
        reads = [read for read in node.all_input_nodes if self._known(read) is not None]
        found: list[Monomial | None] = []
        for value in self._tensors_of(node):
            like = next((r for r in reads if value.numel() > 1 and _is_like(node, r.meta["val"], value)), None)
            found.append(self._known(like) if like is not None else Monomial.of(1) if value.numel() == 1 else None)
        self._set(node, tuple(found))

    def _parts(self, node: Node) -> None:
        """Of several results the first is known from its reader; the others are a fixed part of it (a number a row beside the row)."""
        self._elementwise(node)
        items = {cast(int, user.args[1]): self._known(user) for user in node.users if is_getitem(user)}
        found = list(self._numels.get(node, (None,) * len(self._tensors_of(node))))
        found = [known or items.get(index) for index, known in enumerate(found)]
        first, tensors = found[0], self._tensors_of(node)
        if first is not None:
            found = [known or first * Fraction(value.numel(), tensors[0].numel()) for known, value in zip(found, tensors)]
        self._numels.pop(node, None)
        self._set(node, tuple(found))

    def _pass_back(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node.op == "call_function" and is_collective(node) and collective_name(node).endswith("_bucket"):
                self._items(node)
                self._bucket(node)
                continue
            if node.op != "call_function" or self._known(node) is None:
                continue
            if is_collective(node):
                self._through(node, [node], operands(node)[0] if operands(node) else node, -1)
            elif _name(node) not in CONTRACTIONS:
                self._operands(node)

    def _operands(self, node: Node) -> None:
        """What a call that is no product reads is as large as what it makes, where the shapes say so."""
        made = self._tensors_of(node)[0]
        for read in node.all_input_nodes if made.numel() > 1 else ():
            tensors = self._tensors_of(read)
            if len(tensors) == 1 and _is_like(node, tensors[0], made):
                self._set(read, (self._known(node),))

    def _items(self, node: Node) -> None:
        """Each result of a bucket is as large as what reads it."""
        found = list(self._numels.pop(node, (None,) * len(self._tensors_of(node))))
        for user in node.users:
            if is_getitem(user):
                found[cast(int, user.args[1])] = found[cast(int, user.args[1])] or self._known(user)
        self._set(node, tuple(found))

    def _bucket(self, node: Node) -> None:
        axes = split_axes(str(_argument(node, "axis")))
        for read, known in zip(operands(node), self._numels.get(node, ())):
            if known is not None:
                self._set(read, (known.over(axes) if collective_name(node) == "all_gather_bucket" else known.times(axes),))

    def _through(self, node: Node, sources: Sequence[Node], target: Node, sign: int) -> None:
        """Size of a collective's result from its operand, or the other way round."""
        known = self._known(sources[0]) if sources else None
        if known is None or collective_name(node).endswith("_bucket") or len(self._tensors_of(node)) != 1:
            return
        axes = split_axes(str(_argument(node, "axis"))) if collective_name(node) in SHRINKING else ()
        grows = SHRINKING.get(collective_name(node), 0) * sign > 0
        self._set(target, (known.times(axes) if grows else known.over(axes),))

    def _name_by_origin(self, graph: GraphModule) -> None:
        """Name what is left by the op that it serves; of a product's candidates the one that leaves a square: mn * nk / mk = n^2."""
        for node in graph.graph.nodes:
            if node.op != "call_function" or node in self._numels or len(self._tensors_of(node)) != 1:
                continue
            candidates = [one for one in self._candidates(node) if self.value(one) == _numel(node)]
            factors = [self._known(read) for read in node.all_input_nodes[-2:]]
            if len(factors) == 2 and None not in factors and _name(node) in CONTRACTIONS:
                product = cast(Monomial, factors[0]) * cast(Monomial, factors[1])
                candidates.sort(key=lambda one: not (product / one).is_square())
            if candidates:
                self._set(node, (candidates[0],))

    def _candidates(self, node: Node) -> Iterator[Monomial]:
        """Yield the sizes of what the op that a node serves reads and makes."""
        origin = self._lowered.get(str(node.meta.get("origin")))
        if origin is None:
            return
        serving = [n for n in self._lowered.values() if n.meta.get("origin") == origin.meta.get("origin") and n.op == "call_function"]
        for one in [*(read for n in serving for read in n.all_input_nodes), *serving]:
            if isinstance(one.meta.get("layout"), Layout) and "subdims" in one.meta:
                yield self.numel(one.meta["layout"], one.meta["subdims"][0])


def block_numel(layout: Layout, sizes: Sizes | None, symbols: Mapping[int, str], mesh: Mesh) -> Monomial:
    """Return the number of elements of one block.

    Args:
        sizes: the sub-dims of each dim, where they are known.
        symbols: the key of a sub-dim -> the symbol of its size.
    """
    total = Monomial.of(1, (), [axis for axis in layout.split_axes if mesh[axis] > 1])
    for number, dim in enumerate(layout.dims):
        inner = sizes[number] if sizes is not None and number < len(sizes) else ()
        named = [symbols[one.key] for one in inner if one.key in symbols]
        rest = 1
        for one in inner:
            rest *= 1 if one.key in symbols else one.size
        whole = 1
        for one in inner:
            whole *= one.size
        total = total * (Monomial.of(rest, named) if whole == dim.size else Monomial.of(dim.size))
    return total


def _numel(node: Node) -> int:
    tensors = tensors_of(node)
    return tensors[0].numel() if len(tensors) == 1 else -1


def _is_like(node: Node, read: torch.Tensor, made: torch.Tensor) -> bool:
    """Return whether what a node makes is as large as what it reads: the same shape, or another shape of the same elements."""
    return read.shape == made.shape or (_name(node) in RESHAPING and read.numel() == made.numel())


def _name(node: Node) -> str:
    target = cast(Any, node.target)
    return str(target._schema.name).rpartition("::")[2] if hasattr(target, "_schema") else ""


def _argument(node: Node, name: str) -> Any:
    if name in node.kwargs:
        return node.kwargs[name]
    schema = [argument.name for argument in cast(Any, node.target)._schema.arguments]
    return node.args[schema.index(name)]
