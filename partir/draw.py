"""Draw what moves in a plan as a graphviz graph: ops in boxes by module, a coloured node for each collective, bytes on its edges.

    weight --> (all_gather x) -- 2,048 B --> [linear]   <-- 2,048 B -- (all_gather y) <-- [layer_norm]

Views and ops that move nothing on their way (chunk, transpose, spread) are drawn as the value that they look at. The forward is
one cluster, the backward another, dashed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import graphviz  # pyright: ignore[reportMissingTypeStubs]
from torch.fx import GraphModule, Node

from partir.errors import module_path
from partir.graph import is_collective, is_getitem
from partir.layout import Layout
from partir.printer import user_name
from partir.records import Collective, layer_of

if TYPE_CHECKING:
    from partir.plans import Plan

COLOURS = {"x": "#1b9e77", "y": "#d95f02", "z": "#7570b3", "data": "#e7298a"}
MIXED = "#666666"
LINE = r"\n"


@dataclass
class Cluster:
    """Statements of one cluster and the clusters in it, in the order of their making."""

    nodes: dict[str, dict[str, str]] = field(default_factory=dict[str, "dict[str, str]"])
    inner: dict[str, Cluster] = field(default_factory=dict[str, "Cluster"])

    def at(self, path: tuple[str, ...]) -> Cluster:
        """Return the cluster at a path of titles, made if need be."""
        found = self
        for title in path:
            found = found.inner.setdefault(title, Cluster())
        return found


@dataclass
class Drawing:
    """One stage's part of the graph; `paths`: the module in which each node is drawn."""

    stage: str
    paths: dict[Node, str] = field(default_factory=dict[Node, str])
    root: Cluster = field(default_factory=Cluster)
    edges: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict[tuple[str, str], "dict[str, str]"])

    def node(self, key: str, path: str, **attributes: str) -> None:
        """Add a node to the cluster of a module, once."""
        self.root.at(_cluster_path(path)).nodes.setdefault(f"{self.stage} {key}", attributes)

    def edge(self, source: str, target: str, **attributes: str) -> None:
        """Add an edge, once."""
        if source != target:
            self.edges.setdefault((f"{self.stage} {source}", f"{self.stage} {target}"), attributes)


def draw(plan: Plan) -> graphviz.Digraph:
    """Return the drawing of a plan: the `dot` program is not needed for its source.

    Args:
        plan: of any model; two plans of one model give identical text.
    """
    title = f"{plan.model} on mesh {plan.mesh}: {plan.bytes():,} bytes received by each rank in one step"
    legend = ", ".join(f"{axis} {plan.bytes(axis=axis):,}" for axis in sorted({c.axis for c in plan.collectives}))
    graph = graphviz.Digraph(
        plan.model,
        graph_attr={"label": title + LINE + f"bytes by axis: {legend}", "labelloc": "t", "rankdir": "TB", "fontname": "Helvetica"},
        node_attr={"fontname": "Helvetica", "fontsize": "10", "shape": "box", "margin": "0.08,0.04"},
        edge_attr={"fontname": "Helvetica", "fontsize": "9"},
    )
    layouts = {n.name: n.meta["layout"] for n in plan.compiled.annotated.graph.nodes if isinstance(n.meta.get("layout"), Layout)}
    for stage, module in (("forward", plan.program.forward), ("backward", plan.program.backward)):
        if module is not None:
            records = {c.node: c for c in plan.collectives if c.stage == stage}
            _write(graph, _draw_stage(stage, module, records, layouts))
    return graph


def _draw_stage(stage: str, module: GraphModule, records: Mapping[str, Collective], layouts: Mapping[str, Layout]) -> Drawing:
    drawing = Drawing(stage)
    shown: dict[Node, str] = {}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        drawing.paths[node] = module_path(node.meta)
        if node.name in records:
            shown[node] = node.name
            _draw_collective(drawing, node, records[node.name], shown)
        elif _looks_at_one(node):
            shown[node] = shown.get(node.all_input_nodes[0]) or _draw_source(drawing, node.all_input_nodes[0], shown)
        else:
            shown[node] = _draw_op(drawing, node, layouts)
            _connect(drawing, node, shown, records)
        if node.meta.get("gradient"):
            key = user_name(node)
            drawing.node(key, _owner(str(node.meta["gradient"])), label=key, shape="plaintext")
            drawing.edge(shown[node], key)
    return drawing


