"""The signature of a call: the text of all that a compiled program depends on."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from partir.dims import Dim, Part
from partir.errors import PartirError
from partir.layout import Layout, dtype_name
from partir.mesh import Mesh
from partir.model_facts import Facts, facts_of
from partir.precision import autocast_text


def positional(example_inputs: Any) -> tuple[Any, ...]:
    """Return example inputs as positional arguments: a tuple or list is several, None none, anything else one."""
    if isinstance(example_inputs, (tuple, list)):
        return tuple(cast("tuple[Any, ...]", example_inputs))
    return () if example_inputs is None else (example_inputs,)


def signature(model: nn.Module, leaves: Sequence[Tensor], structure: str) -> str:
    """Return the text of all that a compiled program depends on, the same on every rank.

    >>> signature(nn.Linear(2, 2), [torch.ones(3, 2)], "tuple(*)").splitlines()[0]
    'tuple(*); inputs cpu torch.float32 [3, 2]; grad on; training all; frozen none'
    """
    return _text(leaves, structure, facts_of(model))


def signature_here(model: nn.Module, leaves: Sequence[Tensor], structure: Any) -> tuple[str, Hashable]:
    """Return the signature, and what tells calls apart in this process: it knows which function or tensor an attribute is."""
    facts = facts_of(model)
    text = _text(leaves, structure.text, facts)
    return text, (text, structure, facts.here)


def _text(leaves: Sequence[Tensor], structure: str, facts: Facts) -> str:
    inputs = ", ".join(_describe(leaf) for leaf in leaves)
    grad, autocast = "on" if torch.is_grad_enabled() else "off", autocast_text()
    text = f"{structure}; inputs {inputs}; grad {grad}; training {facts.training}; frozen {facts.frozen}"
    return "\n".join([text + (f"; autocast {autocast}" if autocast else ""), *map(" ".join, facts.rows)])


MANY = 8


def warn_of_changes(known: Sequence[str], text: str) -> None:
    """Warn once where many programs were compiled for the same inputs, for something on the model changes from call to call.

    Args:
        known: the signatures that have a program.
        text: the one that needs a program.
    """
    first, *rows = text.splitlines()
    same = [one for one in known if one.splitlines()[0] == first]
    if len(same) != MANY:
        return
    changed = [row.strip() for row in rows if row not in set(same[-1].splitlines())]
    what = "; ".join(changed[:3]) or "one that holds a list, a dict, a function or an object"
    warnings.warn(
        f"{MANY} programs were compiled for the same inputs, because an attribute of the model changes from call to call: {what}. What "
        "forward does not read belongs elsewhere, or under a name that begins with _; what it reads is an input.",
        stacklevel=2,
    )


def layout_of_dtensor(t: DTensor, mesh: Mesh) -> Layout:
    """Return the layout that a DTensor's placements mean.

    Raises:
        PartirError: its DeviceMesh has other dims than the mesh, or a placement is not plain.
    """
    names = t.device_mesh.mesh_dim_names or ()
    axes: list[list[str]] = [[] for _ in range(t.dim())]
    for name, size, placement in zip(names, t.device_mesh.shape, t.placements):
        if mesh[name] != size or not (placement.is_replicate() or placement.is_shard()):
            raise PartirError(f"a DTensor input is {placement} over {name}={size}; the mesh is {mesh}: use Shard or Replicate on its axes.")
        if placement.is_shard() and size > 1:
            axes[int(cast(Any, placement).dim) % t.dim()].append(str(name))
    if not names:
        raise PartirError("a DTensor input's DeviceMesh has no dim names; name them as the mesh's axes.")
    return Layout(dtype_name(t.dtype), tuple(Dim((Part(n, tuple(a)),)) for n, a in zip(t.shape, axes)))


def _describe(leaf: Tensor) -> str:
    text = f"{leaf.device} {leaf.dtype} {list(leaf.shape)}" + (" requires grad" if leaf.requires_grad else "")
    return text + (f" {leaf.placements} on {leaf.device_mesh.mesh_dim_names}" if isinstance(leaf, DTensor) else "")


def refuse_meta(model: nn.Module, original: type[nn.Module], named: Mapping[str, Tensor]) -> None:
    """Refuse inputs without values beside parameters with values, or the reverse.

    Other devices are left to the trace, which names the line where two meet: a model may move its inputs itself.
    """
    expected = next((p.device for p in model.parameters()), None)
    for name, leaf in named.items():
        if expected is not None and (leaf.device.type == "meta") != (expected.type == "meta"):
            raise PartirError(
                f"{original.__name__}: input {name!r} is on {leaf.device}, the parameters are on {expected}. "
                f"Both need values to run; partir.plan takes a model and inputs that are both on meta."
            )
