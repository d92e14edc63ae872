"""Where a parameter rests: as its first use wants it, split further along every axis that the use leaves out.

    used as f[out@y, in@z]  rests f[out@y.x, in@z]      used as f[n@y]  rests f[n@y.z.x]      used as f[n@z]  rests f[n@z.x]

On the parameters' DeviceMesh, ordered (data, y, z, x), each of these is a plain Shard placement; an axis that would break
that order is left out, and the parameter is whole along it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from torch.fx import Node

from partir.assignment import Call
from partir.errors import LayoutError, MeshError, source_line
from partir.layout import Dim, Layout, Part, legal_extents
from partir.mesh import Mesh
from partir.rules.placement import Placement

PLAIN_ORDER = ("data", "y", "z", "x")


def parameter_layout(
    name: str, wanted: Layout, grad: bool, mesh: Mesh, placement: Placement, vectors: str
) -> Layout:
    """Return the layout at rest of a parameter whose first use wants ``wanted``.

    Raises:
        LayoutError: the weight of a product has no dim that its direction divides.
    """
    layout = replace(wanted, pending=(), varied=(), grad=grad)
    if len(wanted.dims) == 1:
        vector = _vector(layout, mesh, placement, vectors)
        if vector is not None:
            return vector
    for axis in PLAIN_ORDER[1:]:
        if axis in mesh.names and axis not in layout.split_axes:
            layout = _append(layout, axis, mesh)
    _check_direction(name, wanted, layout, mesh, placement)
    return layout


def _append(layout: Layout, axis: str, mesh: Mesh) -> Layout:
    """Split the first dim that ``axis`` divides and whose order of axes stays plain."""
    for index, dim in enumerate(layout.dims):
        axes = (*dim.all_axes, axis)
        if list(axes) != sorted(axes, key=PLAIN_ORDER.index):
            continue
        if dim.local_size(mesh) % mesh[axis]:
            continue
        split = Dim(dim.parts, (*dim.axes, axis))
        return replace(layout, dims=(*layout.dims[:index], split, *layout.dims[index + 1 :]))
    return layout


def _check_direction(name: str, wanted: Layout, layout: Layout, mesh: Mesh, placement: Placement) -> None:
    """A matrix of a product that stayed whole along its direction would be held more than once."""
    axis = placement.direction(placement.start, "b")
    others = [other for other in PLAIN_ORDER[1:] if other != axis and mesh[other] > 1]
    if len(layout.dims) < 2 or mesh[axis] == 1 or axis in layout.split_axes or not set(others) <= set(wanted.split_axes):
        return
    local = wanted.local_shape(mesh)
    raise LayoutError(
        f"{name}: no dim of its block {list(local)} ({wanted}) is divisible by {axis}={mesh[axis]}, along which a weight is split "
        f"further at rest. Legal {axis} for dim 0: {legal_extents(local[0])}."
    )


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


def product_error(
    node: Node, call: Call, letter: str, names: Iterable[str], axes: tuple[str, ...], mesh: Mesh
) -> LayoutError:
    """Return the error for a product's index that its axes do not divide."""
    words = {"m": "rows (batch, sequence)", "k": "input features", "n": "output features"}
    sizes = [call.subdim(pair).size for pair in call.subfactors(names)]
    shown = "*".join(str(size) for size in sizes) or "1"
    axis = ".".join(axes)
    legal = legal_extents(math.lcm(*sizes) if len(sizes) == 1 else max(sizes, default=1))
    return LayoutError(
        f"{source_line(node.meta)}: {words[letter]} {shown} of {node.target} are not divisible by {axis}={mesh.extent(axes)}. "
        f"Legal {axis} for this model: {legal}."
    )
