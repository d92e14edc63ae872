"""Run passes one after the other: each gets a graph of its own, what it returns is verified, timed and, where asked, printed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch.fx import Graph, GraphModule, Node

from partir.checks import verify_graph
from partir.graph import Unprinted
from partir.mesh import Mesh
from partir.printer import graph_text


class Run:
    """One compilation.

    Args:
        mesh: the ranks.
        timings: seconds by the name of a pass; more are added.
        check: verify what passes return and keep texts; without it the graph is to be costed, not run.
    """

    def __init__(self, mesh: Mesh, timings: dict[str, float], check: bool = True) -> None:
        self.mesh = mesh
        self.timings = timings
        self.check = check
        self.texts: dict[str, str] = {}

    def text(self, stage: str, graph: GraphModule, names: Mapping[str, str] | None = None) -> None:
        """Keep the text of a graph, where it is to be run."""
        if self.check:
            self.texts[stage] = graph_text(graph, names or {})

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        """Do some work and note its seconds."""
        start = time.perf_counter()
        result = work()
        self.timings[name] = time.perf_counter() - start
        return result

    def pass_(
        self, name: str, graph: GraphModule, work: Callable[[GraphModule], GraphModule], check: str | None = None, kept: bool = False
    ) -> GraphModule:
        """Run a pass.

        Args:
            graph: that the pass may write into, for nobody reads it afterwards.
            kept: somebody does: the pass gets a copy.
            check: the stage as which `verify_graph` checks the result; None: not checked.

        Raises:
            VerifyError: the result breaks a law of its stage.
        """
        result = cast(GraphModule, self.time(name, lambda: work(copy_graph(graph) if kept else graph)))
        if check is not None and self.check:
            self.time(f"verify {name}", lambda: verify_graph(result, self.mesh, check))
        return result


def copy_graph(graph_module: GraphModule) -> GraphModule:
    """Return a copy whose nodes have their own ``meta`` (values shared: layouts are frozen)."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in graph_module.graph.nodes:
        copies[node] = graph.node_copy(node, lambda old: copies[old])
        copies[node].meta = dict(node.meta)
    return Unprinted({}, graph)
