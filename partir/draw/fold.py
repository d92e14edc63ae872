"""Draw repeated layers once: layers whose drawn nodes and edges differ in nothing but the numbers in their names.

    blocks.0 -> blocks.1 -> ... -> blocks.95   becomes   blocks.0, of 96 layers, with an edge onward to itself
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from partir.draw.picture import DrawnEdge, DrawnNode, Picture

Form = tuple[object, ...]


def fold(picture: Picture) -> Picture:
    """Return a picture in which layers of the same form are the one with the smallest number.

    An edge between two layers that are drawn as one leads ``onward``; an edge from a layer to the rest is drawn once for all.
    """
    labels = _labels(picture)
    folds = _folds(picture, labels)
    place = {(stage, layer): first for (stage, first), layers in folds.items() for layer in layers}
    by_label = {(node.stage, node.layer, labels[key]): node for key, node in picture.nodes.items()}
    drawn = {
        key: by_label[node.stage, place.get((node.stage, node.layer), node.layer), labels[key]] for key, node in picture.nodes.items()
    }
    merged = _merged(drawn, picture.nodes)
    result = Picture(folds=folds)
    for node in drawn.values():
        result.add(merged[node.key])
    for edge in picture.edges.values():
        result.join(_moved(edge, picture.nodes, drawn, merged))
    return result


def _moved(
    edge: DrawnEdge, nodes: Mapping[str, DrawnNode], drawn: Mapping[str, DrawnNode], merged: Mapping[str, DrawnNode]
) -> DrawnEdge:
    source, target = drawn[edge.source], drawn[edge.target]
    onward = nodes[edge.source].layer != nodes[edge.target].layer and source.layer == target.layer != ""
    return replace(edge, source=source.key, target=target.key, bytes=edge.bytes * merged[source.key].count, onward=onward)


def _merged(drawn: Mapping[str, DrawnNode], nodes: Mapping[str, DrawnNode]) -> dict[str, DrawnNode]:
    """Return each drawn node with the names and layers of all that it stands for."""
    together: dict[str, list[DrawnNode]] = {}
    for key, node in drawn.items():
        together.setdefault(node.key, []).append(nodes[key])
    merged: dict[str, DrawnNode] = {}
    for key, group in together.items():
        names = {name: layout for node in [nodes[key], *group] for name, layout in node.names.items()}
        layers = tuple(sorted({node.layer for node in group if node.layer}, key=_by_number))
        merged[key] = replace(nodes[key], names=names, layers=layers)
    return merged


def _folds(picture: Picture, labels: Mapping[str, str]) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return the layers of one form, two or more, by their stage and the first of them."""
    alike: dict[Form, list[str]] = {}
    for (stage, layer), form in _forms(picture, labels).items():
        alike.setdefault((stage, layer.rpartition(".")[0], form), []).append(layer)
    groups = ((str(form[0]), tuple(sorted(layers, key=_by_number))) for form, layers in alike.items())
    return {(stage, layers[0]): layers for stage, layers in groups if len(layers) > 1}


def _forms(picture: Picture, labels: Mapping[str, str]) -> dict[tuple[str, str], Form]:
    """Return what tells one layer from another: its nodes and the edges within it, in an order that no number decides."""
    nodes: dict[tuple[str, str], list[Form]] = {}
    edges: dict[tuple[str, str], list[Form]] = {}
    for key, node in picture.nodes.items():
        if node.layer:
            moved = (node.record.op, node.record.axis, node.record.bytes, node.record.again) if node.record else ()
            text = (str(node.layout), str(node.before), node.facts.get("state", ""))
            nodes.setdefault((node.stage, node.layer), []).append((labels[key], node.kind, moved, text))
    for edge in picture.edges.values():
        source, target = picture.nodes[edge.source], picture.nodes[edge.target]
        if source.layer and source.layer == target.layer:
            edges.setdefault((source.stage, source.layer), []).append((labels[edge.source], labels[edge.target]))
    return {place: (_sorted(found), _sorted(edges.get(place, []))) for place, found in nodes.items()}


def _labels(picture: Picture) -> dict[str, str]:
    """Return a name for each node that a node like it has in every layer of its form: path and title, and which of these."""
    seen: dict[tuple[str, str, str], int] = {}
    labels: dict[str, str] = {}
    for key, node in picture.nodes.items():
        path = node.path[len(node.layer) :]
        title = re.sub(r"_\d+\b", "", node.title.replace(node.layer, "*") if node.layer else node.title)
        label = f"{node.kind} {path} {title}" if node.layer else key
        number = seen[node.stage, node.layer, label] = seen.get((node.stage, node.layer, label), -1) + 1
        labels[key] = f"{label} {number}"
    return labels


def _sorted(forms: Iterable[Form]) -> Form:
    return tuple(sorted(forms, key=repr))


def _by_number(layer: str) -> tuple[str, int]:
    listed, _, number = layer.rpartition(".")
    return listed, int(number)
