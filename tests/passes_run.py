"""Run the compiler's passes one by one and keep what each was given and returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import nn
from torch.fx import GraphModule

from partir.passes import pipeline
from partir.passes.run_passes import Run, copy_graph
from tests.compiled import compile_model


@dataclass(frozen=True, eq=False)
class PassRun:
    """One pass of one compilation.

    Args:
        name: of the pass.
        before: the graph that it was given; the pass itself got a copy.
        after: what it returned.
        work: the pass with its options bound.
        check: the stage at which the pipeline verifies the result, or None.
    """

    name: str
    before: GraphModule
    after: GraphModule
    work: Callable[[GraphModule], GraphModule]
    check: str | None

    def again(self, graph: GraphModule) -> GraphModule:
        """Run the pass once more, on a copy."""
        return self.work(copy_graph(graph))


class _Enough(Exception):
    """All passes before differentiation have run."""


def run_passes(model: nn.Module, args: Sequence[Any], sizes: Sequence[int], **options: Any) -> dict[str, PassRun]:
    """Compile as far as differentiation; return every pass by name, in order."""
    runs: dict[str, PassRun] = {}
    original = Run.pass_

    def record(self: Any, name: str, graph: GraphModule, work: Any, check: str | None = None, kept: bool = False) -> GraphModule:
        after = original(self, name, graph, work, check, kept=True)  # what a pass was given is looked at afterwards
        runs[name] = PassRun(name, graph, after, work, check)
        return after

    def stop(*args: Any) -> None:
        raise _Enough

    with mock.patch.object(Run, "pass_", record), mock.patch.object(pipeline, "join", stop):
        try:
            compile_model(model, args, sizes, **options)
        except _Enough:
            pass
    return runs
