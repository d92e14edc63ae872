"""A compiled backward is no graph to differentiate again: a decorator that says so at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from partir.errors import PartirError


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return an autograd.Function's backward that runs without a graph and refuses `create_graph=True`."""

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise PartirError(
                "backward(create_graph=True): the compiled backward has no second derivative. Leave create_graph out, or compute "
                "the term that needs it (a gradient penalty) on the module before partir.parallelize."
            )
        return backward(ctx, *grads)

    return checked
