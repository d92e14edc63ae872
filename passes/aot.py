"""Derive the joint graph of a lowered graph; the one place that calls torch's private parts of AOTAutograd.

A lowered graph is functional already: `compose_joint` puts the joint graph together from the formulas of its calls. Where a backward
formula of torch writes in place, AOTAutograd derives the whole, and makes it functional.

``tests/test_differentiate.py::test_aot_contract`` notices when torch changes what is relied on here; both ways give

- placeholders called ``primals_1 ...`` then ``tangents_1 ...``, one tangent for each output that
  requires grad, and as results the outputs, then one gradient (or None) for each argument;
- in every node's ``meta["custom"]`` the lowered node that it serves, in the backward as well;
- ``meta["partitioner_tag"]``, which tells forward from backward;
- the forward alone, whatever was asked, where no output requires grad.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

import torch
import torch._functorch.config
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx import traceback as fx_traceback

from partir.errors import PartirError, VerifyError, source_line
from partir.passes.call_formulas import Formula, Unwritten
from partir.passes.compose_joint import BACKWARD, ORIGIN, compose_joint

CHECK = torch.ops.aten._linalg_check_errors.default  # raises where a matrix is singular, and returns nothing
torch.fx.has_side_effect(CHECK)


@dataclass(eq=False)
class Formulas:
    """Formulas that were written, by all that they depend on.

    Args:
        mode: that their fake tensors belong to.
        known: the formulas.
    """

    mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    known: dict[Hashable, Formula] = field(default_factory=dict[Hashable, Formula])


_shared: ContextVar[Formulas | None] = ContextVar("partir_formulas", default=None)


@contextlib.contextmanager
def shared_formulas() -> Generator[None]:
    """Keep formulas from one compilation to the next: those of one model for many meshes have most in common."""
    token = _shared.set(Formulas())
    try:
        yield
    finally:
        _shared.reset(token)


def present_formulas() -> Formulas:
    """Return the formulas that are shared, or new ones."""
    return _shared.get() or Formulas()


class _Tracer(Interpreter):
    """Runs a graph so that every node traced from it carries the name of its origin."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=True)

    def run_node(self, n: Node) -> Any:
        n.meta["custom"] = {ORIGIN: n.name}
        try:
            return super().run_node(n)
        except PartirError:
            raise
        except Exception as error:
            raise VerifyError(
                f"{source_line(n.meta)}: %{n.name} ({n.target}) does not run on local blocks: {error}"
            ) from error


def export_joint(
    module: GraphModule, arguments: Sequence[torch.Tensor], training: bool, wanted: Sequence[bool], formulas: dict[Hashable, Formula]
) -> tuple[GraphModule, tuple[bool, ...]]:
    """Trace ``module`` to ATen, with its backward when ``training``.

    Args:
        module: a graph whose placeholders and flat results are tensors. Its nodes' ``meta["custom"]`` is overwritten.
        arguments: fake tensors, ``requires_grad`` where a gradient is wanted.
        training: whether to derive the backward.
        wanted: for each output, whether its tangent may be asked for; the others are detached.
        formulas: of calls that are known in the mode of the arguments; new ones are added.

    Returns:
        the joint (or forward) graph, each of whose outputs is a copy, and for each output whether it takes a tangent.
    """
    requires_grad: list[bool] = []

    def flat(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with fx_traceback.preserve_node_meta():
            results = cast("tuple[torch.Tensor, ...]", _Tracer(module).run(*inputs))
        results = tuple(result if keep else result.detach() for result, keep in zip(results, wanted, strict=True))
        requires_grad[:] = [result.requires_grad for result in results]
        return tuple(result.clone(memory_format=torch.contiguous_format) for result in results)

    with contextlib.suppress(Unwritten):
        return compose_joint(module, arguments, wanted, training, formulas)
    export = cast("Callable[..., GraphModule]", aot_export_joint_simple)
    patch = cast("Callable[..., AbstractContextManager[None]]", torch._functorch.config.patch)  # pyright: ignore
    with patch(debug_assert=False), _without_tokens(), torch.enable_grad():
        joint = export(flat, tuple(arguments), trace_joint=training)
    takes = tuple(training and needs for needs in requires_grad)
    tangents = [node for node in joint.graph.find_nodes(op="placeholder") if str(node.target).startswith("tangents")]
    if len(tangents) != sum(takes):
        count = sum(takes)
        raise VerifyError(f"torch derives a backward of {len(tangents)} tangents, but {count} outputs have a gradient: it cannot be used.")
    return joint, takes


def _without_tokens() -> AbstractContextManager[Any]:
    """Keep AOTAutograd from giving a check a token, one more argument and result, to hold it in place: the partition does."""
    holder: Any = cast(Any, torch)._library.simple_registry.singleton.find(CHECK.name()).effect
    return mock.patch.object(holder, "_effect", None)


def fake_arguments(
    values: Sequence[torch.Tensor], requires_grad: Sequence[bool], mode: FakeTensorMode
) -> list[torch.Tensor]:
    """Return contiguous fakes like ``values`` in a FakeTensorMode."""
    with mode:
        return [
            torch.empty(tuple(value.shape), dtype=value.dtype, device=value.device, requires_grad=needs)
            for value, needs in zip(values, requires_grad, strict=True)
        ]


def origin(node: Node) -> str | None:
    """Return the name of the node of the traced graph that made ``node``, in the forward or the backward."""
    custom = cast("dict[str, Any]", node.meta.get("custom") or {})
    return custom.get(ORIGIN)


def is_check(node: Node) -> bool:
    """Return whether a node of a joint graph is a check that one device makes in its forward; nothing reads its result."""
    return node.target is CHECK and not is_backward(node)


def is_backward(node: Node) -> bool:
    """Return whether a node of a joint graph was made by a backward formula."""
    return node.meta.get("partitioner_tag") == BACKWARD
