"""Match the user's pins, name pattern -> layout text, with the parameters, inputs and values of a graph."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch.fx import GraphModule

from partir.errors import LayoutError
from partir.layout import Layout, dtype_name


def match_pins(pins: Mapping[str, str], graph_module: GraphModule, names: Mapping[str, str]) -> dict[str, Layout]:
    """Return the pinned layout of each node, by the node's name.

    Args:
        pins: ``{"blocks.*.fc1.weight": "f[out@y.x, in@z]"}``; patterns as in ``fnmatch``; sizes may be names.
        names: the user's name of each placeholder.

    Raises:
        LayoutError: a text that is no layout of the tensor, or a pattern that matches nothing.
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
                found[node.name] = Layout.parse(text, shape=tuple(value.shape), dtype=dtype_name(value.dtype))
            except LayoutError as error:
                raise LayoutError(f"pin {pattern!r} on {name}: {error}") from error
        if not matched:
            known = [*names.values(), *(node.name for node in graph_module.graph.nodes)]
            close = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3)
            raise LayoutError(f"pin {pattern!r} matches no parameter, input or value. Closest: {', '.join(close) or 'none'}.")
    return found
