"""Draw what enters or leaves side by side as one node: the vectors of a bucket, the gradients that leave it.

    norm1.weight, norm1.bias, fc1.bias -> (all_gather_bucket)   becomes   [norm1.weight ...] -> (all_gather_bucket)
"""

from __future__ import annotations

from dataclasses import replace

from partir.draw.picture import DrawnNode, Picture

LEAVES = ("value", "saved", "gradient")
LISTED = 3  # names that a node of several shows


def bundle(picture: Picture) -> Picture:
    """Return a picture in which the leaves of a kind and a layer that have the same one neighbour are one node."""
    joined: dict[str, DrawnNode] = {}
    for (kind, layer, neighbour), group in _groups(picture).items():
        if len(group) > 1:
            one = _as_one(group, kind, layer, picture.nodes[neighbour])
            joined.update({node.key: one for node in group})
    result = Picture()
    for node in picture.nodes.values():
        result.add(joined.get(node.key, node))
    for edge in picture.edges.values():
        source, target = joined.get(edge.source), joined.get(edge.target)
        result.join(replace(edge, source=source.key if source else edge.source, target=target.key if target else edge.target))
    return result


def _groups(picture: Picture) -> dict[tuple[str, str, str], list[DrawnNode]]:
    neighbours: dict[str, list[str]] = {}
    for edge in picture.edges.values():
        neighbours.setdefault(edge.source, []).append(edge.target)
        neighbours.setdefault(edge.target, []).append(edge.source)
    groups: dict[tuple[str, str, str], list[DrawnNode]] = {}
    for node in picture.nodes.values():
        ends = neighbours.get(node.key, [])
        if node.kind in LEAVES and len(ends) == 1:
            groups.setdefault((node.kind, node.layer, ends[0]), []).append(node)
    return groups


def _as_one(group: list[DrawnNode], kind: str, layer: str, neighbour: DrawnNode) -> DrawnNode:
    names = {name: layout for node in group for name, layout in node.names.items()}
    inner = f"{layer}." if layer else ""
    titles = [name.removeprefix("d_").removeprefix(inner) for name in names]
    more = f"\nand {len(titles) - LISTED} more" if len(titles) > LISTED else ""
    title = "d " * (kind == "gradient") + "\n".join(titles[:LISTED]) + more
    path = neighbour.path if neighbour.layer == layer else layer
    return replace(group[0], path=path, title=title, names=names, layout=None, facts={"stands for": ", ".join(names)})
