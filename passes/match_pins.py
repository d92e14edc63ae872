"""Match the user's pins, name pattern -> layout text, with the parameters, inputs and values of a graph."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch.fx import GraphModule

from partir.errors import LayoutError
from partir.layout import Layout, dtype_name
from partir.mesh import Mesh


def match_pins(pins: Mapping[str, str], graph_module: GraphModule, names: Mapping[str, str], mesh: Mesh) -> dict[str, Layout]:
    """Return the pinned layout of each node, by the node's name; of several pins that match a name the last counts.

    Args:
        pins: ``{"blocks.*.fc1.weight": "f[out@y.x, in@z]"}``; patterns as in ``fnmatch``; sizes may be names.
        names: the user's name of each placeholder.
        mesh: its axes must divide the sizes that they split.

    Raises:
        LayoutError: a text that is no layout at rest of the tensor, or a pattern that matches nothing.
    """
    found: dict[str, Layout] = {}
    for pattern, text in pins.items():
        matched = False
        for node in graph_module.graph.nodes:
            value = node.meta.get("val")
            name = names.get(node.name, node.name)
            if node.op == "output" or not isinstance(value, torch.Tensor) or not fnmatchcase(name, pattern):
                continue
            matched = True
            try:
                found[node.name] = _layout_at_rest(text, value, mesh)
            except LayoutError as error:
                raise LayoutError(f"pin {pattern!r} on {name}: {error}") from error
        if not matched:
            tensors = [node for node in graph_module.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
            known = [names.get(node.name, node.name) for node in tensors]
            close = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3)
            raise LayoutError(f"pin {pattern!r} matches no parameter, input or value. Closest: {', '.join(close) or 'none'}.")
    return found


def _layout_at_rest(text: str, value: torch.Tensor, mesh: Mesh) -> Layout:
    """Return the layout that a pin means: how dims are split; everything else follows from that."""
    name = dtype_name(value.dtype)
    layout = Layout.parse(text, shape=tuple(value.shape), dtype=name)
    if layout.dtype != name:
        raise LayoutError(f"layout text {text!r} has dtype {layout.dtype}, the tensor's is {name}. A pin does not convert; write f[...].")
    if layout.pending or layout.varied or layout.owner:
        raise LayoutError(f"layout text {text!r} says more than how dims are split; a pin is a layout at rest, without +, max, ~ or on.")
    layout.local_shape(mesh)
    return layout


def check_pins(graph_module: GraphModule, pinned: Mapping[str, Layout], mesh: Mesh) -> None:
    """Check that every pinned node rests where it was pinned.

    Raises:
        LayoutError: a value whose layout follows from another's and cannot be chosen.
    """
    for node in graph_module.graph.nodes:
        layout = node.meta.get("layout")
        wanted = pinned.get(node.name)
        if wanted is None or (isinstance(layout, Layout) and layout.strip(mesh).dims == wanted.strip(mesh).dims):
            continue
        raise LayoutError(f"pin on {node.name}: {wanted} cannot be kept, its layout follows from its operands': {layout}. Pin those.")
