"""Where a parameter rests: as its first use wants it, split further along every axis that the use leaves out.

    used as f[out@y, in@z]  rests f[out@y.x, in@z]      used as f[n@y]  rests f[n@y.z.x]      used as f[n@z]  rests f[n@z.x]

On the parameters' DeviceMesh, ordered (data, y, z, x), each of these is a plain Shard placement; an axis that would break
that order is left out, and the parameter is whole along it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch.fx import Node

from partir.assignment import Call
from partir.errors import LayoutError, source_line
from partir.layout import Dim, Layout, Part, legal_extents
from partir.mesh import Mesh
from partir.rules.placement import Placement

PLAIN_ORDER = ("data", "y", "z", "x")


def parameter_layout(node: Node, wanted: Layout, mesh: Mesh, placement: Placement, vectors: str) -> Layout:
    """Return the layout at rest of a parameter whose first use wants ``wanted``."""
    if vectors == "diagonal" and len(wanted.dims) == 1:
        diagonal = _diagonal(wanted, mesh)
        if diagonal is not None:
            return diagonal
    layout = replace(wanted, pending=(), varied=(), grad=node.meta["grad"])
    for axis in PLAIN_ORDER[1:]:
        if axis in mesh.names and axis not in layout.split_axes:
            layout = _append(layout, axis, mesh)
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


def _diagonal(wanted: Layout, mesh: Mesh) -> Layout | None:
    """The paper's Algorithms 7-8: b_ji on rank (i, j, j), split over y then x."""
    used = wanted.split_axes
    if len({"y", "z"}.intersection(used)) != 1 or {"x", "data"}.intersection(used):
        return None
    parts = tuple(Part(part.size, tuple("y" for _ in part.axes)) for part in wanted.dims[0].parts)
    if Dim(parts).local_size(mesh) % mesh["x"]:
        return None
    return Layout(wanted.dtype, (Dim(parts, ("x",)),), grad=wanted.grad, owner=("y", "z"))


def product_error(
    node: Node, call: Call, letter: str, names: Iterable[str], axes: tuple[str, ...], mesh: Mesh
) -> LayoutError:
    """Return the error for a product's index that its axes do not divide."""
    words = {"m": "rows (batch, sequence)", "k": "input features", "n": "output features"}
    sizes = [call.subdim(pair).size for pair in call.subfactors(names)]
    shown = "*".join(str(size) for size in sizes) or "1"
    axis = ".".join(axes)
    needed = " or ".join(f"{axis}={mesh.extent(axes)}" for _ in [0])
    legal = "; ".join(f"{size}: {legal_extents(size)}" for size in sizes) or "1"
    return LayoutError(
        f"{source_line(node.meta)}: {words[letter]} of {node.target}, size {shown}, are not divisible by {needed}. "
        f"Legal sizes of {axis} for {legal}."
    )
