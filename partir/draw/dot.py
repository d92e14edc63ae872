"""A picture as graphviz text: one cluster a module, collectives as wide as their bytes, the costliest numbered, a legend on top."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any, cast

import graphviz  # pyright: ignore[reportMissingTypeStubs]

from partir.draw.picture import DrawnEdge, DrawnNode, Picture, cluster_path
from partir.draw.style import COLOURS, COSTLIEST, PLAIN, TINTS, breadth, byte_text, colour, width

if TYPE_CHECKING:
    from partir.plans import Plan

FONT = "Helvetica"
LARGE = 26  # points, to be read where the whole picture is in sight
STAGES = ("forward", "backward")
SPAN = "all columns"  # stands in the legend until their number is known
FOLDED = {"style": "rounded,filled", "fillcolor": "#fafafa", "color": "gray25", "penwidth": "2.5", "fontsize": "16"}
MODULE = {"style": "rounded", "color": "gray60", "fontsize": "12"}


def digraph(plan: Plan, picture: Picture, stages: Sequence[str] = STAGES, legend: bool = True) -> graphviz.Digraph:
    """Return a picture as a graph; two of the same plan have identical text.

    Args:
        plan: the plan that the picture shows, for the legend.
        picture: what to draw; the widths are those of the whole.
        stages: the stages to draw.
        legend: put a title and a legend on top.
    """
    graph_attr = {"rankdir": "TB", "fontname": FONT, "nodesep": "0.16", "ranksep": "0.32", "newrank": "true"}
    graph = graphviz.Digraph(
        plan.model,
        graph_attr=graph_attr | ({"label": _legend(plan, picture), "labelloc": "t"} if legend else {}),
        node_attr={"fontname": FONT, "fontsize": "11", "shape": "box", "margin": "0.08,0.04", "height": "0.25"},
        edge_attr={"fontname": FONT, "fontsize": "10", "arrowsize": "0.6"},
    )
    ranking, most = picture.ranking(), max((node.bytes for node in picture.collectives()), default=0)
    numbers = picture.numbers()
    for stage in stages:
        part = picture.stage(stage)
        if part.nodes:
            with cast(Any, graph).subgraph(name=f"cluster {stage}") as body:
                body.attr(label=stage, style="solid" if stage == "forward" else "dashed", labelloc="t", fontsize="20")
                _write_clusters(body, part, {key: _attributes(node, numbers, ranking, most) for key, node in part.nodes.items()})
                for edge in part.edges.values():
                    _write_edge(body, edge, numbers, _edge_attributes(edge, stage, most))
    return graph


def _write_clusters(body: Any, picture: Picture, attributes: dict[str, dict[str, str]]) -> None:
    """Write each node in the cluster of its module, and these in the order in which they begin."""
    inside: dict[tuple[str, ...], list[DrawnNode]] = {}
    for node in picture.nodes.values():
        path = cluster_path(node.path)
        for depth in range(len(path) + 1):
            inside.setdefault(path[:depth], [])
        inside[path].append(node)
    _write_cluster(body, (), inside, picture, attributes)


def _write_cluster(
    body: Any,
    path: tuple[str, ...],
    inside: dict[tuple[str, ...], list[DrawnNode]],
    picture: Picture,
    attributes: dict[str, dict[str, str]],
) -> None:
    for node in inside[path]:
        body.node(node.key, **attributes[node.key])
    for inner in [other for other in inside if other[:-1] == path and other]:
        stage = next(iter(picture.nodes.values())).stage
        with body.subgraph(name=f"cluster {stage} {' '.join(inner)}") as part:
            layers = picture.folds.get((stage, inner[-1]), ())
            part.attr(label=fold_title(layers) if layers else inner[-1], labelloc="t", **(FOLDED if layers else MODULE))
            _write_cluster(part, inner, inside, picture, attributes)


def fold_title(layers: tuple[str, ...]) -> str:
    """Return the title of layers that are drawn as one.

    >>> fold_title(("blocks.0", "blocks.1", "blocks.2")), fold_title(("blocks.1", "blocks.3"))
    ('blocks.0 ... blocks.2   x 3', 'blocks.1, blocks.3   x 2')
    """
    numbers, count = [int(layer.rpartition(".")[2]) for layer in layers], len(layers)
    together = count > 2 and numbers == list(range(min(numbers), max(numbers) + 1))
    named = f"{layers[0]} ... {layers[-1]}" if together or count > 4 else ", ".join(layers)
    return f"{named}   x {count}"


def _attributes(node: DrawnNode, numbers: dict[str, int], ranking: dict[str, int], most: int) -> dict[str, str]:
    identity = {"id": node_id(node.key, numbers)}
    if node.record is not None:
        return identity | _collective_attributes(node, ranking[node.key], most)
    if node.kind == "op":
        return identity | _op_attributes(node)
    return identity | {"label": _text(node.title), "shape": "plaintext", "tooltip": _tooltip(node), "fontcolor": "gray30"}


def _op_attributes(node: DrawnNode) -> dict[str, str]:
    layout = f"\n{node.layout}" if node.stage == "forward" and node.layout else ""
    label = {"label": _text(node.title + layout), "tooltip": _tooltip(node)}
    return label | {"style": "filled", "fillcolor": TINTS.get(state(node), PLAIN)}


def _tooltip(node: DrawnNode) -> str:
    return _text(next(iter(node.names), node.title))


def state(node: DrawnNode) -> str:
    """Return the state, y or z, in which an op leaves its result, or ``""``."""
    direction = node.layout.direction if node.layout else None
    return direction if direction in TINTS else ""


def _collective_attributes(node: DrawnNode, place: int, most: int) -> dict[str, str]:
    assert node.record is not None
    each = f"{byte_text(node.record.bytes)}" + (f" x {node.count}" if node.count > 1 else "")
    attributes = {
        "label": _text(f"{node.title}\n{each}"),
        "shape": "ellipse",
        "style": "filled",
        "fillcolor": colour(node.record.axis),
        "color": colour(node.record.axis).split(":")[0],
        "fontcolor": "white",
        "width": str(breadth(node.bytes, most)),
        "tooltip": _text(f"{node.record.reason}: {node.bytes:,} bytes"),
    }
    if place > COSTLIEST:
        return attributes
    marked = {"label": _text(f"#{place}  {node.title}\n{each}"), "fontname": f"{FONT}-Bold", "fontsize": str(LARGE)}
    return attributes | marked | {"color": "black", "penwidth": "4", "peripheries": "2" if place == 1 else "1"}


def _write_edge(body: Any, edge: DrawnEdge, numbers: dict[str, int], attributes: dict[str, str]) -> None:
    """Write an edge; one to what ran before is written the other way round, so that what runs later always stands below."""
    identity = edge_id(edge, numbers)
    if numbers[edge.target] < numbers[edge.source]:
        body.edge(edge.target, edge.source, id=identity, dir="back", **attributes)
    else:
        body.edge(edge.source, edge.target, id=identity, **attributes)


def node_id(key: str, numbers: dict[str, int]) -> str:
    """Return the name of a node in a rendered picture."""
    return f"n{numbers[key]}"


def edge_id(edge: DrawnEdge, numbers: dict[str, int]) -> str:
    """Return the name of an edge in a rendered picture."""
    return f"e{numbers[edge.source]}-{numbers[edge.target]}" + "-onward" * edge.onward


def _edge_attributes(edge: DrawnEdge, stage: str, most: int) -> dict[str, str]:
    style = "solid" if stage == "forward" else "dashed"
    attributes = {"style": "dotted" if edge.onward else style}
    attributes |= {"color": colour(edge.axis), "penwidth": str(width(edge.bytes, most))} if edge.axis else {"color": "gray35"}
    if edge.onward:
        attributes |= {"label": "next layer", "fontcolor": "gray25"}
    return attributes


def _text(text: str) -> str:
    return graphviz.escape(text).replace("\n", r"\n")


def _legend(plan: Plan, picture: Picture) -> str:
    axes = [name for name in COLOURS if any(name in record.axis.split(".") for record in plan.collectives)]
    cells = [_cell(f"along {name}", COLOURS[name], "white") for name in axes]
    cells += [_cell(f"result in state {name}", tint, "black") for name, tint in TINTS.items()]
    title = f"{escape(plan.model)} on mesh {escape(str(plan.mesh))}: {plan.bytes():,} bytes received by each rank in one step"
    rows = [_row(f"<B>{title}</B>", 36), f"<TR>{''.join(cells)}</TR>" if cells else ""]
    rows.append(_row("as wide as its bytes, all its layers together; solid forward, dashed backward", 22))
    rows += [_row(line, 26) for line in _costliest(picture)]
    return f'<<TABLE BORDER="0" CELLSPACING="4">{"".join(rows).replace(SPAN, str(max(len(cells), 1)))}</TABLE>>'


def _costliest(picture: Picture) -> list[str]:
    lines: list[str] = []
    for node in sorted(picture.collectives(), key=lambda node: -node.bytes)[:COSTLIEST]:
        assert node.record is not None
        times = f" = {byte_text(node.record.bytes)} x {node.count}" if node.count > 1 else ""
        place = f" in {node.path}" if node.path else ""
        what = f"{node.stage} {node.title}{place}: {node.record.reason}"
        lines.append(f"<B>#{len(lines) + 1}</B>  {byte_text(node.bytes)}{times}  {escape(what)}")
    return lines


def _cell(text: str, fill: str, ink: str) -> str:
    return f'<TD BGCOLOR="{fill}"><FONT COLOR="{ink}" POINT-SIZE="24"> {text} </FONT></TD>'


def _row(text: str, size: int) -> str:
    return f'<TR><TD COLSPAN="{SPAN}" ALIGN="LEFT"><FONT POINT-SIZE="{size}">{text}</FONT></TD></TR>'
