"""Where a parameter rests: as its first use wants it, split further along every axis that the use leaves out.

    used as f[out@y, in@z]  rests f[out@y.x, in@z]      used as f[n@y]  rests f[n@y.z.x]      used as f[n@z]  rests f[n@z.x]

On the parameters' DeviceMesh, ordered (data, y, z, x), each of these is a plain Shard placement. An axis goes innermost where that
keeps the order, else where the order wants it (a table whose rows no axis divides rests f[50257, h@y.z.x]); an axis that divides
no dim is left out, and the parameter is whole along it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from partir.dims import Dim, Part
from partir.errors import MeshError
from partir.layout import Layout
from partir.mesh import Mesh
from partir.rules.placement import Placement

PLAIN_ORDER = ("data", "y", "z", "x")


def parameter_layout(wanted: Layout, grad: bool, mesh: Mesh, placement: Placement, vectors: str) -> Layout:
    """Return the layout at rest of a parameter whose first use wants ``wanted``."""
    layout = replace(wanted, pending=(), varied=(), grad=grad)
    if len(wanted.dims) == 1:
        vector = _vector(layout, mesh, placement, vectors)
        if vector is not None:
            return vector
    for axis in PLAIN_ORDER[1:]:
        if axis in mesh.names and axis not in layout.split_axes:
            layout = _append(layout, axis, mesh) or _insert(layout, axis, mesh) or layout
    return layout


def _append(layout: Layout, axis: str, mesh: Mesh) -> Layout | None:
    """Split the first dim that ``axis`` divides and whose order of axes stays plain."""
    for index, dim in enumerate(layout.dims):
        axes = (*dim.all_axes, axis)
        if list(axes) != sorted(axes, key=PLAIN_ORDER.index):
            continue
        if dim.local_size(mesh) % mesh[axis]:
            continue
        return _with_dim(layout, index, Dim(dim.parts, (*dim.axes, axis)))
    return None


def _insert(layout: Layout, axis: str, mesh: Mesh) -> Layout | None:
    """Split the first dim without sub-dims that ``axis`` divides, among its axes."""
    for index, dim in enumerate(layout.dims):
        if len(dim.parts) > 1 or dim.local_size(mesh) % mesh[axis]:
            continue
        return _with_dim(layout, index, Dim((Part(dim.size, tuple(sorted((*dim.all_axes, axis), key=PLAIN_ORDER.index))),)))
    return None


def _with_dim(layout: Layout, index: int, dim: Dim) -> Layout:
    return replace(layout, dims=(*layout.dims[:index], dim, *layout.dims[index + 1 :]))


def note_of_copies(name: str, layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    """Say where a parameter is held more than once for want of a size that an axis divides."""
    whole = [axis for axis in PLAIN_ORDER[1:] if mesh[axis] > 1 and axis not in layout.split_axes]
    if not whole or len(layout.dims) < 2:
        return ()
    return (f"{name}: no dim of {layout} is divisible by {', '.join(whole)}: held {mesh.extent(whole)} times",)


def _vector(layout: Layout, mesh: Mesh, placement: Placement, vectors: str) -> Layout | None:
    """Return a vector's rest as the placement file says, by the axis that splits the hidden dim; None where it does not say.

    A fused vector keeps the first axis on its sub-dims: ``(3*768@y)`` rests ``(3*768@y)@z.x``.
    """
    rests, hidden = placement.vectors[vectors], layout.split_axes
    if len(hidden) != 1 or hidden[0] not in rests:
        return None
    rest = rests[hidden[0]]
    if not all(mesh[axis] == 1 or axis in mesh.names for axis in rest.axes):
        return None
    dim = layout.dims[0]
    parts = tuple(Part(part.size, rest.axes[:1] if part.axes else ()) for part in dim.parts)
    split = Dim(parts, tuple(axis for axis in rest.axes[1:] if axis in mesh.names))
    size = math.prod(part.size // mesh.extent(part.axes) for part in parts)
    if size % mesh.extent(rest.axes[1:]):
        return None
    return replace(layout, dims=(split,), owner=rest.owner if rest.owner and mesh[rest.owner[0]] > 1 else None)


def check_vectors(vectors: str, mesh: Mesh, placement: Placement) -> None:
    """Refuse a mesh on which vectors cannot live where the placement puts them.

    Raises:
        MeshError: the diagonal of two axes of different size.
    """
    for rest in placement.vectors[vectors].values():
        if rest.owner and mesh[rest.owner[0]] != mesh[rest.owner[1]]:
            a, b = rest.owner
            raise MeshError(
                f'vectors="{vectors}" keeps vectors on the diagonal {a}={b}, so these axes need one size; '
                f'the mesh is {mesh}. Use vectors="balanced", or a mesh with {a} == {b}.'
            )
