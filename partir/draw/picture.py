"""What a drawing shows, before it is graphviz text: nodes by module, edges, and what each stands for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from partir.layout import Layout
from partir.records import Collective, layer_of

Kind = Literal["op", "collective", "value", "saved", "gradient"]


@dataclass
class DrawnNode:
    """One node of a drawing.

    Args:
        key: its name in the graphviz text, ``forward linear_2``.
        stage: ``"forward"`` or ``"backward"``.
        path: the module in whose cluster it stands.
        kind: an op, a collective, a parameter or input (``value``), a saved value, a gradient.
        title: its text.
        names: what it stands for, by the layout of each where that is known.
        layout: the layout of its result; of an op of the backward, that of the forward's result.
        before: the layout of a collective's operand.
        record: the collective, as the first of its layers has it.
        facts: further facts by name.
        layers: the layers that it stands for, itself included; empty outside layers.
    """

    key: str
    stage: str
    path: str
    kind: Kind
    title: str
    names: dict[str, Layout | None] = field(default_factory=dict[str, "Layout | None"])
    layout: Layout | None = None
    before: Layout | None = None
    record: Collective | None = None
    facts: dict[str, str] = field(default_factory=dict[str, str])
    layers: tuple[str, ...] = ()

    @property
    def layer(self) -> str:
        """The repeated layer in which it stands, ``blocks.0``, or ``""``."""
        return layer_of(self.path)

    @property
    def count(self) -> int:
        """The number of nodes that it stands for."""
        return max(len(self.layers), 1)

    @property
    def bytes(self) -> int:
        """Bytes that one rank receives in all the collectives that it stands for."""
        return self.record.bytes * self.count if self.record else 0


@dataclass(frozen=True)
class DrawnEdge:
    """An edge between two nodes, by key.

    Args:
        source, target: keys.
        axis: the mesh axes of the collective that it enters or leaves, or ``""``.
        bytes: the bytes of that collective, of all its layers.
        onward: it leads from one folded layer to the next, so that both ends are drawn in one.
    """

    source: str
    target: str
    axis: str = ""
    bytes: int = 0
    onward: bool = False


@dataclass
class Picture:
    """Nodes by key and edges by their ends, in the order of their making; `folds`: the layers of each folded one, by stage."""

    nodes: dict[str, DrawnNode] = field(default_factory=dict[str, DrawnNode])
    edges: dict[tuple[str, str, bool], DrawnEdge] = field(default_factory=dict[tuple[str, str, bool], DrawnEdge])
    folds: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict[tuple[str, str], tuple[str, ...]])

    def add(self, node: DrawnNode) -> DrawnNode:
        """Add a node, or return the one of its key that is there."""
        return self.nodes.setdefault(node.key, node)

    def join(self, edge: DrawnEdge) -> None:
        """Add an edge between two nodes, once."""
        if edge.source != edge.target or edge.onward:
            self.edges.setdefault((edge.source, edge.target, edge.onward), edge)

    def stage(self, stage: str) -> Picture:
        """Return the part of one stage."""
        nodes = {key: node for key, node in self.nodes.items() if node.stage == stage}
        edges = {ends: edge for ends, edge in self.edges.items() if edge.source in nodes}
        return Picture(nodes, edges, {place: layers for place, layers in self.folds.items() if place[0] == stage})

    def numbers(self) -> dict[str, int]:
        """Return the place of each node in the order in which they run."""
        return {key: number for number, key in enumerate(self.nodes)}

    def collectives(self) -> Iterator[DrawnNode]:
        """Yield the collectives, in the order in which they run."""
        return (node for node in self.nodes.values() if node.record is not None)

    def ranking(self) -> dict[str, int]:
        """Return the place of each collective by the bytes that it stands for, from 1, the costliest."""
        ordered = sorted(self.collectives(), key=lambda node: -node.bytes)
        return {node.key: place for place, node in enumerate(ordered, 1)}


def cluster_path(path: str) -> tuple[str, ...]:
    """Return the titles of the clusters of a module: its layer and the part of the layer, or the outermost module.

    >>> cluster_path("blocks.0.attn.qkv"), cluster_path("norm"), cluster_path("")
    (('blocks.0', 'blocks.0.attn'), ('norm',), ())
    """
    layer = layer_of(path)
    if not layer:
        return (path.split(".")[0],) if path else ()
    part = path[len(layer) + 1 :].split(".")[0]
    return (layer, f"{layer}.{part}") if part else (layer,)


def short_name(name: str, path: str) -> str:
    """Return a dotted name as it reads inside the clusters of a module.

    >>> short_name("blocks.0.attn.qkv.weight", "blocks.0.attn.qkv"), short_name("ids", "")
    ('qkv.weight', 'ids')
    """
    for title in reversed(cluster_path(path)):
        if name.startswith(f"{title}."):
            return name[len(title) + 1 :]
    return name
