"""What moves the data when a collective runs on real tensors, one rank at a time."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor

from partir.errors import PartirError
from partir.mesh import Mesh

Axes = tuple[str, ...]


class Backend(Protocol):
    """One rank's end of the collectives. Groups are row-major over `axes` in the order given.

    `dim` and `blocks` address the level `n` of a dim of local size `blocks * n` (`addressing.py`).
    Results are new memory. Sums run in one order on every rank, so that results are bitwise equal.
    """

    mesh: Mesh

    def coordinate(self, axes: Axes) -> int: ...
    def all_gather(self, t: Tensor, axes: Axes, dim: int, blocks: int) -> Tensor: ...
    def reduce_scatter(self, t: Tensor, axes: Axes, dim: int, blocks: int) -> Tensor: ...
    def all_reduce(self, t: Tensor, axes: Axes, op: str) -> Tensor: ...
    def all_to_all(self, t: Tensor, axes: Axes, src: int, dst: int, src_blocks: int, dst_blocks: int) -> Tensor: ...
    def broadcast(self, t: Tensor, axes: Axes, root: str) -> Tensor: ...
    def reduce_to(self, t: Tensor, axes: Axes, root: str) -> Tensor: ...


# A ContextVar and not a global: simulated ranks may be threads. An autograd thread for another
# device starts without it, so a backward that runs there sets it again.
_current: ContextVar[Backend | None] = ContextVar("partir_backend", default=None)


@contextmanager
def use_backend(backend: Backend) -> Generator[None]:
    """Run collectives on real tensors through `backend`."""
    token = _current.set(backend)
    try:
        yield
    finally:
        _current.reset(token)


def current_backend(op: str) -> Backend:
    """Return the backend in use.

    Raises:
        PartirError: none is set; `op` is named.
    """
    backend = _current.get()
    if backend is None:
        raise PartirError(
            f"partir::{op} was called on real tensors and no communication backend is set. "
            "Run the program through partir.parallelize, or inside `with partir.collectives.use_backend(...)`."
        )
    return backend
