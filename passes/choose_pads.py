"""Choose which sub-dims are padded, so that the 3-D law finds what its axes divide.

Every product is asked, in each state of the placement: what its axes divide is left alone, in the order in which they will be
placed; then the sub-dim is padded that grows least; a sub-dim that an op takes apart (heads' width in attention) serves where a
pad would add more than half; and what has fewer elements than the axes have ranks stays whole along them.
Nothing is changed here: pad_dims does that.

Requires: factorise_dims.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from partir.graph import is_call
from partir.mesh import Mesh
from partir.rules import Binding
from partir.rules.placement import Placement
from partir.subdims import SubDim

LIMIT = 2.0  # A pad that doubles the work saves nothing on two ranks.
LIMIT_BESIDE_ANOTHER = 1.5  # Where another sub-dim divides, if at the cost of a gather.
LIMIT_AT_REST = 1.25  # For axes that only store and scatter a value.


def choose_pads(graph_module: GraphModule, mesh: Mesh, placement: Placement) -> dict[int, int]:
    """Return the padded size of each sub-dim that is to be padded, by its key."""
    chooser = _Chooser(mesh)
    for node in graph_module.graph.nodes:
        if is_call(node) and node.meta["binding"].product is not None:
            for state in placement.states:
                _ask(chooser, node, placement, state)
    return chooser.padded()


def _ask(chooser: _Chooser, node: Node, placement: Placement, state: str) -> None:
    binding: Binding = node.meta["binding"]
    product = binding.product
    assert product is not None
    law = placement.states[state]
    at_rest = placement.at_rest(state, "a")["m"]
    chooser.ask(_subdims(node, product.k), law["k"], law["k"])
    chooser.ask(_subdims(node, product.n), law["n"], law["n"])
    chooser.ask(_subdims(node, product.m), at_rest, law["m"])


def _subdims(node: Node, names: Sequence[str]) -> list[SubDim]:
    """Return the sub-dims of a product's index that axes may split, those taken apart elsewhere last."""
    binding: Binding = node.meta["binding"]
    unsplit = binding.unsplit | node.meta["broken"]
    indexed = {factor for _, _, factor in binding.index}
    found: list[SubDim] = []
    for name in names:
        subdims = node.meta["factors"].get(name, ())
        if name not in unsplit:
            found += subdims[:1] if name in indexed else subdims
    return sorted(found, key=lambda subdim: subdim.avoid)


@dataclass
class _Chooser:
    """What products have asked for: sub-dim -> its size and the multiples that it should be."""

    mesh: Mesh
    sizes: dict[int, int] = field(default_factory=dict[int, int])
    multiples: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def ask(self, subdims: Sequence[SubDim], axes: Sequence[str], computed: Sequence[str]) -> None:
        """Place ``axes`` on the sub-dims; note the multiples that those need. ``computed``: the axes that divide work."""
        extents = dict.fromkeys(range(len(subdims)), 1)
        for axis in axes:
            extent = self.mesh[axis] if axis in self.mesh.names else 1
            if extent == 1:
                continue
            place = self._place(subdims, extents, extent, axis in computed)
            if place is not None:
                extents[place] *= extent
        for place, extent in extents.items():
            if subdims[place].size % extent:
                self.sizes[subdims[place].key] = subdims[place].size
                self.multiples.setdefault(subdims[place].key, []).append(extent)

    def _place(self, subdims: Sequence[SubDim], extents: dict[int, int], extent: int, computed: bool) -> int | None:
        order = sorted(extents, key=lambda place: extents[place] == 1)
        divided = [place for place in order if subdims[place].size % (extents[place] * extent) == 0]
        plain = [place for place in divided if not subdims[place].avoid]
        if plain:
            return plain[0]
        limit = LIMIT_AT_REST if not computed else LIMIT_BESIDE_ANOTHER if divided else LIMIT
        growth = {place: _growth(subdims[place].size, extents[place] * extent) for place in order if not subdims[place].avoid}
        best = min(growth, key=lambda place: growth[place], default=None)
        if best is not None and growth[best] <= limit and subdims[best].size >= extents[best] * extent:
            return best
        return divided[0] if divided else None

    def padded(self) -> dict[int, int]:
        """Return key -> padded size: a multiple of all that were asked, or of the largest where that would be too much."""
        found: dict[int, int] = {}
        for key, multiples in self.multiples.items():
            size = self.sizes[key]
            every = math.lcm(*multiples)
            multiple = every if _growth(size, every) <= LIMIT_BESIDE_ANOTHER else max(multiples)
            found[key] = _ceil(size, multiple)
        return found


def _ceil(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _growth(size: int, multiple: int) -> float:
    return _ceil(size, multiple) / size
