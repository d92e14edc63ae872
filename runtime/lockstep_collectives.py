"""What each partir op does to a column: the value of a node on every rank of the mesh at once.

Data moves here, so bytes are counted here, from the tensors that a rank takes from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from partir.collectives import lockstep, split_axes
from partir.mesh import Mesh
from partir.runtime import record

Column = list[Any]
OnColumn = Callable[[Column], Column]

LOCAL = frozenset({"slice", "zero_pad", "spread", "settle", "once"})
GATHERS = frozenset({"all_gather", "all_gather_same"})


def bind_collective(name: str, arguments: dict[str, Any], mesh: Mesh, stage: str) -> OnColumn:
    """Return the function of a column that runs one collective of a graph.

    Args:
        name: the partir op.
        arguments: its arguments by name, without the tensor.
        mesh: gives the groups.
        stage: ``"forward"`` or ``"backward"``, for the record.
    """
    axes = split_axes(arguments["axis"])
    if name == "coordinate":
        return _coordinate(axes, arguments["device"], mesh)
    if name in LOCAL:
        return _local(name, axes, arguments, mesh)
    return _moving(name, axes, arguments, mesh, stage)


def _coordinate(axes: tuple[str, ...], device: torch.device, mesh: Mesh) -> OnColumn:
    indexes = [mesh.index(rank, axes) for rank in range(mesh.size)]

    def run(_: Column) -> Column:
        values = {index: lockstep.coordinate(index, device) for index in sorted(set(indexes))}
        return [values[index] for index in indexes]

    return run


def _local(name: str, axes: tuple[str, ...], arguments: dict[str, Any], mesh: Mesh) -> OnColumn:
    formula: Callable[..., Tensor] = getattr(lockstep, name)
    size = mesh.extent(axes)
    indexes = [mesh.index(rank, axes) for rank in range(mesh.size)]
    rest = (arguments["dim"], arguments["blocks"]) if name in ("slice", "zero_pad") else ()

    def run(column: Column) -> Column:
        made: dict[tuple[int, int], Tensor] = {}
        result: Column = []
        for tensor, index in zip(column, indexes, strict=True):
            key = (id(tensor), index)
            if key not in made:
                made[key] = formula(tensor, index, size, *rest)
            result.append(made[key])
        return result

    return run


def _moving(name: str, axes: tuple[str, ...], arguments: dict[str, Any], mesh: Mesh, stage: str) -> OnColumn:
    groups = mesh.groups(axes)
    formula = _formula(name, axes, arguments, mesh)

    def run(column: Column) -> Column:
        result: Column = [None] * mesh.size
        made: dict[tuple[int, ...], list[Any]] = {}
        for group in groups:
            blocks = [column[rank] for rank in group]
            key = (_root(name, arguments, mesh, group[0]), *(id(block) for block in blocks))
            if key not in made:
                made[key] = formula(blocks, group[0])
            for rank, value in zip(group, made[key], strict=True):
                result[rank] = value
            if record.recording():
                _count(name, arguments, group, blocks, made[key], key[0], stage)
        return result

    return run


def _root(name: str, arguments: dict[str, Any], mesh: Mesh, rank: int) -> int:
    """Return the place of a group's root: where the coordinate along the axis equals the group's along ``root``."""
    return mesh.index(rank, (arguments["root"],)) if name in ("broadcast", "reduce_to") else 0


def _formula(
    name: str, axes: tuple[str, ...], arguments: dict[str, Any], mesh: Mesh
) -> Callable[[Any, int], list[Any]]:
    """Return the formula of a collective on the blocks of one group, given also the group's first rank."""
    get = arguments.get
    if name in GATHERS:
        return lambda blocks, _: lockstep.all_gather(blocks, get("dim", 0), get("blocks", 1))
    if name == "reduce_scatter":
        return lambda blocks, _: lockstep.reduce_scatter(blocks, get("dim", 0), get("blocks", 1))
    if name == "all_reduce":
        return lambda blocks, _: lockstep.all_reduce(blocks, get("op", "sum"))
    if name == "all_to_all":
        rest = [get("src", 0), get("dst", 0), get("src_blocks", 1), get("dst_blocks", 1)]
        return lambda blocks, _: lockstep.all_to_all(blocks, *rest)
    if name == "broadcast":
        return lambda blocks, rank: lockstep.broadcast(blocks, _root(name, arguments, mesh, rank))
    if name == "reduce_to":
        return lambda blocks, rank: lockstep.reduce_to(blocks, _root(name, arguments, mesh, rank))
    if name == "all_gather_bucket":
        return lambda blocks, _: lockstep.all_gather_bucket(blocks)
    assert name == "reduce_scatter_bucket", name
    return lambda blocks, _: lockstep.reduce_scatter_bucket(blocks)


def _count(
    name: str,
    arguments: dict[str, Any],
    group: Sequence[int],
    blocks: Sequence[Any],
    results: Sequence[Any],
    root: int,
    stage: str,
) -> None:
    """Tell the record what each rank of a group took from the others."""
    for place, rank in enumerate(group):
        num_bytes = received_bytes(name, place, blocks, results, root)
        record.received(rank=rank, op=name, axis=arguments["axis"], num_bytes=num_bytes, stage=stage)


def received_bytes(name: str, place: int, blocks: Sequence[Any], results: Sequence[Any], root: int = 0) -> int:
    """Return the bytes that the rank at ``place`` of a group takes from the others.

    Args:
        name: the collective.
        place: the rank's place in its group.
        blocks: what each rank of the group gives.
        results: what each of them gets.
        root: the place of the group's root.
    """
    size = len(blocks)
    if name in GATHERS or name == "all_gather_bucket":
        return sum(_nbytes(block) for other, block in enumerate(blocks) if other != place)
    if name in ("reduce_scatter", "reduce_scatter_bucket"):
        return (size - 1) * _nbytes(results[place])
    if name == "all_to_all":
        return _nbytes(results[place]) // size * (size - 1)
    if name == "all_reduce":
        chunk = -(-blocks[place].numel() // size)
        return 2 * (size - 1) * chunk * blocks[place].element_size()
    if name == "broadcast":
        return 0 if place == root else _nbytes(results[place])
    assert name == "reduce_to", name
    return (size - 1) * _nbytes(results[place]) if place == root else 0


def _nbytes(value: Tensor | Sequence[Tensor]) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_nbytes(item) for item in value)
