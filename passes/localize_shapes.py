"""Turn global sizes into one rank's: attributes that hold sizes, lookups into a split dim, random numbers.

Before:  %v: f32[16@x, 8, 12@y, 64] = aten.view(%q, [16, 8, 12, 64])
After:   %v: f32[16@x, 8, 12@y, 64] = aten.reshape(%q, [8, 8, 6, 64])         local [8, 8, 6, 64]

Before:  %e: f32[16@x, 64@z] +y = aten.embedding(%wte, %ids)
After:   %e: f32[16@x, 64@z] +y = masked_embedding(%wte, %ids, axes=y, size=256)

Requires: expand_recipes.
Ensures: the graph runs on blocks; ``meta["val"]`` has local shapes, equal to ``meta["layout"]``'s on every node.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from partir import local_ops, random_ops
from partir.errors import RuleError, VerifyError, source_line
from partir.graph import is_call, is_collective, layout_of, layouts_of, operands, results_of, with_attributes
from partir.layout import Layout
from partir.mesh import Mesh, use_mesh
from partir.pads import natural_size
from partir.passes.key_of_call import key_of_call
from partir.passes.torch_ops import VIEWS
from partir.rules import Binding
from partir.subdims import axes_of

aten = torch.ops.aten

def localize_shapes(graph_module: GraphModule, mesh: Mesh, rng: str = "exact") -> GraphModule:
    """Return the graph that one rank runs; ``rng`` says how random numbers are drawn, see `random_numbers.numbers_of`."""
    graph = graph_module.graph
    seed = next((node for node in graph.nodes if node.op == "placeholder" and node.name == "seed"), None)
    localizer = _Localizer(graph, mesh, seed, rng)
    for node in list(graph.nodes):
        if is_call(node) and not is_collective(node):
            localizer.localize(node)
    graph.eliminate_dead_code()
    graph_module.recompile()
    _propagate(graph_module, mesh)
    return graph_module


@dataclass
class _Localizer:
    graph: Graph
    mesh: Mesh
    seed: Node | None
    rng: str

    def localize(self, node: Node) -> None:
        binding = cast(Binding, node.meta["binding"])
        if binding.index and self._lookup(node, binding):
            return
        if binding.random:
            self._random(node)
            return
        if binding.offsets and self._offset(node, binding):
            return
        if node.target is torch.ops.partir_local.mask_pads.default:
            self._mask(node)
            return
        if node.target in VIEWS:
            self._replace(node, aten.reshape.default, (node.args[0], list(layout_of(node).local_shape(self.mesh))), {})
            return
        self._attributes(node, binding)

    def _attributes(self, node: Node, binding: Binding) -> None:
        sizes = local_factor_sizes(binding, node, self.mesh)
        changed = dict(binding.localise(sizes))
        if not changed:
            return
        node.args, node.kwargs = with_attributes(node, node.args, node.kwargs, changed)

    def _lookup(self, node: Node, binding: Binding) -> bool:
        """Shift the ids to this rank's part and mask the rest, where the table is really split or has pads."""
        ids, table, factor = binding.index[0]
        held = layout_of(operands(node)[table])
        dim = next(d for d, names in enumerate(binding.operands[table]) if factor in names)
        axes = tuple(a for a in held.dims[dim].all_axes if self.mesh[a] > 1)
        size = natural_size(held.dims[dim].size, node.meta.get("pads", {}).get(factor, ()))
        if not axes and size == held.dims[dim].size:
            return False  # of a whole dim with pads, an id behind the real rows would find a copy of the last one
        make = _LOOKUPS.get(str(cast(Any, node.target)._schema.name))
        if make is None:
            raise RuleError(f"{source_line(node.meta)}: {node.target} has no lookup on a split dim; whole {factor} in its rule.")
        read = operands(node)
        function, args = make(binding, read[table], read[ids], ".".join(axes), dim, size)
        self._replace(node, function, args, {})
        return True

    def _offset(self, node: Node, binding: Binding) -> bool:
        """Let an op that counts from the start of a dim count from where this rank's part begins."""
        sizes = local_factor_sizes(binding, node, self.mesh)
        if not any(factor in sizes or factor in node.meta.get("pads", {}) for factor in binding.offsets):
            return False
        make = _OFFSETS.get(str(cast(Any, node.target)._schema.name))
        if make is None:
            raise RuleError(f"{source_line(node.meta)}: {node.target} cannot begin inside a dim; `whole` in its rule, not `offset`.")
        function, args = make(binding, operands(node), layout_of(node), pad_numbers(node))
        self._replace(node, function, args, {})
        return True

    def _mask(self, node: Node) -> None:
        source, dim, *pad = cast("tuple[Any, ...]", node.args)
        layout = layout_of(cast(Node, source))
        text = str(Layout(layout.dtype, layout.dims, grad=layout.grad))
        self._replace(node, local_ops.mask_pads, (source, dim, tuple(pad), text), {})

    def _random(self, node: Node) -> None:
        if self.seed is None:
            raise RuleError(f"{source_line(node.meta)}: {node.target} draws random numbers but the graph has no seed.")
        layout, target = layouts_of(node)[0], cast(Any, node.target)
        drawn = {
            "seed": self.seed,
            "site": node.meta["site"],
            "layout": str(Layout(layout.dtype, layout.dims, grad=layout.grad)),
            "device": results_of(node)[0].device,
            "rng": self.rng,
            "pads": pad_numbers(node),
        }
        self._replace(node, random_ops.DRAWN[target], random_ops.positional(target, node.args, node.kwargs), drawn)

    def _replace(self, node: Node, target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        with self.graph.inserting_before(node):
            new = self.graph.call_function(target, args, dict(kwargs))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)


