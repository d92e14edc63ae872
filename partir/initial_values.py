"""Initial values of a model that was built on meta: of each tensor only the block that a rank holds, the same on every mesh.

A tensor that its init functions only fill, draw and change element by element is made so, a chunk at a time: an element is a function
of the seed, of the draw and of its place in the whole tensor. Any other (`orthogonal_`) is made whole on the CPU, and a notice says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partir.blocks import is_owner, shard
from partir.dims import Dim
from partir.initial_regions import Region, region_of
from partir.initial_tape import TRUNCATED_NORMAL, Initialize, Step, Tape, is_recorded, meta_tensors, record, storage_of, truncated
from partir.layout import Layout, dtype_name
from partir.mesh import Mesh
from partir.passes.functionalize import functional_op
from partir.random_numbers import AtIndex, seed_tensor
from partir.random_ops import DRAWN, draw_with, positional
from partir.runtime.initial_blocks import stand_in

CHUNK = 2**20
"""Elements that are made at once."""
CALL = -1
"""The call number of what is drawn before the first call."""
aten = torch.ops.aten
_FILLS = frozenset({aten.zero_.default, aten.fill_.Scalar})
_ONE = Mesh.parse((1, 1, 1))


class InitialValues:
    """The initial values of a meta model's tensors.

    Args:
        model: on meta.
        seed: of all draws.
        initialize: what the user does after the model's own init functions.

    Raises:
        PartirError: the tape cannot be recorded, or leaves a tensor unset.
    """

    def __init__(self, model: nn.Module, seed: int, initialize: Initialize | None = None) -> None:
        self.seed = seed_tensor(seed, CALL)
        self.tape: Tape = record(model, initialize)
        names = {id(t): name for name, t in [*model.named_buffers(), *model.named_parameters()]}
        self._elementwise = {key: _elementwise(self.tape, t) for key, t in self.tape.tensors.items()}
        parameters = [key for key, t in self.tape.tensors.items() if isinstance(t, nn.Parameter)]
        whole = [names[key] for key in parameters if self._elementwise[key] is None]
        if whole:
            warnings.warn(
                f"{type(model).__name__}: the init of {', '.join(whole)} is not elementwise, so each rank makes that tensor whole for a "
                "moment.",
                stacklevel=4,
            )

    def whole(self, t: Tensor, device: torch.device) -> Tensor:
        """Return all of what a meta tensor is to hold."""
        fake = self.tape.tensors[id(t)]
        return self.block(t, Layout.whole(fake), _ONE, 0, device)

    def block(self, t: Tensor, layout: Layout, mesh: Mesh, rank: int, device: torch.device) -> Tensor:
        """Return the block of a meta tensor's values that a rank holds."""
        fake, steps = self.tape.tensors[id(t)], self._elementwise[id(t)]
        if not is_owner(layout, mesh, rank):
            return torch.empty((0,) * max(fake.dim(), 1), dtype=fake.dtype, device=device)
        if steps is None:
            with cast(Any, torch.random).fork_rng([]):
                found = _replay(self.tape.steps_of(fake), fake, self.seed)
            return shard(found, layout, mesh, rank).to(device, copy=True).contiguous()
        block = torch.empty(layout.local_shape(mesh), dtype=fake.dtype, device=device)
        flat, vectors = block.view(-1), [_places(dim, mesh, rank, device) for dim in layout.dims]
        for start in range(0, flat.numel(), CHUNK):
            chunk = flat[start : start + CHUNK]
            places = _unravel(torch.arange(start, start + chunk.numel(), device=device), vectors)
            chunk.copy_(self._values(steps, fake, places))
        return block

    def _values(self, steps: Sequence[tuple[Step, Region | None]], fake: Tensor, places: Sequence[Tensor]) -> Tensor:
        index = torch.zeros_like(places[0])
        for place, size in zip(places, fake.shape):
            index = index * size + place
        values = torch.zeros(index.shape, dtype=fake.dtype, device=index.device)
        for step, region in steps:
            changed = self._changed(step, values, index)
            values = changed if region is None else torch.where(region.holds(places), changed, values)
        return values

    def _changed(self, step: Step, values: Tensor, index: Tensor) -> Tensor:
        if step.site is None:
            return step.op(values.clone(), *step.args[1:], **step.kwargs)
        return _draw(step, values, index, self.seed)


def _draw(step: Step, values: Tensor, index: Tensor, seed: Tensor, arguments: Sequence[Any] | None = None) -> Tensor:
    """Return what a step draws for elements.

    Args:
        values: what the elements hold before.
        index: int64, the place of each in its tensor.
        arguments: of the step, where some are tensors that have values now.
    """
    assert step.site is not None
    numbers = AtIndex(seed, step.site, Layout(dtype_name(values.dtype), ()), values.device, (), index)
    if step.op is TRUNCATED_NORMAL:
        return truncated(numbers.uniform(torch.float64), *step.args[1:]).to(values.dtype)
    given = step.args if arguments is None else arguments
    return draw_with(functional_op(step.op), (values, *positional(step.op, given, step.kwargs)[1:]), numbers)


