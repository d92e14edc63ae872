"""Split and join one part of a layout's dim: what `addressing.py` does to a block, done to its layout."""

from __future__ import annotations

from partir.dims import Dim, Part
from partir.mesh import Mesh

Axes = tuple[str, ...]


def join_dim(dim: Dim, axes: Axes, blocks: int, mesh: Mesh) -> Dim | None:
    """Return `dim` without `axes`, if they are innermost in the part that `blocks` addresses, else None.

    >>> print(join_dim(Dim((Part(3), Part(768, ("y",))), ("x",)), ("x",), 1, Mesh.parse((4, 2, 2))))
    (3*768@y)
    """
    if dim.axes:
        innermost = blocks == 1 and dim.axes[-len(axes) :] == axes
        return Dim(dim.parts, dim.axes[: -len(axes)]) if innermost else None
    before = 1
    for index, part in enumerate(dim.parts):
        if before == blocks and part.axes[-len(axes) :] == axes:
            joined = Part(part.size, part.axes[: -len(axes)])
            return Dim((*dim.parts[:index], joined, *dim.parts[index + 1 :]))
        before *= _local(part, mesh)
    return None


def split_dim(dim: Dim, axes: Axes, blocks: int, mesh: Mesh) -> Dim | None:
    """Return `dim` with `axes` innermost in the part that `blocks` addresses, or None if no size divides.

    `blocks` may point inside a part: an unsplit `2304` is `3*768` as well. Where the first part does
    not divide, the whole local dim is split: that is the flat split of a fused parameter.

    >>> mesh = Mesh.parse((4, 2, 2))
    >>> fused = split_dim(Dim((Part(2304),)), ("y",), 3, mesh)
    >>> print(fused, split_dim(fused, ("x",), 1, mesh))
    (3*768@y) (3*768@y)@x
    """
    extent, before = mesh.extent(axes), 1
    if not dim.axes:
        for index, part in enumerate(dim.parts):
            local = _local(part, mesh)
            outer = blocks // before
            if blocks % before == 0 and local % (outer * extent) == 0:
                pieces = _split_part(part, outer, axes, mesh)
                return Dim((*dim.parts[:index], *pieces, *dim.parts[index + 1 :]))
            before *= local
    whole = dim.local_size(mesh)
    return Dim(dim.parts, dim.axes + axes) if blocks == 1 and whole % extent == 0 else None


def _split_part(part: Part, outer: int, axes: Axes, mesh: Mesh) -> tuple[Part, ...]:
    if outer == 1:
        return (Part(part.size, part.axes + axes),)
    return Part(outer * mesh.extent(part.axes), part.axes), Part(_local(part, mesh) // outer, axes)


def _local(part: Part, mesh: Mesh) -> int:
    return part.size // mesh.extent(part.axes)


def rename_axis(dim: Dim, old: str, new: str) -> Dim:
    """Return `dim` with axis `old` called `new`: on the diagonal both have one coordinate."""
    parts = tuple(Part(part.size, _renamed(part.axes, old, new)) for part in dim.parts)
    return Dim(parts, _renamed(dim.axes, old, new))


def _renamed(axes: Axes, old: str, new: str) -> Axes:
    return tuple(new if axis == old else axis for axis in axes)
