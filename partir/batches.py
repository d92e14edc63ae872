"""Which samples of a batch a rank needs: for data loaders that read no more than that.

    model = partir.parallelize(model, mesh=(2, 2, 2, 1), example_inputs=batch)
    loader = DataLoader(data, batch_sampler=partir.BatchSliceSampler(BatchSampler(RandomSampler(data), 32, True), model))
    for samples in loader:
        loss = model(partir.from_local_batch(model, samples))

By default every rank passes the whole batch. Simulated, this process runs every rank, so its slice is the whole batch and the same
script runs unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Sampler

from partir.dims import Dim, Part
from partir.errors import PartirError
from partir.graph import operands
from partir.layout import Layout, dtype_name
from partir.mesh import Mesh
from partir.module import parallelized
from partir.passes.pipeline import Compiled
from partir.plans import Plan
from partir.runtime.parameters import layout_spec
from partir.runtime.session import Session, is_distributed
from partir.runtime.torch_dtensor import dist, local_of, make_dtensor

Batch = TypeVar("Batch")


def batch_slice(model: nn.Module | Plan, rank: int | None = None, batch_size: int | None = None) -> slice:
    """Return which samples of a global batch a rank needs, as a slice of its first dim.

    Args:
        model: a parallelized model that is compiled (`example_inputs`, or one call), or a plan.
        rank: whose; by default this process's, and simulated that of all ranks: the whole batch.
        batch_size: samples of the global batch; by default that of the first compilation.

    Raises:
        PartirError: not compiled yet, an input without a batch, a batch that the axes do not divide, or no such rank.

    >>> from partir.plans import plan
    >>> linear = plan(nn.Linear(16, 16), {"data": 2, "x": 2}, torch.empty(8, 16))
    >>> batch_slice(linear, rank=3), batch_slice(linear)
    (slice(6, 8, None), slice(0, 8, None))
    """
    axes, size, mesh = _batch(model)
    size = size if batch_size is None else batch_size
    _check_size(size, axes, mesh)
    if rank is None:
        if not is_distributed(mesh):
            return slice(0, size)
        rank = int(dist.get_rank())
    if not 0 <= rank < mesh.size:
        raise PartirError(f"batch_slice: rank {rank} is not of mesh {mesh}, whose ranks are 0 to {mesh.size - 1}.")
    length = size // mesh.extent(axes)
    start = mesh.index(rank, axes) * length
    return slice(start, start + length)


class BatchSliceSampler(Sampler[list[int]]):
    """Give a DataLoader this rank's part of each batch of a batch sampler: `DataLoader(data, batch_sampler=...)`.

    The batch sampler must yield the same indices on every rank: seed its generator alike.

    Args:
        batches: yields the sample indices of one global batch after the other.
        model, rank: as for `batch_slice`.
    """

    def __init__(self, batches: Iterable[Sequence[int]], model: nn.Module | Plan, rank: int | None = None) -> None:
        self.batches = batches
        self.model = model
        self.rank = rank

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            yield list(batch[batch_slice(self.model, self.rank, len(batch))])

    def __len__(self) -> int:
        return len(cast(Any, self.batches))


def from_local_batch(model: nn.Module, batch: Batch) -> Batch:
    """Return this rank's samples as the input of a call: each tensor as a DTensor of the global batch; simulated, as it is.

    Args:
        model: a parallelized model that is compiled.
        batch: a tensor, or lists, tuples and dicts of them; the first dim of each is this rank's samples, as `batch_slice` says.

    Raises:
        PartirError: not compiled yet, or a tensor without a first dim.
    """
    axes, _, mesh = _batch(model)
    session = parallelized(model).session(model)
    if session is None:
        return batch
    return cast(Batch, pytree.tree_map_only(Tensor, lambda t: _from_local(t, axes, mesh, session), batch))


def micro_batches(batch: Batch, count: int) -> list[Batch]:
    """Split a batch into equal parts along the first dim of its tensors, for gradient accumulation.

    Of a DTensor each rank's own samples are split, so that every part lies as the whole does.

    Args:
        batch: a tensor, or lists, tuples and dicts of them.
        count: how many parts; must divide the batch (of a DTensor, the samples of a rank).

    Raises:
        PartirError: it does not, or tensors have other numbers of samples.
    """
    if isinstance(count, bool) or not isinstance(cast(object, count), int):
        raise PartirError(f"micro_batches: the number of parts is {count!r}, a {type(count).__name__}; give an integer.")
    leaves, structure = pytree.tree_flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    _check_parts(tensors, count)
    parts = [_chunks(leaf, count) if isinstance(leaf, Tensor) else [leaf] * count for leaf in leaves]
    return [cast(Batch, pytree.tree_unflatten(list(part), structure)) for part in zip(*parts)]


def _check_parts(tensors: Sequence[Tensor], count: int) -> None:
    sizes = sorted({local_of(t).shape[0] if t.dim() else 0 for t in tensors})
    if len(sizes) != 1 or sizes[0] == 0:
        raise PartirError(f"micro_batches: tensors of a batch share their first dim; theirs are {sizes}. Split other tensors yourself.")
    if count < 1 or sizes[0] % count:
        raise PartirError(
            f"micro_batches: a batch of {sizes[0]} samples does not divide into {count} equal parts: their mean would not be the batch's. "
            f"Choose from {', '.join(str(n) for n in range(1, sizes[0] + 1) if sizes[0] % n == 0)}."
        )


def _chunks(t: Tensor, count: int) -> list[Tensor]:
    if local_of(t) is t:
        return list(t.chunk(count))
    dtensor = cast(Any, t)
    shape = (t.shape[0] // count, *t.shape[1:])
    stride = torch.empty(shape, device="meta").stride()
    return [
        cast(Any, type(dtensor)).from_local(part, dtensor.device_mesh, dtensor.placements, run_check=False, shape=shape, stride=stride)
        for part in local_of(t).chunk(count)
    ]


def _from_local(t: Tensor, axes: tuple[str, ...], mesh: Mesh, session: Session) -> Tensor:
    if not t.dim():
        raise PartirError("from_local_batch: a 0-d tensor has no samples; pass it to the model as it is, the same on every rank.")
    shape = (t.shape[0] * mesh.extent(axes), *t.shape[1:])
    dims = (Dim((Part(shape[0], axes),)), *(Dim((Part(size),)) for size in shape[1:]))
    layout = Layout(dtype_name(t.dtype), dims).strip(mesh)
    return make_dtensor(t.detach().contiguous(), layout_spec(layout, t.dtype, session.groups.device_mesh(layout)))


def _batch(model: nn.Module | Plan) -> tuple[tuple[str, ...], int, Mesh]:
    """Return the axes that split the batch, major to minor, its size, and the mesh."""
    if isinstance(model, Plan):
        return (*batch_axes(model.compiled, model.mesh), model.mesh)
    state = parallelized(model)
    first = next(iter(state.compiled()), None)
    if first is None:
        raise PartirError(
            f"{state.original.__name__} is not compiled yet, so nothing says which rank needs which samples. Give parallelize "
            "example_inputs, call the model once with the whole batch, or ask a partir.plan."
        )
    return (*batch_axes(cast(Compiled, first), state.mesh), state.mesh)


def batch_axes(compiled: Compiled, mesh: Mesh) -> tuple[tuple[str, ...], int]:
    """Return the axes over which the first call that splits an input by its first dim does so, and the size of that dim."""
    size = None
    kinds = {slot.name: slot.kind for slot in compiled.program.inputs}
    placeholders = [node for node in compiled.annotated.graph.nodes if node.op == "placeholder"]
    for slot, node in zip(compiled.program.inputs, placeholders, strict=True):
        if kinds[slot.name] != "input" or not slot.shape:
            continue
        size = slot.shape[0] if size is None else size
        layouts = [cast(Layout, node.meta["layout"])]
        layouts += [wanted for user in node.users for wanted, read in zip(user.meta.get("operands", ()), operands(user)) if read is node]
        split = [layout.strip(mesh).dims[0].parts[0].axes for layout in layouts if slot.shape[0] == size]
        found = next((axes for axes in split if axes), None)
        if found:
            return found, size
    if size is None:
        raise PartirError("the model takes no tensor with a first dim, so it has no batch.")
    return (), size


def _check_size(size: int, axes: tuple[str, ...], mesh: Mesh) -> None:
    if size % mesh.extent(axes):
        raise PartirError(
            f"a batch of {size} samples is not divisible by {'.'.join(axes)}={mesh.extent(axes)}, the ranks of mesh {mesh} that share it. "
            "Drop the last batch (drop_last=True), or pass whole batches on every rank."
        )
