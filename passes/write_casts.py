"""Write the casts that autocast makes as nodes: `torch.export` records an op as the user called it, above autocast.

Before:  %y: bf16[8, 96] = aten.linear(%x: f32, %w: f32)                  under torch.autocast("cpu", torch.bfloat16)
After:   %a: bf16[8, 32] = aten._to_copy(%x, dtype=torch.bfloat16)
         %b: bf16[96, 32] = aten._to_copy(%w, dtype=torch.bfloat16)
         %y: bf16[8, 96] = aten.linear(%a, %b)

What torch casts is read from torch itself, by running each call on fake tensors with autocast and without.

Requires: a flat graph whose nodes say in ``meta["autocast"]`` which autocasts are on there.
Ensures: without autocast the graph computes what the module does under it; each value is cast once to a dtype. Idempotent.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from partir.errors import TraceError, first_line, source_line

CAST = torch.ops.aten._to_copy.default
Autocasts = tuple[tuple[str, torch.dtype], ...]


def active_autocasts() -> Autocasts:
    """Return the devices whose autocast is on, and its dtype."""
    kinds = ("cpu", "cuda")
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))


def write_casts(graph: fx.Graph) -> None:
    """Write the casts into a graph, in place, and drop the marks.

    Raises:
        TraceError: autocast changes a call in a way that casts of its operands do not.
    """
    made: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in list(graph.nodes):
        autocasts = cast(Autocasts, node.meta.pop("autocast", ()))
        if autocasts and node.op == "call_function" and node.target is not operator.getitem and node.target is not CAST:
            _cast_operands(graph, node, autocasts, made)


def _cast_operands(graph: fx.Graph, node: fx.Node, autocasts: Autocasts, made: dict[tuple[fx.Node, torch.dtype], fx.Node]) -> None:
    leaves, structure = pytree.tree_flatten((node.args, dict(node.kwargs)))
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
    if not any(_is_float(leaves[index]) for index in places):
        return
    without = _Trial(node.target, leaves, structure, ())
    within = _Trial(node.target, leaves, structure, autocasts)
    if within.error is not None:
        raise TraceError(
            f"{source_line(node.meta)}: what autocast casts for `{node.target}` cannot be read, for the call does not run on fake tensors "
            f"({first_line(within.error)}). Call it under torch.autocast(device_type, enabled=False)."
        ) from within.error
    for index, dtype in within.casts.items():
        if without.casts.get(index) != dtype and leaves[index].meta["val"].dtype != dtype:
            leaves[index] = _cast(graph, node, leaves[index], dtype, made)
    wanted = _dtypes(node.meta["val"])
    if _Trial(node.target, leaves, structure, ()).dtypes != wanted:
        _ask_for(node, wanted, leaves, structure)
        return
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    node.args, node.kwargs = tuple(args), dict(kwargs)


def _ask_for(node: fx.Node, wanted: Sequence[torch.dtype], leaves: list[Any], structure: Any) -> None:
    """Ask a call for the dtype that autocast gives its result, where it has an argument for that."""
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    asked, again = pytree.tree_flatten((args, {**kwargs, "dtype": wanted[0]}))
    names = [argument.name for argument in cast(Any, node.target)._schema.arguments]
    if "dtype" not in names or _Trial(node.target, asked, again, ()).dtypes != wanted:
        raise TraceError(
            f"{source_line(node.meta)}: under autocast `{node.target}` returns {', '.join(map(str, wanted))}, which casting its operands "
            "does not give. Call it under torch.autocast(device_type, enabled=False), on tensors of the dtype that you want."
        )
    node.args, node.kwargs = tuple(args), {**kwargs, "dtype": wanted[0]}


def _cast(
    graph: fx.Graph, reader: fx.Node, source: fx.Node, dtype: torch.dtype, made: dict[tuple[fx.Node, torch.dtype], fx.Node]
) -> fx.Node:
    if (source, dtype) not in made:
        with graph.inserting_before(reader):
            new = graph.call_function(CAST, (source,), {"dtype": dtype})
        kept = {key: reader.meta[key] for key in ("stack_trace", "nn_module_stack", "no_grad") if key in reader.meta}
        new.meta = {**kept, "val": _fake_like(source.meta["val"], dtype)}
        made[source, dtype] = new
    return made[source, dtype]


def _fake_like(value: Any, dtype: torch.dtype) -> Any:
    with value.fake_mode:
        return value.to(dtype)


class _Trial(TorchDispatchMode):
    """One run of a call on fake tensors: which operands are cast before anything else reads them, and the results' dtypes.

    `error` is why the call does not run so, as a mixed call that only autocast makes legal.
    """

    def __init__(self, target: Any, leaves: Sequence[Any], structure: Any, autocasts: Autocasts) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.casts: dict[int, torch.dtype] = {}
        self.dtypes: list[torch.dtype] = []
        self.error: Exception | None = None
        self._seen: set[int] = set()
        with FakeTensorMode(allow_non_fake_inputs=True):
            filled = [_fresh(leaf, autocasts) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
            self._places = {id(value): index for index, value in enumerate(filled) if isinstance(leaves[index], fx.Node)}
            args, kwargs = pytree.tree_unflatten(filled, structure)
            with ExitStack() as stack:
                for kind, dtype in autocasts:
                    stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
                stack.enter_context(torch.no_grad())
                stack.enter_context(self)
                try:
                    self.dtypes = _dtypes(target(*args, **kwargs))
                except Exception as error:
                    self.error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in () if func.namespace == "prim" else pytree.tree_leaves((args, kwargs or {})):
            index = self._places.get(id(leaf))
            if index is None or index in self._seen:
                continue
            self._seen.add(index)
            dtype = cast("dict[str, Any]", kwargs or {}).get("dtype")
            if func is CAST and dtype is not None:
                self.casts[index] = dtype
        return func(*args, **(kwargs or {}))


def _fresh(node: fx.Node, autocasts: Autocasts) -> torch.Tensor:
    """Return a fake like a node's value; one on the meta device is taken for the device whose autocast is on."""
    value = cast(torch.Tensor, node.meta["val"])
    device = value.device if value.device.type != "meta" or not autocasts else torch.device(autocasts[0][0])
    return torch.empty(tuple(value.shape), dtype=value.dtype, device=device)


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _dtypes(value: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
