"""Let an output that leaves as blocks keep the pads that a DTensor can say: no rank gathers logits that nobody may read.

Before:  output = unpad_dim(%logits, dim=2, size=50257)        %logits: f32[8@x, 128@z, 50260@y]
After:   output = %logits                                      the runtime cuts the last block

A DTensor splits 50257 over 4 ranks into blocks of 12565 and a shorter last one, which is what cutting the pad leaves where one
axis splits the dim and the pad is no longer than that needs.

Requires: annotate_layouts. Idempotent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from partir.dims import Dim
from partir.graph import layout_of, outputs_of
from partir.mesh import Mesh

UNPAD: Any = torch.ops.partir_local.unpad_dim.default


def leave_padded(graph_module: GraphModule, mesh: Mesh, sharded: Sequence[bool]) -> GraphModule:
    """Return the graph with padded outputs.

    Args:
        sharded: for each output, whether it leaves as blocks.
    """
    values = [_padded(value, mesh) if blocks else value for value, blocks in zip(outputs_of(graph_module), sharded, strict=True)]
    graph_module.graph.output_node().args = (tuple(values),)
    graph_module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return graph_module


def _padded(value: Any, mesh: Mesh) -> Any:
    while isinstance(value, Node) and value.target is UNPAD:
        source, dim, size = cast("tuple[Node, int, int]", value.args)
        if not _is_chunked(layout_of(source).strip(mesh).dims[dim], size, mesh):
            return value
        value = source
    return value


def _is_chunked(dim: Dim, size: int, mesh: Mesh) -> bool:
    """Return whether torch.chunk of ``size`` elements makes these blocks, but for the pad of the last ones."""
    return len(dim.parts) == 1 and len(dim.all_axes) == 1 and dim.local_size(mesh) == -(-size // mesh[dim.all_axes[0]])
