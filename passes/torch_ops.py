"""Readers of torch's operators; the one place here that touches their private names."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch

aten = torch.ops.aten
VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.view_copy.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.view_as.default,
    }
)


def is_op(target: Any) -> TypeGuard[Any]:
    """Tell whether a target is one overload of an operator, such as ``torch.ops.aten.add.Tensor``."""
    return isinstance(target, torch._ops.OpOverload)  # pyright: ignore[reportPrivateUsage]


def is_higher_order(target: Any) -> TypeGuard[Any]:
    """Tell whether a target runs other graphs."""
    return isinstance(target, torch._ops.HigherOrderOperator)  # pyright: ignore[reportPrivateUsage]


def schema_of(op: Any) -> Any:
    """Return the schema of an operator: names, types and aliases of its arguments."""
    return op._schema


def name_of(target: Any) -> str:
    """Return ``aten::add`` for ``torch.ops.aten.add.Tensor``."""
    return str(schema_of(target).name) if is_op(target) else str(target)


def writes_into(op: Any) -> bool:
    """Tell whether the schema of an operator says that it writes into an argument."""
    return any(argument.alias_info and argument.alias_info.is_write for argument in schema_of(op).arguments)


def overload(namespace: str, name: str, overload_name: str) -> Any:
    """Return an operator by its names, or None."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return getattr(packet, overload_name or "default", None)


def is_composite(op: Any) -> bool:
    """Tell whether torch defines an operator by other operators, its gradient too."""
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))  # pyright: ignore[reportPrivateUsage]


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two (fake) tensors show one storage."""
    mine: Any = one.untyped_storage()
    theirs: Any = other.untyped_storage()
    return bool(mine._cdata == theirs._cdata)
