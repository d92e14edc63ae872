"""Parameters that await their values: built on meta, they get one rank's block when their layout is known, and never more.

Until then a parameter is a stand-in of one element seen as many, NaN: nothing is allocated, and nothing can be taken for a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from partir.layout import Layout
from partir.mesh import Mesh
from partir.runtime.torch_dtensor import lay_again, spec_of

MakeBlock = Callable[[Layout, Mesh, int], Tensor]
_ATTRIBUTE = "partir_initial"


def stand_in(meta: nn.Parameter, device: torch.device, make: MakeBlock) -> nn.Parameter:
    """Return a parameter on a device that stands for a meta one until `make` gives its block."""
    value = torch.full((), float("nan") if meta.is_floating_point() else 0, dtype=meta.dtype, device=device)
    parameter = nn.Parameter(value.expand(meta.shape), requires_grad=meta.requires_grad)
    setattr(parameter, _ATTRIBUTE, make)
    return parameter


def awaits_values(parameter: Tensor) -> bool:
    """Return whether a parameter has no values yet."""
    return hasattr(parameter, _ATTRIBUTE)


def hand_on(parameter: Tensor, other: Tensor) -> None:
    """Let another parameter await the values of this one, if it does."""
    if awaits_values(parameter):
        setattr(other, _ATTRIBUTE, getattr(parameter, _ATTRIBUTE))


def initial_block(parameter: Tensor, layout: Layout, mesh: Mesh, rank: int) -> Tensor | None:
    """Return the block that a parameter awaits, which it then awaits no more; None where it has values."""
    if not awaits_values(parameter):
        return None
    make = cast(MakeBlock, getattr(parameter, _ATTRIBUTE))
    delattr(parameter, _ATTRIBUTE)
    return make(layout, mesh, rank)


def fill_left_out(model: nn.Module, mesh: Mesh) -> None:
    """Give parameters that no program reads their values, whole as they are."""
    for parameter in model.parameters():
        if awaits_values(parameter) and isinstance(parameter, DTensor):
            with torch.no_grad():
                block = initial_block(parameter, Layout.whole(parameter), mesh, 0)
            lay_again(parameter, cast(Tensor, block), cast(Any, spec_of(parameter)))
