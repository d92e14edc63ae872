"""Capture a user's `torch.autograd.Function` as one op of the graph, whose backward is the user's.

    Before: y = GeLUFunction.apply(x), whose backward `torch.export` drops
    After:  %y = partir_function.GeLUFunction_1(%x), which differentiation takes apart: its forward, and its own backward

An elementwise function is split as any elementwise op is; every rank gives any other one whole operands. It counts as
elementwise where forward and backward, traced at two sizes, are the same elementwise ops with the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import _SingleLevelFunction  # pyright: ignore[reportPrivateUsage]
from torch.fx.experimental.proxy_tensor import make_fx

from partir import rules
from partir.passes.torch_ops import overload
from partir.passes.user_lines import fail

_NAMESPACE = "partir_function"
# Elementwise, but not tagged so by torch.
_ALSO = frozenset(f"aten.{name}.default" for name in ("detach", "alias", "clone", "_to_copy", "ones_like", "zeros_like", "full_like"))


@dataclass(frozen=True)
class Given:
    """What an op is made for: equal ones share an op.

    Attributes:
        function: the user's class.
        rest: for each argument None where it is a tensor, else its type and value.
        shapes, dtypes, grads: of the tensors.
    """

    function: Any
    rest: tuple[tuple[type, Any] | None, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    grads: tuple[bool, ...]

    def run(self, *tensors: Tensor) -> Any:
        """Call the function as its class does, also while `capture` has replaced ``apply``."""
        left = iter(tensors)
        args = [next(left) if part is None else part[1] for part in self.rest]
        return cast(Any, super(_SingleLevelFunction, self.function)).apply(*args)


def call_as_op(function: Any, args: Sequence[Any]) -> Any:
    """Call ``function.apply(*args)`` as one op.

    Raises:
        TraceError: it writes into its arguments, has results that are no tensors, or arguments that are no plain values.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    given = Given(
        function,
        tuple(None if isinstance(arg, Tensor) else (type(cast(object, arg)), arg) for arg in args),
        tuple(tuple(t.shape) for t in tensors),
        tuple(t.dtype for t in tensors),
        tuple(t.requires_grad and torch.is_grad_enabled() for t in tensors),
    )
    versions = [t._version for t in tensors]
    results = given.run(*tensors)  # only to see what it gives: what this traced is dead and will be erased
    several = isinstance(results, tuple)
    reason = _unfit(given, cast("tuple[Any, ...]", results) if several else (results,), [t._version for t in tensors] != versions)
    if reason is not None:
        fail(
            f"torch.autograd.Function `{function.__name__}`: {reason}. Its backward would be lost. Write it as plain torch ops, "
            "or as a torch.library custom op with register_autograd and a rule."
        )
    return _op(given, len(cast("tuple[Any, ...]", results)) if several else None)(*tensors)


def _unfit(given: Given, results: Sequence[Any], written: bool) -> str | None:
    """Return why a function cannot be one op, or None."""
    if written:
        return "it writes into its input in place"
    if not all(isinstance(result, Tensor) for result in results):
        return "a result is no tensor"
    try:
        hash(given)
    except TypeError:
        return "an argument is neither a tensor nor a plain value (a number, text, None or a tuple of them)"
    return None


@cache
def _library() -> Any:
    return torch.library.Library(_NAMESPACE, "DEF")


@cache
def _made() -> dict[str, Given]:
    """Return what each op was made for; torch's own registry, where they are, lives as long."""
    return {}


@cache
def _op(given: Given, num_results: int | None) -> Any:
    """Return the op of a function, with its rule; on tensors with gradients it is the function itself."""
    name = f"{re.sub('[^A-Za-z0-9_]', '_', given.function.__name__)}_{len(_made())}"
    _made()[name] = given
    arguments = ", ".join(f"Tensor x{index}" for index in range(len(given.shapes)))
    results = "Tensor" if num_results is None else f"({', '.join(['Tensor'] * num_results)})"
    _library().define(f"{name}({arguments}) -> {results}")
    for key in ("Autograd", "CompositeExplicitAutograd"):
        _library().impl(name, given.run, key)
    return overload(_NAMESPACE, name, "default")


def give_rules(graph: fx.Graph) -> None:
    """Give each op of a captured graph that was made here its rule."""
    for node in graph.nodes:
        target = node.target
        if getattr(target, "namespace", None) != _NAMESPACE or rules.find(target) is not None:
            continue
        values = node.meta["val"]
        results = [values] if isinstance(values, Tensor) else list(values)
        given = _made()[str(target).split(".")[1]]
        rules.rule(_rule(given, [tuple(result.shape) for result in results]))(target)


def _rule(given: Given, shapes: Sequence[tuple[int, ...]]) -> str:
    """Return the text of a rule: any split of an elementwise function, none of another one."""
    if len({*given.shapes, *shapes}) == 1 and _is_elementwise(given):
        operands = [f"x{index}[*]" for index in range(len(given.shapes))]
        return f"{', '.join(operands)} -> {', '.join(f'y{index}[*]' for index in range(len(shapes)))}"
    names = [[f"a{place}_{dim}" for dim in range(len(shape))] for place, shape in enumerate(given.shapes)]
    found = [[f"b{place}_{dim}" for dim in range(len(shape))] for place, shape in enumerate(shapes)]
    operands = ", ".join(f"x{place}[{' '.join(factors)}]" for place, factors in enumerate(names))
    results = ", ".join(f"y{place}[{' '.join(factors)}]" for place, factors in enumerate(found))
    factors = " ".join(factor for part in [*names, *found] for factor in part)
    return f"{operands} -> {results}" + (f"; whole {factors}" if factors else "")


def _is_elementwise(given: Given) -> bool:
    """Tell whether forward and backward are elementwise ops, the same at another size: they may read no size."""
    shape = given.shapes[0]
    try:
        graphs = [_joint(given, tuple(size + more for size in shape)) for more in (0, 1)]
    except (RuntimeError, ValueError):  # it is only made for its own sizes, or reads values
        return False
    return graphs[0].code == graphs[1].code and all(
        torch.Tag.pointwise in node.target.tags or str(node.target) in _ALSO
        for node in graphs[0].graph.nodes
        if node.op == "call_function"
    )


def _joint(given: Given, shape: tuple[int, ...]) -> fx.GraphModule:
    """Return the graph of a function and of its gradients."""

    def run(*tensors: Tensor) -> Any:
        results = given.run(*tensors)
        outputs = list(cast("tuple[Tensor, ...]", results)) if isinstance(results, tuple) else [results]
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        made = [output for output in outputs if output.requires_grad]
        tangents = [torch.ones_like(output) for output in made]
        return outputs, torch.autograd.grad(made, wanted, tangents, allow_unused=True) if wanted else ()

    with FakeTensorMode(), torch.enable_grad():
        tensors = [torch.empty(shape, dtype=dtype, requires_grad=grad) for dtype, grad in zip(given.dtypes, given.grads, strict=True)]
        return make_fx(run)(*tensors)