def _embedding(binding: Binding, table: Node, ids: Node, axes: str, dim: int, size: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    padding = binding.attributes.get("padding_idx", -1)
    return local_ops.masked_embedding, (table, ids, axes, size, -1 if padding is None else padding)


def _gather(binding: Binding, table: Node, ids: Node, axes: str, dim: int, size: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return local_ops.masked_gather, (table, dim, ids, axes, size)


def _index_select(binding: Binding, table: Node, ids: Node, axes: str, dim: int, size: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return local_ops.masked_index_select, (table, dim, ids, axes, size)


def _index(binding: Binding, table: Node, ids: Node, axes: str, dim: int, size: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return local_ops.masked_index, (table, ids, axes, size)


_LOOKUPS = {"aten::embedding": _embedding, "aten::gather": _gather, "aten::index_select": _index_select, "aten::index": _index}


def _attention(
    binding: Binding, read: list[Node], layout: Layout, pads: local_ops.PadNumbers
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    dim = len(layout.dims) - 2
    rows = str(Layout(layout.dtype, (layout.dims[dim],), grad=False))
    scale, groups = binding.attributes.get("scale"), bool(binding.attributes.get("gqa") or binding.attributes.get("enable_gqa"))
    return local_ops.causal_attention, (*read, rows, (pads[dim],) if pads else (), scale, groups)


_OFFSETS = {"aten::scaled_dot_product_attention": _attention}


def pad_numbers(node: Node) -> local_ops.PadNumbers:
    """Return for each dim of a call's (first) result the (block, size, padded) of its pads; `()` where none has any."""
    pads = node.meta.get("result_pads", ((),))[0]
    numbers = tuple(tuple((pad.block, pad.size, pad.padded) for pad in dim) for dim in pads)
    return numbers if any(numbers) else ()


def local_factor_sizes(binding: Binding, node: Node, mesh: Mesh) -> dict[str, int]:
    """Return each split factor's size on one rank, read from the layouts of the call's operands and results."""
    sizes: dict[str, int] = {}
    tied = [*zip(binding.operands, map(layout_of, operands(node))), *zip(binding.results, layouts_of(node))]
    for factors, layout in tied:
        for names, dim in zip(factors, layout.dims):
            axes = axes_of(dim, [binding.sizes[name] for name in names], mesh)
            if axes is None:
                sizes.update({names[0]: dim.local_size(mesh)} if len(names) == 1 else {})
                continue
            for name, split in zip(names, axes):
                if split:
                    sizes[name] = binding.sizes[name] // mesh.extent(split)
    return sizes


def _propagate(graph_module: GraphModule, mesh: Mesh) -> None:
    """Run the graph on fake blocks, calls that are alike once, and compare every shape with its layout."""
    ran: dict[Hashable, Any] = {}
    for node in graph_module.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            node.meta["val"] = node.meta["val"].new_empty(layout_of(node).local_shape(mesh))
            continue
        key = key_of_call(node)
        if key not in ran:
            ran[key] = _run(node, mesh)
        node.meta["val"] = ran[key]
        for layout, value in zip(layouts_of(node), results_of(node)):
            if layout.owner is None and tuple(value.shape) != layout.local_shape(mesh):
                raise VerifyError(
                    f"{source_line(node.meta)}: {node.name} has local shape {tuple(value.shape)}, its layout {layout} "
                    f"says {layout.local_shape(mesh)}."
                )


def _run(node: Node, mesh: Mesh) -> Any:
    values = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    try:
        with use_mesh(mesh), torch.no_grad(), _mode_of(node):
            return cast(Any, node.target)(*values[0], **values[1])
    except Exception as error:
        raise VerifyError(f"{source_line(node.meta)}: {node.target} fails on blocks {node.args}: {error}") from error


def _mode_of(node: Node) -> Any:
    for other in node.graph.nodes:
        value = other.meta.get("val")
        if isinstance(value, torch.Tensor) and hasattr(value, "fake_mode"):
            return cast(Any, value).fake_mode
    raise VerifyError(f"{node.name}: no fake tensor in the graph")


