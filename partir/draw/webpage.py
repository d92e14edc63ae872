"""One self-contained page: the picture, drawn by Graphviz in the browser, its facts, a table, and the mesh of ranks in 3-D.

Nothing is loaded from outside: styles, scripts, data and the WebAssembly build of Graphviz stand in the page, whose own policy
forbids the rest.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from partir.draw.dot import digraph, edge_id, node_id
from partir.draw.picture import DrawnNode, Picture
from partir.draw.ranks import layout_record
from partir.draw.style import COLOURS, TINTS, byte_text
from partir.layout import Layout

if TYPE_CHECKING:
    from partir.plans import Plan

SCRIPTS = ("view.js", "cube.js", "panel.js", "table.js", "search.js", "main.js")
VIEWS = {"both": ("forward", "backward"), "forward": ("forward",), "backward": ("backward",)}


def page(plan: Plan, picture: Picture) -> str:
    """Return the page of a plan.

    Args:
        plan: the plan, for its title and mesh.
        picture: what to draw.
    """
    parts = {
        "STYLE": _text("page/page.css"),
        "SCRIPT": "\n".join(_text(f"page/{name}") for name in SCRIPTS),
        "GRAPHVIZ": _text("vendor/graphviz.js"),
        "DATA": _json(page_data(plan, picture)),
    }
    head, *rest = _text("page/page.html").split("<!-- PART ")
    text = [head]
    for piece in rest:
        name, _, after = piece.partition(" -->")
        text += [_within_script(parts[name]), after]
    return "".join(text)


def page_data(plan: Plan, picture: Picture) -> dict[str, Any]:
    """Return the data of a page: graphviz text by view, nodes by id with their facts, names with their layouts."""
    layouts: dict[Layout, int] = {}
    numbers = picture.numbers()
    identity = {key: node_id(key, numbers) for key in picture.nodes}
    nodes = {identity[key]: _node_record(node, layouts) for key, node in picture.nodes.items()}
    every = [(identity[node.key], name, layout) for node in picture.nodes.values() for name, layout in node.names.items()]
    return {
        "title": f"{plan.model} on mesh {plan.mesh}",
        "bytes": plan.bytes(),
        "mesh": {"axes": list(plan.mesh.names), "sizes": list(plan.mesh.sizes)},
        "colours": COLOURS,
        "tints": TINTS,
        "views": {view: digraph(plan, picture, stages, legend=False).source for view, stages in VIEWS.items()},
        "nodes": nodes,
        "names": [[name, node, _number(layout, layouts)] for node, name, layout in every],
        "edges": [[edge_id(edge, numbers), identity[edge.source], identity[edge.target]] for edge in picture.edges.values()],
        "layouts": [layout_record(layout, plan.mesh) for layout in layouts],
    }


def _number(layout: Layout | None, layouts: dict[Layout, int]) -> int:
    """Return a layout's number, a new one if need be; -1 for none."""
    return -1 if layout is None else layouts.setdefault(layout, len(layouts))


def _node_record(node: DrawnNode, layouts: dict[Layout, int]) -> dict[str, Any]:
    record: dict[str, Any] = {
        "key": node.key,
        "title": node.title.replace("\n", ", "),
        "stage": node.stage,
        "kind": node.kind,
        "path": node.path,
        "facts": [list(item) for item in facts_of(node).items()],
        "layout": _number(node.layout, layouts),
        "before": _number(node.before, layouts),
    }
    if node.record is not None:
        moved = {"op": node.record.op, "axis": node.record.axis, "each": node.record.bytes, "count": node.count, "bytes": node.bytes}
        record["moves"] = moved | {"reason": node.record.reason, "source": node.record.source}
    return record


def facts_of(node: DrawnNode) -> dict[str, str]:
    """Return what the panel of a page says of a node, in its order."""
    facts = {"module": node.path, "stage": node.stage}
    if len(node.layers) > 1:
        facts["layers"] = f"{len(node.layers)}: {node.layers[0]} to {node.layers[-1]}"
    if node.record is not None:
        facts |= {"collective": f"{node.record.op} along {node.record.axis}", "bytes": f"{node.record.bytes:,} received by a rank"}
        if node.count > 1:
            facts["bytes of all layers"] = f"{node.bytes:,} ({byte_text(node.bytes)})"
        facts |= {"for": node.record.reason, "line": node.record.source}
    if node.layout is not None:
        of_the_forward = " (of the forward)" if node.kind == "op" and node.stage == "backward" else ""
        facts |= {"layout": f"{node.layout}{of_the_forward}", "block": node.layout.block, "direction": node.layout.direction or ""}
    return {name: text for name, text in (facts | node.facts).items() if text}


def _json(data: dict[str, Any]) -> str:
    """Return data as JSON that no HTML parser takes for a tag or a comment."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _within_script(text: str) -> str:
    if "</script" in text.lower():
        raise AssertionError("a part of the page would end its script element early")
    return text


@cache
def _text(name: str) -> str:
    folder, _, file = name.partition("/")
    return (files("partir.draw") / folder / file).read_text(encoding="utf-8")
