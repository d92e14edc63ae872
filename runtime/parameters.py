"""Distributed parameters: DTensors on one DeviceMesh, re-laid in place, always seen from outside in the original order.

    parallelize      every rank holds the whole value of rank 0, `Replicate` on all axes, without a copy
    first compile    `p._local_tensor` and `p._spec` become the block and placements of the layout; `p` stays the same object
    fused layouts    `(3*768@y)@x`: rows are stored permuted, y's blocks first, so that the placements are plain `Shard`s
    diagonal         `f32[768@y.x] on y=z`: owners hold their block, the others an empty one. Its placements (`Shard(0)` on y, z and x)
                     are nominal: optimizers and norms are right, `p.full_tensor()` is not; use `partir.full_tensor(p)`

The layout is kept on the parameter as `p.partir_layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from partir.blocks import gather, is_owner, shard
from partir.dims import Dim, Part
from partir.errors import LayoutError, PartirError
from partir.layout import Layout
from partir.mesh import Mesh
from partir.runtime.groups import Groups
from partir.runtime.held_blocks import mesh_of
from partir.runtime.initial_blocks import awaits_values, hand_on, initial_block
from partir.runtime.torch_dtensor import dist, lay_again, local_of, make_dtensor, make_spec, parameters_of, spec_of

BROADCAST_BYTES = 32 * 2**20


def stored_dim(dim: Dim) -> Dim:
    """Return the dim in the order in which it is stored: what is split comes first.

    >>> print(stored_dim(Dim.parse("(3*768@y)@x")))
    2304@y.x
    """
    return Dim((Part(dim.size, dim.all_axes),))


def stored_layout(layout: Layout) -> Layout:
    """Return the layout of a parameter's stored order, one plain split a dim."""
    return Layout(layout.dtype, tuple(stored_dim(dim) for dim in layout.dims), grad=layout.grad)


def is_permuted(layout: Layout) -> bool:
    """Return whether a parameter's stored order differs from the original one."""
    return layout.owner is not None or stored_layout(layout).dims != layout.dims


