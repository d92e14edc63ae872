"""Make a torch op of a plain Python function, so that a graph holds it as one node and a rule can say how it is split."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from partir.errors import RuleError, first_line

NAMESPACE = "partir_user"


def as_op(function: FunctionType) -> Any:
    """Return the function as a torch.library custom op; called, it computes what the function computes.

    Its backward runs the function again and differentiates it, so what the function computes with torch ops has its gradient.

    Raises:
        RuleError: the function has no type hints that make a schema, or is defined a second time under one name.
    """
    name = f"{NAMESPACE}::{re.sub(r'[^a-zA-Z0-9_]+', '_', f'{function.__module__}_{function.__qualname__}')}"
    if hasattr(getattr(torch.ops, NAMESPACE), name.split("::")[1]):
        raise RuleError(f"{function.__qualname__}: {name} is an op already; give the function another name")

    def run(*args: Any, **kwargs: Any) -> Any:
        return _apart(function(*args, **kwargs), [arg for arg in args if isinstance(arg, Tensor)])

    try:
        schema = cast("Callable[..., str]", cast(Any, torch.library).infer_schema)(function, mutates_args=())
    except ValueError as error:
        raise RuleError(
            f"{function.__qualname__}: a rule needs the types of the arguments and of the result, as in "
            f"`def f(x: torch.Tensor, scale: float) -> torch.Tensor`: {first_line(error)}"
        ) from None
    op: Any = cast(Any, torch.library.custom_op)(name, run, mutates_args=(), schema=schema)
    op.register_fake(run)
    op.register_autograd(_backward_of(function), setup_context=_save)
    op.__doc__ = function.__doc__
    return op


def _apart(result: Any, inputs: Sequence[Tensor]) -> Any:
    """Copy what shares memory with an input: the result of a custom op may not."""
    if isinstance(result, tuple):
        return tuple(_apart(part, inputs) for part in cast("tuple[Any, ...]", result))
    shared = {_storage(value) for value in inputs}
    return result.clone() if isinstance(result, Tensor) and _storage(result) in shared else result


def _storage(value: Tensor) -> int:
    storage: Any = value.untyped_storage()
    return int(storage._cdata)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.places = [place for place, value in enumerate(inputs) if isinstance(value, Tensor)]
    ctx.save_for_backward(*(inputs[place] for place in ctx.places))
    ctx.arguments = [None if isinstance(value, Tensor) else value for value in inputs]


def _backward_of(function: FunctionType) -> Callable[..., Any]:
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        arguments: list[Any] = list(ctx.arguments)
        with torch.enable_grad():
            for place, value in zip(ctx.places, ctx.saved_tensors, strict=True):
                arguments[place] = value.detach().requires_grad_(value.is_floating_point() or value.is_complex())
            results = function(*arguments)
            listed = list(cast("Sequence[Tensor]", results)) if isinstance(results, tuple) else [results]
            pairs = [(y, g) for y, g in zip(listed, gradients, strict=True) if g is not None and y.requires_grad]
            wanted = [place for place in ctx.places if arguments[place].requires_grad and ctx.needs_input_grad[place]]
            outputs, given = [y for y, _ in pairs], [g for _, g in pairs]
            inputs = [arguments[place] for place in wanted]
            found = torch.autograd.grad(outputs, inputs, given, allow_unused=True) if pairs and wanted else ()
        by_place = dict(zip(wanted, found, strict=False))
        return tuple(by_place.get(place) for place in range(len(arguments)))

    return backward
