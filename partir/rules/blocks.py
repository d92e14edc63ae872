"""Run one op in blocks of one factor, as its rule says, on one machine: what check_rules compares with the op."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

import torch

from partir.errors import RuleError
from partir.rules.binding import Binding
from partir.rules.recipe import run_body

Dim = tuple[str, ...]


def take(tensor: torch.Tensor, dims: Sequence[Dim], sizes: Mapping[str, int], factor: str, block: int, count: int) -> torch.Tensor:
    """Return one block of a tensor along a factor (which may be a part of a product dim).

    >>> take(torch.arange(6), [("c", "d")], {"c": 3, "d": 2}, "d", 1, 2).tolist()
    [1, 3, 5]
    """
    for place, dim in enumerate(dims):
        if factor not in dim:
            continue
        before, after = _around(dim, factor, sizes)
        size = sizes[factor] // count
        shape = tensor.shape
        apart = tensor.reshape(*shape[:place], before, sizes[factor], after, *shape[place + 1 :])
        part = apart.narrow(place + 1, block * size, size)
        tensor = part.reshape(*shape[:place], before * size * after, *shape[place + 1 :])
    return tensor


def join(blocks: Sequence[torch.Tensor], dims: Sequence[Dim], sizes: Mapping[str, int], factor: str) -> torch.Tensor:
    """Put blocks along a factor together again."""
    for place, dim in enumerate(dims):
        if factor not in dim:
            continue
        before, after = _around(dim, factor, sizes)
        shape = blocks[0].shape
        size = sizes[factor] // len(blocks)
        apart = [block.reshape(*shape[:place], before, size, after, *shape[place + 1 :]) for block in blocks]
        whole = torch.cat(apart, place + 1)
        return whole.reshape(*shape[:place], before * sizes[factor] * after, *shape[place + 1 :])
    for block in blocks[1:]:
        if not torch.allclose(block.detach(), blocks[0].detach(), equal_nan=True):
            raise RuleError("blocks differ in a result that the rule calls the same on all")
    differentiable = blocks[0].is_floating_point() or blocks[0].is_complex()
    return torch.stack([block / len(blocks) for block in blocks]).sum(0) if differentiable else blocks[0]


def _around(dim: Dim, factor: str, sizes: Mapping[str, int]) -> tuple[int, int]:
    place = dim.index(factor)
    return prod(sizes[name] for name in dim[:place]), prod(sizes[name] for name in dim[place + 1 :])


def run_in_blocks(
    op: Any, binding: Binding, args: Sequence[Any], kwargs: Mapping[str, Any], factor: str, kind: str, axes: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """Return the op's results, computed in blocks of a factor and put together as `kind` says.

    Args:
        axes: the number of blocks by axis, the outer first; what the inner axes hold is put together first.
    """
    count = prod(axes)
    names = [argument.name for argument in op._schema.arguments]
    call = _Call(op, binding, dict(zip(names, args, strict=False)) | dict(kwargs))
    if kind == "split":
        parts = _run_recipe(call, factor, count)
    else:
        parts = [call.block(factor, block, count, kind) for block in range(count)]
    columns = zip(zip(*parts, strict=True), binding.results, strict=True)
    return tuple(_by_axis(list(column), dims, binding, factor, kind, axes) for column, dims in columns)


def _by_axis(
    blocks: list[torch.Tensor], dims: Sequence[Dim], binding: Binding, factor: str, kind: str, axes: Sequence[int]
) -> torch.Tensor:
    """Put blocks together along the innermost axis first."""
    for place in reversed(range(len(axes))):
        count, outer = axes[place], prod(axes[:place])
        sizes = {**binding.sizes, factor: binding.sizes[factor] // outer}
        groups = [blocks[start : start + count] for start in range(0, len(blocks), count)]
        blocks = [_together(group, dims, sizes, factor, kind) for group in groups]
    return blocks[0]


def _together(blocks: list[torch.Tensor], dims: Sequence[Dim], sizes: Mapping[str, int], factor: str, kind: str) -> torch.Tensor:
    kept = any(factor in dim for dim in dims)
    if kind == "max" and not kept:
        return torch.stack(blocks).amax(0)
    if kind == "sum" and not kept:
        return torch.stack(blocks).sum(0)
    return join(blocks, dims, sizes, factor)


@dataclass
class _Call:
    """A call whose operands can be cut."""

    op: Any
    binding: Binding
    values: dict[str, Any]

    def operands(self, factor: str, block: int, count: int) -> list[torch.Tensor]:
        """Return this block's operands."""
        found: list[torch.Tensor] = []
        for (name, element), dims in zip(self.binding.positions, self.binding.operands, strict=True):
            value = self.values[name] if element is None else self.values[name][element]
            found.append(take(value, dims, self.binding.sizes, factor, block, count))
        return found

    def block(self, factor: str, block: int, count: int, kind: str) -> tuple[torch.Tensor, ...]:
        """Run the op on one block."""
        operands = self.operands(factor, block, count)
        local = self.binding.sizes[factor] // count
        masks: list[tuple[int, torch.Tensor]] = []
        for ids, _, indexed in self.binding.index if kind == "sum" else ():
            if indexed == factor:
                shifted = operands[ids] - block * local
                inside = (shifted >= 0) & (shifted < local)
                operands[ids] = shifted.clamp(0, local - 1)
                masks.append((ids, inside))
        for operand, factors in self.binding.once:
            if factor in factors and block > 0:
                operands[operand] = operands[operand] * 0
        results = as_tuple(self._run(operands, factor, local))
        for ids, inside in masks:
            pairs = zip(results, self.binding.results, strict=True)
            results = tuple(self._masked(result, dims, ids, inside) for result, dims in pairs)
        return results

    def _run(self, operands: list[torch.Tensor], factor: str, local: int) -> Any:
        values = dict(self.values)
        for (name, element), tensor in zip(self.binding.positions, operands, strict=True):
            if element is None:
                values[name] = tensor
            else:
                values[name] = [*values[name][:element], tensor, *values[name][element + 1 :]]
        values |= self.binding.localise({factor: local})
        arguments = {argument.name: argument.kwarg_only for argument in self.op._schema.arguments}
        args = [value for name, value in values.items() if not arguments[name]]
        names = [name for name in values if not arguments[name]]
        in_order = names == list(arguments)[: len(names)]
        if in_order:
            return self.op(*args, **{name: value for name, value in values.items() if arguments[name]})
        return self.op(**values)

    def _masked(self, result: torch.Tensor, dims: Sequence[Dim], ids: int, inside: torch.Tensor) -> torch.Tensor:
        """Zero the results of ids outside the local part: the mask has the dims of the ids."""
        mine = self.binding.operands[ids]
        shape = [1] * len(dims)
        for dim in mine:
            place = next((place for place, other in enumerate(dims) if other == dim and dim), None)
            if place is not None:
                shape[place] = prod(self.binding.sizes[name] for name in dim)
        mask = inside.reshape(shape)
        return torch.where(mask, result, torch.zeros((), dtype=result.dtype))


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    """Return an op's results as a tuple, also when it has one."""
    return tuple(cast("Sequence[torch.Tensor]", result)) if isinstance(result, tuple | list) else (result,)


