"""Run one function as every rank of a mesh, each in a thread, its collectives through the real kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from partir.collectives import lockstep, use_backend
from partir.mesh import Mesh, use_mesh

T = TypeVar("T")


class World:
    """The meeting point of all ranks: what one brings, all see."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.barrier = threading.Barrier(mesh.size, timeout=30)
        self.slots: list[Any] = [None] * mesh.size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values


class ThreadBackend:
    """One rank's end: every collective is its lockstep function on the blocks of the group."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.mesh = world, rank, world.mesh

    def _run(self, name: str, t: Tensor, axes: tuple[str, ...], /, **args: Any) -> Tensor:
        values = self.world.exchange(self.rank, t.detach())
        return lockstep.run(name, values, self.mesh, ".".join(axes), **args)[self.rank].clone()

    def coordinate(self, axes: tuple[str, ...]) -> int:
        return self.mesh.index(self.rank, axes)

    def all_gather(self, t: Tensor, axes: tuple[str, ...], dim: int, blocks: int) -> Tensor:
        return self._run("all_gather", t, axes, dim=dim, blocks=blocks)

    def reduce_scatter(self, t: Tensor, axes: tuple[str, ...], dim: int, blocks: int) -> Tensor:
        return self._run("reduce_scatter", t, axes, dim=dim, blocks=blocks)

    def all_reduce(self, t: Tensor, axes: tuple[str, ...], op: str) -> Tensor:
        return self._run("all_reduce", t, axes, op=op)

    def all_to_all(
        self, t: Tensor, axes: tuple[str, ...], src: int, dst: int, src_blocks: int, dst_blocks: int
    ) -> Tensor:
        return self._run("all_to_all", t, axes, src=src, dst=dst, src_blocks=src_blocks, dst_blocks=dst_blocks)

    def broadcast(self, t: Tensor, axes: tuple[str, ...], root: str) -> Tensor:
        return self._run("broadcast", t, axes, root=root)

    def reduce_to(self, t: Tensor, axes: tuple[str, ...], root: str) -> Tensor:
        return self._run("reduce_to", t, axes, root=root)


class Loopback(ThreadBackend):
    """A rank alone whose peers hold the same block as it does: no threads, any group size."""

    def __init__(self, mesh: Mesh, rank: int = 0) -> None:
        super().__init__(World(mesh), rank)

    def _run(self, name: str, t: Tensor, axes: tuple[str, ...], /, **args: Any) -> Tensor:
        return lockstep.run(name, [t.detach()] * self.mesh.size, self.mesh, ".".join(axes), **args)[self.rank].clone()


def run_ranks(mesh: Mesh, function: Callable[[int], T]) -> list[T]:
    """Return `function(rank)` of every rank, all running at once; the first error is raised."""
    world = World(mesh)
    results: list[Any] = [None] * mesh.size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            with use_mesh(mesh), use_backend(ThreadBackend(world, rank)):
                results[rank] = function(rank)
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            world.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return results
