"""Take nested Python values apart into tensors and a `Structure`, and put them together again.

`torch.utils._pytree` does this for the containers it knows. A model's outputs and inputs also hold objects that it
does not know (the cache of Hugging Face models): those are taken apart by their attributes when they hold a tensor.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from partir.errors import TraceError

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    enum.Enum,
)
_OPAQUE = (type, types.FunctionType, types.MethodType, types.ModuleType, nn.Module, *_PLAIN)


@dataclass(frozen=True)
class TensorLeaf:
    """The place of tensor number ``index``."""

    index: int


@dataclass(frozen=True, eq=False)
class Constant:
    """A value without tensors, kept as it is."""

    value: Any


@dataclass(frozen=True, eq=False)
class Container:
    """A list, tuple, dict or registered class: one level of a pytree."""

    kind: type
    spec: Any
    children: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class ObjectState:
    """An object that pytree does not know: its items, if it is a dict or a list, and its attributes."""

    kind: type
    keys: tuple[Any, ...]
    items: tuple[Node, ...]
    names: tuple[str, ...]
    attributes: tuple[Node, ...]


Node: TypeAlias = "TensorLeaf | Constant | Container | ObjectState"


@dataclass(frozen=True, eq=False)
class Structure:
    """What remains of a nested value when its tensors are taken out.

    Two structures are equal when they hold equal constants in the same places: a key for caches. `text` is the same in
    every process, so that ranks can compare it; objects that have no stable text are compared by identity besides.

    >>> leaves, structure = flatten({"x": torch.ones(2), "n": 3})
    >>> len(leaves), structure.text
    (1, "dict['x', 'n'](*, int:3)")
    >>> structure.rebuild([torch.zeros(1)])
    {'x': tensor([0.]), 'n': 3}
    """

    root: Node
    num_tensors: int
    text: str
    opaque: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return NotImplemented
        same = self.text == other.text and len(self.opaque) == len(other.opaque)
        return same and all(mine is theirs for mine, theirs in zip(self.opaque, other.opaque, strict=True))

    def __hash__(self) -> int:
        return hash(self.text)

    def __str__(self) -> str:
        return self.text

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        """Return the nested value with `tensors` in the places of its tensors."""
        if len(tensors) != self.num_tensors:
            raise ValueError(f"{len(tensors)} tensors given for a structure of {self.num_tensors}: {self.text}")
        return _rebuild(self.root, tensors)


def flatten(value: Any, *, merge: bool = False) -> tuple[list[torch.Tensor], Structure]:
    """Return the tensors of a nested value, in order, and its structure.

    Args:
        value: anything; containers are those of `torch.utils._pytree` and objects that hold tensors.
        merge: give one leaf to a tensor that appears several times (outputs), else each place has its own (inputs).
    """
    tensors: list[torch.Tensor] = []
    seen: dict[int, int] | None = {} if merge else None
    root = _flatten(value, tensors, seen, ())
    opaque: list[Any] = []
    return tensors, Structure(root, len(tensors), _text(root, opaque), tuple(opaque))


def leaf_paths(structure: Structure) -> list[str]:
    """Return for every tensor of a structure the path to it, such as ``[0]['mask']``."""
    paths = [""] * structure.num_tensors
    for index, path in _paths(structure.root, ""):
        paths[index] = path
    return paths


def refuse_sparse(inputs: Mapping[str, torch.Tensor]) -> None:
    """Refuse what has no dims to split: sparse and nested tensors.

    Raises:
        TraceError: names the input.
    """
    for name, value in inputs.items():
        if value.layout is not torch.strided:
            kind = str(value.layout).removeprefix("torch.")
            raise TraceError(f"input {name} is a {kind} tensor, and only dense ones have dims to split: pass its to_dense().")


def _flatten(value: Any, tensors: list[torch.Tensor], seen: dict[int, int] | None, above: tuple[int, ...]) -> Node:
    if isinstance(value, torch.Tensor):
        if seen is not None and id(value) in seen:
            return TensorLeaf(seen[id(value)])
        tensors.append(value)
        if seen is not None:
            seen[id(value)] = len(tensors) - 1
        return TensorLeaf(len(tensors) - 1)
    if isinstance(value, _OPAQUE) or id(value) in above:
        return Constant(value)
    above = (*above, id(value))
    children, spec = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
    if not spec.is_leaf():
        kind: Any = value.__class__
        return Container(kind, spec, tuple(_flatten(child, tensors, seen, above) for child in children))
    if not _holds_tensor(value, ()):
        return Constant(value)
    return _flatten_object(value, lambda part: _flatten(part, tensors, seen, above))


def _flatten_object(value: Any, recurse: Callable[[Any], Node]) -> ObjectState:
    keys, items = _items(value)
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    kind: Any = value.__class__
    return ObjectState(
        kind,
        keys,
        tuple(map(recurse, items)),
        tuple(attributes),
        tuple(map(recurse, attributes.values())),
    )


def _items(value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    if isinstance(value, dict):
        mapping = cast("dict[Any, Any]", value)
        return tuple(mapping.keys()), tuple(mapping.values())
    if isinstance(value, list):
        sequence = cast("list[Any]", value)
        return tuple(range(len(sequence))), tuple(sequence)
    return (), ()


def _holds_tensor(value: Any, above: tuple[int, ...]) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, _OPAQUE) or id(value) in above:
        return False
    above = (*above, id(value))
    children, spec = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
    if spec.is_leaf():
        children = [*_items(value)[1], *getattr(value, "__dict__", {}).values()]
    return any(_holds_tensor(child, above) for child in children)


def _rebuild(node: Node, tensors: Sequence[Any]) -> Any:
    if isinstance(node, TensorLeaf):
        return tensors[node.index]
    if isinstance(node, Constant):
        return node.value
    if isinstance(node, Container):
        return pytree.tree_unflatten([_rebuild(child, tensors) for child in node.children], node.spec)
    kind: Any = node.kind
    value: Any = kind.__new__(kind)
    items = [_rebuild(item, tensors) for item in node.items]
    # The base class's own method: that of the class may do more.
    base: Any = next((base for base in (dict, list) if issubclass(kind, base)), None)
    if base is not None:
        fill = getattr(base, "update" if base is dict else "extend")
        fill(value, dict(zip(node.keys, items, strict=True)) if base is dict else items)
    attributes = [_rebuild(part, tensors) for part in node.attributes]
    value.__dict__.update(zip(node.names, attributes, strict=True))
    return value


def _text(node: Node, opaque: list[Any]) -> str:
    if isinstance(node, TensorLeaf):
        return "*"
    if isinstance(node, Constant):
        return _constant_text(node.value, opaque)
    if isinstance(node, Container):
        context = "" if node.spec.context is None else str(node.spec.context)
        return f"{node.kind.__qualname__}{context}({', '.join(_text(child, opaque) for child in node.children)})"
    items = [f"{key!r}: {_text(item, opaque)}" for key, item in zip(node.keys, node.items, strict=True)]
    attributes = [f"{name}={_text(part, opaque)}" for name, part in zip(node.names, node.attributes, strict=True)]
    return f"{node.kind.__qualname__}({', '.join(items + attributes)})"


def _constant_text(value: Any, opaque: list[Any]) -> str:
    name = type(value).__qualname__
    if isinstance(value, type):
        return f"type:{value.__module__}.{value.__qualname__}"
    if isinstance(value, _PLAIN):
        return "None" if value is None else f"{name}:{value!r}"
    opaque.append(value)
    return f"{name}:object"


def _paths(node: Node, prefix: str) -> Iterator[tuple[int, str]]:
    if isinstance(node, TensorLeaf):
        yield node.index, prefix
    elif isinstance(node, Container):
        keys = node.spec.context if issubclass(node.kind, dict) else range(len(node.children))
        for key, child in zip(keys, node.children, strict=True):
            yield from _paths(child, f"{prefix}[{key!r}]")
    elif isinstance(node, ObjectState):
        for key, item in zip(node.keys, node.items, strict=True):
            yield from _paths(item, f"{prefix}[{key!r}]")
        for name, part in zip(node.names, node.attributes, strict=True):
            yield from _paths(part, f"{prefix}.{name}")