def _looks_at_one(node: Node) -> bool:
    """Return whether a node moves and computes nothing: a view, or a collective of one operand with nothing to send."""
    if len(node.all_input_nodes) != 1:
        return False
    if is_getitem(node) or is_collective(node):
        return True
    target = cast(Any, node.target)
    returns = target._schema.returns if hasattr(target, "_schema") else ()
    return bool(returns) and all(item.alias_info is not None for item in returns)


def _draw_source(drawing: Drawing, node: Node, shown: dict[Node, str]) -> str:
    """Draw a placeholder: a parameter, an input or a saved value."""
    name = user_name(node)
    saved = "saved" in node.meta and "slot" not in node.meta
    key = f"saved {name}" if saved else name
    drawing.node(key, module_path(node.meta) or _owner(name), label=name + " (saved)" * saved, shape="plaintext")
    shown[node] = key
    return key


def _draw_op(drawing: Drawing, node: Node, layouts: Mapping[str, Layout]) -> str:
    """Draw the traced op that a node serves, once for all the nodes of its recipe, decomposition or backward formula.

    A node that serves none adds up gradients: drawn once for all that meet in a module, the one whose gradient comes last.
    """
    if "origin" not in node.meta:
        paths = [drawing.paths.get(read, "") for read in reversed(node.all_input_nodes)]
        drawing.paths[node] = next((path for path in paths if path), "")
        key = "sum of gradients in " + (".".join(_cluster_path(drawing.paths[node])[-1:]) or "the model")
        drawing.node(key, drawing.paths[node], label="sum of gradients")
        return key
    key = str(node.meta["origin"])
    layout = layouts.get(key)
    label = key + (LINE + str(layout) if layout is not None and drawing.stage == "forward" else "")
    drawing.node(key, module_path(node.meta), label=label)
    return key


def _draw_collective(drawing: Drawing, node: Node, record: Collective, shown: dict[Node, str]) -> None:
    colour = COLOURS.get(record.axis, MIXED)
    num_bytes, label = f"{record.bytes:,} B", f"{record.op} {record.axis}" + " again" * record.again
    together = len(node.all_input_nodes) > 1
    label += (LINE + num_bytes) * together
    drawing.node(record.node, module_path(node.meta), label=label, shape="ellipse", style="filled", fillcolor=colour, fontcolor="white")
    for source in node.all_input_nodes:
        key = shown.get(source) or _draw_source(drawing, source, shown)
        drawing.edge(key, record.node, color=colour, **({} if together else {"label": num_bytes}))


def _connect(drawing: Drawing, node: Node, shown: dict[Node, str], records: Mapping[str, Collective]) -> None:
    """Draw what an op reads; in the backward not what was saved and only read, which would hide what moves."""
    for source in node.all_input_nodes:
        key = shown.get(source)
        if key is None and drawing.stage == "backward":
            continue
        key = key or _draw_source(drawing, source, shown)
        record = records.get(key)
        attributes = {"color": COLOURS.get(record.axis, MIXED)} if record else {}
        returns = (f"{drawing.stage} {shown[node]}", f"{drawing.stage} {key}") in drawing.edges
        drawing.edge(key, shown[node], **attributes, **({"constraint": "false"} if returns else {}))


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _cluster_path(path: str) -> tuple[str, ...]:
    """Return the titles of the clusters of a module: its layer and the part of the layer, or the outermost module.

    >>> _cluster_path("blocks.0.attn.qkv"), _cluster_path("norm"), _cluster_path("")
    (('blocks.0', 'blocks.0.attn'), ('norm',), ())
    """
    layer = layer_of(path)
    if not layer:
        return (path.split(".")[0],) if path else ()
    part = path[len(layer) + 1 :].split(".")[0]
    return (layer, f"{layer}.{part}") if part else (layer,)


def _write(graph: graphviz.Digraph, drawing: Drawing) -> None:
    style = "solid" if drawing.stage == "forward" else "dashed"
    with cast(Any, graph).subgraph(name=f"cluster {drawing.stage}") as body:
        body.attr(label=drawing.stage, style=style, labelloc="t")
        _write_cluster(body, drawing.root, drawing.stage)
        for (source, target), attributes in drawing.edges.items():
            body.edge(source, target, **attributes, style=style)


def _write_cluster(body: Any, cluster: Cluster, name: str) -> None:
    for key, attributes in cluster.nodes.items():
        body.node(key, **attributes)
    for title, inner in cluster.inner.items():
        with body.subgraph(name=f"cluster {name} {title}") as part:
            part.attr(label=title, style="rounded", color="gray60", labelloc="t")
            _write_cluster(part, inner, f"{name} {title}")
