"""The mesh: named axes of ranks, row-major, with z (the costliest axis) nearest.

    >>> mesh = Mesh.parse((2, 3, 4))
    >>> print(mesh, mesh.size, mesh["y"], mesh["data"])
    (x=2, y=3, z=4) 24 3 1
    >>> mesh.coordinate(23)
    {'x': 1, 'y': 2, 'z': 3}
    >>> mesh.group(0, ("y",))
    (0, 4, 8)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from partir.errors import MeshError

AXES = ("data", "x", "y", "z")
MOST_RANKS = 2**31 - 1


@dataclass(frozen=True)
class Mesh:
    """A mesh of ranks.

    Args:
        names: axis names, a subset of ``data, x, y, z`` in that order.
        sizes: ranks along each axis, 1 or more.

    Raises:
        MeshError: unknown or repeated names, sizes that are not positive integers.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in AXES:
                raise MeshError(f"mesh axis {name!r} is unknown. Axes are {', '.join(AXES)}.")
        if len(set(self.names)) != len(self.names):
            raise MeshError(f"mesh axes {self.names} name an axis twice.")
        if len(self.names) != len(self.sizes):
            raise MeshError(f"mesh has {len(self.names)} axes and {len(self.sizes)} sizes; give one size an axis.")
        for name, size in zip(self.names, self.sizes):
            if isinstance(size, bool) or not isinstance(cast(object, size), int):
                raise MeshError(f"mesh axis {name} has size {size!r}, a {type(size).__name__}; sizes are integers.")
            if size < 1:
                raise MeshError(f"mesh axis {name} has size {size}; sizes are 1 or more.")
        if self.size > MOST_RANKS:
            raise MeshError(f"mesh {self} has {self.size:,} ranks; torch.distributed counts up to {MOST_RANKS:,}.")

    @classmethod
    def parse(cls, spec: Any) -> Mesh:
        """Return the mesh that a user means by ``spec``.

        Args:
            spec: ``(x, y, z)``, ``(data, x, y, z)``, a dict by axis name, a Mesh, or a torch
                ``DeviceMesh`` whose dims are named (or that has 3 or 4 unnamed dims).

        Raises:
            MeshError: anything else.
        """
        if isinstance(spec, Mesh):
            return spec
        if isinstance(spec, Mapping):
            return cls._from_names({str(k): v for k, v in cast("Mapping[Any, Any]", spec).items()})
        if hasattr(spec, "mesh_dim_names") and hasattr(spec, "shape"):
            return cls._from_device_mesh(spec)
        if isinstance(spec, Sequence) and not isinstance(spec, str):
            return cls._from_sizes(tuple(cast("Sequence[Any]", spec)))
        raise MeshError(f"mesh {spec!r} is not understood: give (x, y, z), (data, x, y, z), a dict by axis name or a DeviceMesh.")

    @classmethod
    def _from_sizes(cls, sizes: tuple[Any, ...]) -> Mesh:
        if len(sizes) not in (3, 4):
            raise MeshError(f"mesh {sizes} has {len(sizes)} sizes; give 3 (x, y, z) or 4 (data, x, y, z).")
        return cls(AXES[-len(sizes) :], sizes)

    @classmethod
    def _from_names(cls, named: Mapping[str, Any]) -> Mesh:
        unknown = sorted(set(named) - set(AXES))
        if unknown:
            raise MeshError(f"mesh axis {unknown[0]!r} is unknown. Axes are {', '.join(AXES)}.")
        names = ("data", "x", "y", "z") if "data" in named else ("x", "y", "z")
        return cls(names, tuple(named.get(name, 1) for name in names))

    @classmethod
    def _from_device_mesh(cls, device_mesh: Any) -> Mesh:
        sizes = tuple(int(size) for size in device_mesh.shape)
        if device_mesh.mesh_dim_names is None:
            return cls._from_sizes(sizes)
        names = tuple(str(name) for name in device_mesh.mesh_dim_names)
        if list(names) != sorted(names, key=lambda name: AXES.index(name) if name in AXES else -1):
            raise MeshError(f"DeviceMesh dims {names} are not in the order {', '.join(AXES)}.")
        return cls._from_names(dict(zip(names, sizes)))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    def __getitem__(self, axis: str) -> int:
        return self._size_of.get(axis, 1)

    def __str__(self) -> str:
        return "(" + ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes)) + ")"

    def extent(self, axes: Sequence[str]) -> int:
        """Return the number of ranks in a group over ``axes``."""
        return math.prod([self._size_of.get(axis, 1) for axis in axes])

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return a rank's place along each axis."""
        place: dict[str, int] = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes)):
            rank, place[name] = divmod(rank, size)
        return {name: place[name] for name in self.names}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """Return the rank at a coordinate (axes left out are at 0)."""
        number = 0
        for name, size in zip(self.names, self.sizes):
            number = number * size + coordinate.get(name, 0)
        return number

    def index(self, rank: int, axes: Sequence[str]) -> int:
        """Return a rank's row-major place in its group over ``axes``."""
        place, number = self.coordinate(rank), 0
        for axis in axes:
            number = number * self[axis] + place.get(axis, 0)
        return number

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only along ``axes``, row-major in the order given."""
        place = self.coordinate(rank)
        spans = [range(self[axis]) for axis in axes]
        return tuple(self.rank({**place, **dict(zip(axes, where))}) for where in itertools.product(*spans))

    def groups(self, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return every group over ``axes``, ordered by its first rank."""
        return tuple(self.group(rank, axes) for rank in range(self.size) if self.index(rank, axes) == 0)

    def split_axes(self) -> tuple[str, ...]:
        """Return the axes that have more than one rank."""
        return self._split_axes

    @cached_property
    def _size_of(self) -> dict[str, int]:
        return dict(zip(self.names, self.sizes))

    @cached_property
    def _split_axes(self) -> tuple[str, ...]:
        return tuple(name for name, size in zip(self.names, self.sizes) if size > 1)


_current: ContextVar[Mesh | None] = ContextVar("partir_mesh", default=None)


@contextmanager
def use_mesh(mesh: Mesh) -> Generator[None]:
    """Make ``mesh`` the one that collectives' fake formulas read."""
    token = _current.set(mesh)
    try:
        yield
    finally:
        _current.reset(token)


def current_mesh() -> Mesh:
    """Return the mesh in use.

    Raises:
        MeshError: outside ``use_mesh``.
    """
    mesh = _current.get()
    if mesh is None:
        raise MeshError("a partir collective was called outside a mesh; run it through partir.parallelize.")
    return mesh
