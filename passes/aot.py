"""The one place that calls torch's private parts of AOTAutograd.

A lowered graph is functional already, so one trace of its forward and of ``torch.autograd.grad`` gives the joint graph: AOTAutograd
traces twice. Where a backward formula of torch writes in place, AOTAutograd does it, and makes it functional.

``tests/test_differentiate.py::test_aot_contract`` notices when torch changes what is relied on here:

- placeholders of the joint graph are ``primals_1 ...`` then ``tangents_1 ...``, one tangent for each output that
  requires grad, and its results are the outputs, then one gradient (or None) for each argument;
- every node keeps ``meta["custom"]`` of the node that an ``fx.Interpreter`` was running, in the backward as well;
- ``meta["partitioner_tag"]`` tells forward from backward;
- where no output requires grad it returns the forward alone, whatever was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast
from unittest import mock

import torch
import torch._functorch.config
from torch._functorch._aot_autograd.graph_capture_wrappers import set_partitioner_tag_is_backward
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._functorch._aot_autograd.utils import copy_fwd_metadata_to_bw_nodes
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

from partir.errors import PartirError, VerifyError, source_line

ORIGIN = "partir"
CHECK = torch.ops.aten._linalg_check_errors.default  # raises where a matrix is singular, and returns nothing
torch.fx.has_side_effect(CHECK)


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
    module: GraphModule, arguments: Sequence[torch.Tensor], training: bool, wanted: Sequence[bool]
) -> tuple[GraphModule, tuple[bool, ...]]:
    """Trace ``module`` to ATen, with its backward when ``training``.

    Args:
        module: a graph whose placeholders and flat results are tensors. Its nodes' ``meta["custom"]`` is overwritten.
        arguments: fake tensors, ``requires_grad`` where a gradient is wanted.
        training: whether to derive the backward.
        wanted: for each output, whether its tangent may be asked for; the others are detached.

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

    if training and any(wanted):
        joint = _trace_once(module, flat, arguments, wanted)
        if joint is not None:
            return joint, tuple(requires_grad)
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


def _trace_once(
    module: GraphModule, flat: Callable[..., tuple[torch.Tensor, ...]], arguments: Sequence[torch.Tensor], wanted: Sequence[bool]
) -> GraphModule | None:
    """Trace forward and backward in one go; None where nothing has a gradient, or a formula writes in place."""
    results = cast("Sequence[Node]", module.graph.output_node().args[0])
    values = [cast(torch.Tensor, result.meta["val"]) for result, keep in zip(results, wanted, strict=True) if keep]
    tangents = [torch.empty(tuple(value.shape), dtype=value.dtype, device=value.device) for value in values]
    takes: list[bool] = []

    def joint(primals: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        outputs = flat(*primals)
        candidates = [output for output, keep in zip(outputs, wanted, strict=True) if keep]
        for output, value in zip(candidates, values):
            if output.shape != value.shape:
                raise VerifyError(f"an output has local shape {list(output.shape)}, its layout says {list(value.shape)}.")
        takes[:] = [output.requires_grad for output in candidates]
        needed = [output for output, take in zip(candidates, takes) if take]
        given = [tangent for tangent, take in zip(tangents, takes) if take]
        asked = [primal for primal in primals if primal.requires_grad]
        if not needed:
            return (*outputs, *(None for _ in primals))
        setup_stacktrace_preservation_hooks([cast(Any, output).grad_fn for output in needed])
        with fx_traceback.preserve_node_meta(), set_partitioner_tag_is_backward():
            gradients = iter(torch.autograd.grad(needed, asked, given, allow_unused=True))
        return (*outputs, *(next(gradients) if primal.requires_grad else None for primal in primals))

    with torch.enable_grad():
        traced = make_fx(joint)(list(arguments), tangents)
    if not any(takes) or any(_writes(node) for node in traced.graph.nodes):
        return None
    copy_fwd_metadata_to_bw_nodes(traced)
    _name_placeholders(traced, len(arguments), takes)
    return traced


def _without_tokens() -> AbstractContextManager[Any]:
    """Keep AOTAutograd from giving a check a token, one more argument and result, to hold it in place: the partition does."""
    holder: Any = cast(Any, torch)._library.simple_registry.singleton.find(CHECK.name()).effect
    return mock.patch.object(holder, "_effect", None)


def _writes(node: Node) -> bool:
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def _name_placeholders(joint: GraphModule, num_primals: int, takes: Sequence[bool]) -> None:
    """Name them as AOTAutograd does, and drop the tangents of outputs that have no gradient."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    kept = 0
    for index, node in enumerate(placeholders):
        if index < num_primals:
            name = f"primals_{index + 1}"
        elif takes[index - num_primals]:
            kept += 1
            name = f"tangents_{kept}"
        else:
            joint.graph.erase_node(node)
            continue
        node.target = name
        node._rename(name)  # pyright: ignore[reportPrivateUsage]
    output = joint.graph.output_node()
    output.args = (list(cast("Sequence[Any]", output.args[0])),)


def fake_arguments(
    values: Sequence[torch.Tensor], requires_grad: Sequence[bool]
) -> tuple[FakeTensorMode, list[torch.Tensor]]:
    """Return contiguous fakes like ``values`` in a fresh FakeTensorMode."""
    mode = FakeTensorMode()
    with mode:
        fakes = [
            torch.empty(tuple(value.shape), dtype=value.dtype, device=value.device, requires_grad=needs)
            for value, needs in zip(values, requires_grad, strict=True)
        ]
    return mode, fakes


def origin(node: Node) -> str | None:
    """Return the name of the node of the traced graph that made ``node``, in the forward or the backward."""
    custom = cast("dict[str, Any]", node.meta.get("custom") or {})
    return custom.get(ORIGIN)


def is_check(node: Node) -> bool:
    """Return whether a node of a joint graph is a check that one device makes in its forward; nothing reads its result."""
    return node.target is CHECK and not is_backward(node)


def is_backward(node: Node) -> bool:
    """Return whether a node of a joint graph was made by a backward formula."""
    return node.meta.get("partitioner_tag") == "is_backward"