@dataclass
class _Meeting:
    """Where the blocks of a recipe meet to reduce: one thread a block, in lockstep."""

    count: int
    values: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    result: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.count)

    def reduce(self, block: int, kind: str, value: torch.Tensor) -> torch.Tensor:
        self.values[block] = value
        if self.barrier.wait(timeout=60) == 0:
            stacked = torch.stack([self.values[place] for place in range(self.count)])
            self.result = stacked.sum(0) if kind == "sum" else stacked.detach().amax(0)
        self.barrier.wait(timeout=60)
        assert self.result is not None
        result = self.result
        self.barrier.wait(timeout=60)
        return result


@dataclass(frozen=True)
class _BlockBackend:
    """Run a recipe on one block's tensors."""

    meeting: _Meeting
    number: int
    factor: str

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    def reduce(self, kind: str, factors: tuple[str, ...], value: Any) -> Any:
        return self.meeting.reduce(self.number, kind, value) if self.factor in factors else value

    def dtype(self, value: Any) -> torch.dtype:
        return value.dtype


def _run_recipe(call: _Call, factor: str, count: int) -> list[tuple[torch.Tensor, ...]]:
    """Run the recipe for a factor with one thread a block."""
    meeting = _Meeting(count)
    parts: dict[int, tuple[torch.Tensor, ...]] = {}
    failures: list[Exception] = []

    def work(block: int) -> None:
        try:
            body = call.binding.splits[factor]
            operands = call.operands(factor, block, count)
            parts[block] = run_body(body, call.binding, operands, _BlockBackend(meeting, block, factor))
        except Exception as error:  # handed to the caller below
            failures.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(block,)) for block in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((error for error in failures if not isinstance(error, threading.BrokenBarrierError)), failures[0])
    return [parts[block] for block in range(count)]