def _elementwise(tape: Tape, t: Tensor) -> list[tuple[Step, Region | None]] | None:
    """Return the steps that make a tensor element by element, with the region of each (None: all); None where there is another."""
    found: list[tuple[Step, Region | None]] = []
    for step in tape.steps_of(t):
        if _is_view(step):
            continue
        target = step.args[0] if step.args else None
        alone = len(step.reads()) == 1
        if not isinstance(target, Tensor) or storage_of(target) != storage_of(t) or not alone or not _is_elementwise(step):
            return None
        region = region_of(target, t)
        if region is None:
            return None
        found.append((step, None if region.runs == tuple((0, int(n), 1) for n in t.shape) else region))
    return found


def _is_view(step: Step) -> bool:
    """Return whether a step only gives another look at a tensor."""
    reads = {storage_of(t) for t in step.reads()}
    made = {storage_of(t) for t in step.writes()}
    return not step.op._schema.is_mutable and bool(made) and made <= reads


def _is_elementwise(step: Step) -> bool:
    if not step.op._schema.is_mutable:
        return False
    if step.site is not None:
        return _draws_by_place(step)
    return step.op in _FILLS or torch.Tag.pointwise in step.op.tags


def _places(dim: Dim, mesh: Mesh, rank: int, device: torch.device) -> Tensor:
    """Return the global index in a dim of each of a rank's indices."""
    return shard(torch.arange(dim.size, device=device), Layout("i64", (dim,)), mesh, rank)


def _unravel(flat: Tensor, vectors: Sequence[Tensor]) -> list[Tensor]:
    """Return the global index in each dim of elements of a block, given by their flat index in it."""
    places: list[Tensor] = []
    for vector in reversed(vectors):
        places.append(vector[flat % len(vector)])
        flat = flat // len(vector)
    return places[::-1] or [flat]


def _replay(steps: Sequence[Step], t: Tensor, seed: Tensor) -> Tensor:
    """Run steps on whole tensors of the CPU and return what `t` holds then."""
    made: dict[int, Tensor] = {}
    bases: dict[int, Tensor] = {}

    def real(value: Any) -> Any:
        if not is_recorded(value):
            return value
        if id(value) not in made:
            made[id(value)] = _look(bases, value)
        return made[id(value)]

    for step in steps:
        if _draws_by_place(step):
            target = cast(Tensor, step.args[0])
            target_now = cast(Tensor, real(target))
            target_now.copy_(_draw(step, target_now, _storage_places(target), seed, tree_map(real, step.args)))
            continue
        if step.site is not None:
            cast(Any, torch).manual_seed(int(seed[0]) ^ (step.site + 1) * 0x9E3779B9)
        result = step.op(*tree_map(real, step.args), **tree_map(real, dict(step.kwargs)))
        for fake, found in zip(_leaves(step.result), _leaves(result)):
            made.setdefault(id(fake), found)
            bases.setdefault(storage_of(fake), found)
    return cast(Tensor, real(t)).detach()


def _draws_by_place(step: Step) -> bool:
    """Return whether a step draws into a tensor: the same numbers, whether the tensor is made whole, for another's sake, or in blocks."""
    into = step.site is not None and step.op._schema.is_mutable and step.args and isinstance(step.args[0], Tensor)
    return bool(into) and (step.op is TRUNCATED_NORMAL or functional_op(step.op) in DRAWN)


def _storage_places(view: Tensor) -> Tensor:
    """Return where in its storage each element of a view lies: its index in a contiguous tensor that has all of it."""
    places = torch.full((), int(view.storage_offset()), dtype=torch.int64)
    for size, stride in zip(view.shape, view.stride()):
        places = places.unsqueeze(-1) + torch.arange(int(size)) * int(stride)
    return places


def _look(bases: dict[int, Tensor], fake: Tensor) -> Tensor:
    """Return the real tensor that a fake one stands for: a view of its storage's."""
    key = storage_of(fake)
    if key not in bases:
        numel = fake.untyped_storage().nbytes() // fake.element_size()
        bases[key] = torch.zeros(numel, dtype=fake.dtype)
    return bases[key].as_strided(fake.shape, fake.stride(), fake.storage_offset())


def _leaves(value: Any) -> list[Tensor]:
    values = cast("Sequence[Any]", value) if isinstance(value, (tuple, list)) else [value]
    return [leaf for leaf in values if isinstance(leaf, Tensor)]


def default_device() -> torch.device:
    """Return torch's default device, the CPU inside a `torch.device("meta")` block."""
    device = torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device


def materialize(model: nn.Module, values: InitialValues, device: torch.device, whole: bool) -> None:
    """Put values, or parameters that await a rank's block of them, in the place of meta tensors. Tied ones stay one; buffers are whole.

    Args:
        whole: give parameters all of their values at once.
    """
    made: dict[int, Tensor] = {}
    for owner, name, t in meta_tensors(model):
        if id(t) not in made:
            made[id(t)] = _real(t, values, device, whole)
        owner[name] = made[id(t)]


def _real(t: Tensor, values: InitialValues, device: torch.device, whole: bool) -> Tensor:
    if not isinstance(t, nn.Parameter):
        return values.whole(t, device)
    if whole:
        return nn.Parameter(values.whole(t, device), t.requires_grad)

    def make(layout: Layout, mesh: Mesh, rank: int) -> Tensor:
        return values.block(t, layout, mesh, rank, device)

    return stand_in(t, device, make)