def placements(layout: Layout, device_mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Return the plain placements that hold a layout's blocks.

    Raises:
        LayoutError: the mesh's dims are in another order, or the layout has a pending sum.
    """
    names = cast("tuple[str, ...]", device_mesh.mesh_dim_names)
    if layout.owner is not None:
        return tuple(Replicate() if name == "data" else Shard(0) for name in names)
    found: dict[str, Placement] = {}
    for index, dim in enumerate(layout.dims):
        axes = [axis for axis in dim.all_axes if axis in names]
        if axes != sorted(axes, key=names.index):
            raise LayoutError(f"layout {layout}: dim {dim} splits over {axes}, the DeviceMesh is ordered {names}.")
        found.update((axis, Shard(index)) for axis in axes)
    if layout.pending:
        raise LayoutError(f"layout {layout} has a pending sum, which no DTensor of partir's holds.")
    return tuple(found.get(name, Replicate()) for name in names)


def layout_spec(
    layout: Layout, dtype: torch.dtype, device_mesh: DeviceMesh, shape: tuple[int, ...] | None = None
) -> DTensorSpec:
    """Return torch's description of a tensor laid out by `layout`; `shape` is its own where the layout has pads."""
    return make_spec(shape or layout.shape, dtype, device_mesh, placements(layout, device_mesh))


class Parameters:
    """The parameters and buffers of one model on one rank.

    Args:
        mesh: the ranks.
        groups: process groups over it.
    """

    def __init__(self, mesh: Mesh, groups: Groups) -> None:
        self.mesh = mesh
        self.groups = groups
        self.rank = groups.rank

    def distribute(self, model: nn.Module) -> None:
        """Replace parameters by DTensors that hold the whole value of rank 0, and copy rank 0's buffers."""
        self._broadcast([t.detach() for t in [*model.parameters(), *model.buffers()] if not awaits_values(t)])
        device_mesh, made = self.groups.device_mesh(), dict[int, nn.Parameter]()
        for module in model.modules():
            for name, parameter in list(parameters_of(module).items()):
                if parameter is None:
                    continue
                if id(parameter) not in made:
                    made[id(parameter)] = self._replicated(parameter, device_mesh)
                parameters_of(module)[name] = made[id(parameter)]

    def lay(self, parameter: nn.Parameter, layout: Layout) -> None:
        """Give a replicated parameter its layout, in place.

        Raises:
            LayoutError: it already has another one.
        """
        if not isinstance(parameter, DTensor):
            raise PartirError("a parameter was replaced by a plain tensor after parallelize; assign values with copy_.")
        layout = Layout(layout.dtype, layout.dims, owner=layout.owner).strip(self.mesh)
        known = getattr(parameter, "partir_layout", None)
        if known not in (None, layout):
            raise LayoutError(f"a parameter is laid out {known}; a later program wants {layout}.")
        if known is not None:
            return
        spec = layout_spec(layout, parameter.dtype, self.groups.device_mesh())
        with torch.no_grad():
            local = initial_block(parameter, layout, self.mesh, self.rank)
            if local is None:
                local = _clone(shard(parameter.full_tensor().detach(), layout, self.mesh, self.rank))
        lay_again(parameter, local, spec)
        cast(Any, parameter).partir_layout = layout

    def _replicated(self, parameter: nn.Parameter, device_mesh: DeviceMesh) -> nn.Parameter:
        whole = parameter.detach()
        spec = make_spec(tuple(whole.shape), whole.dtype, device_mesh, (Replicate(),) * device_mesh.ndim)
        made = nn.Parameter(make_dtensor(whole, spec), requires_grad=parameter.requires_grad)
        hand_on(parameter, made)
        return made

    def _broadcast(self, tensors: list[Tensor]) -> None:
        """Overwrite tensors by rank 0's, many in one message."""
        group = self.groups.over(self.mesh.names)
        if group.size == 1:
            return
        for bucket in _buckets([t for t in tensors if t.numel()]):
            flat = torch.cat([t.reshape(-1).contiguous().view(torch.uint8) for t in bucket])
            dist.broadcast(flat, src=0, group=group.process_group)
            for t, raw in zip(bucket, torch.split(flat, [t.nbytes for t in bucket])):
                t.copy_(raw.clone().view(t.dtype).view(t.shape))


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for t in tensors:
        if bucket and (size + t.nbytes > BROADCAST_BYTES or bucket[0].device != t.device):
            yield bucket
            bucket, size = [], 0
        bucket.append(t)
        size += t.nbytes
    if bucket:
        yield bucket


def local_block(parameter: Tensor, layout: Layout, mesh: Mesh, rank: int) -> Tensor:
    """Return the block that a program takes for a parameter: the local tensor, zeros for a vector owned elsewhere."""
    local = local_of(parameter)
    if is_owner(layout.strip(mesh), mesh, rank):
        return local
    return local.new_zeros(()).expand(layout.local_shape(mesh))


def full_tensor(parameter: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the whole tensor in its original order. Every rank must call it.

    Args:
        parameter: a parameter of a parallelized model, or with `like` a gradient or an optimizer's state of one.
        like: the parameter whose layout `parameter` has.
    """
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    layout = getattr(parameter if like is None else like, "partir_layout", None)
    whole = parameter.full_tensor() if layout is None or layout.owner is None else None
    if whole is None:
        return _full_diagonal(parameter, cast(Layout, layout))
    whole = whole.detach()
    return whole if layout is None else _original_order(whole, layout, mesh_of(parameter.device_mesh))


def full_gradient(parameter: Tensor) -> Tensor | None:
    """Return the whole gradient of a parameter in its original order, None without one. Every rank must call it."""
    return None if parameter.grad is None else full_tensor(parameter.grad, like=parameter)


def to_original(t: DTensor, layout: Layout) -> DTensor:
    """Return a stored parameter (or moment) as a DTensor in the original order. Every rank must call it."""
    plain = stored_layout(layout)
    whole = full_tensor(t, like=cast(Any, _Laid(layout)))
    return make_dtensor(_own_block(whole, plain, t.device_mesh), layout_spec(plain, t.dtype, t.device_mesh))


def to_stored(value: Tensor, parameter: DTensor) -> DTensor:
    """Return a whole tensor, or a DTensor in the original order, as `parameter` stores it. Every rank must call it."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    layout = getattr(parameter, "partir_layout", None)
    block = _own_block(whole.detach().to(parameter.device), layout, parameter.device_mesh)
    return make_dtensor(block, cast(DTensorSpec, spec_of(parameter)))


class _Laid:
    """Something with a layout."""

    def __init__(self, layout: Layout) -> None:
        self.partir_layout = layout


def _own_block(whole: Tensor, layout: Layout | None, device_mesh: DeviceMesh) -> Tensor:
    if layout is None:
        return whole.clone()
    return _clone(shard(whole, layout, mesh_of(device_mesh), dist.get_rank()))


def _clone(block: Tensor) -> Tensor:
    return block.clone(memory_format=torch.contiguous_format)


def _original_order(stored: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """Undo the permutation of dims with split sub-dims."""
    for index, dim in enumerate(layout.dims):
        if stored_dim(dim) != dim:
            stored = _original_dim(stored, index, dim, mesh)
    return stored.contiguous()


def _original_dim(stored: Tensor, index: int, dim: Dim, mesh: Mesh) -> Tensor:
    """Bring each sub-dim's blocks back to it: `[y, 3, 768/y] -> [3, y, 768/y]`."""
    num_blocks = [mesh.extent(part.axes) for part in dim.parts]
    lengths = [part.size // blocks for part, blocks in zip(dim.parts, num_blocks)]
    view = torch.unflatten(stored, index, (*num_blocks, *lengths))
    count = len(dim.parts)
    pairs = [index + place for part in range(count) for place in (part, count + part)]
    order = [*range(index), *pairs, *range(index + 2 * count, view.dim())]
    return view.permute(order).flatten(index, index + 2 * count - 1)


def _full_diagonal(t: DTensor, layout: Layout) -> Tensor:
    mesh = mesh_of(t.device_mesh)
    block = local_block(t, layout, mesh, dist.get_rank()).contiguous()
    blocks = [torch.empty_like(block) for _ in range(mesh.size)]
    if mesh.size == 1:
        return gather([block], layout, mesh)
    dist.all_gather(blocks, block)
    return gather(blocks, layout, mesh)


def optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return `optimizer.state_dict()` with every moment in the original order of its parameter. Every rank must call it."""
    return _convert_optimizer(optimizer, optimizer.state_dict(), _moment_to_original)


def _moment_to_original(moment: Tensor, parameter: Tensor) -> Tensor:
    layout = cast(Layout, getattr(parameter, "partir_layout", None))
    return to_original(cast(DTensor, moment), layout) if needs_conversion(parameter) else moment


def _moment_to_stored(moment: Tensor, parameter: Tensor) -> Tensor:
    return to_stored(moment, cast(DTensor, parameter))


def load_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `optimizer_state_dict` returned, or a single-device optimizer's state. Every rank must call it."""
    parameters = {id(p) for p in model.parameters()}
    unknown = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in parameters]
    if unknown:
        raise PartirError(
            f"the optimizer holds {len(unknown)} parameters that are not the model's: build it after parallelize."
        )
    optimizer.load_state_dict(cast(Any, _convert_optimizer(optimizer, dict(state), _moment_to_stored)))


def _convert_optimizer(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], convert: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Any]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def moment(value: Any, parameter: Tensor) -> Any:
        one = isinstance(value, Tensor) and isinstance(parameter, DTensor) and value.shape == parameter.shape
        return convert(value, parameter) if one else value

    converted = {
        index: {name: moment(value, parameters[index]) for name, value in values.items()} for index, values in state["state"].items()
    }
    return {**state, "state": converted}


def needs_conversion(parameter: Tensor) -> bool:
    """Return whether a parameter's stored order differs from the original one."""
    layout = getattr(parameter, "partir_layout", None)
    return layout is not None and is_permuted(layout)
