"""Layouts: where the blocks of a tensor live on the mesh, as a value whose text is its notation.

    >>> rows = Layout.parse("f32[192@x.y, 2048@z]")        # rows over x, then y within; columns over z
    >>> rows.local_shape(Mesh.parse((4, 2, 2))), rows.block, rows.direction
    ((24, 1024), 'ijl', 'y')
    >>> print(Layout.parse("f32[(3*768@y)@x, 768@z]"))      # a fused weight: three parts, each split over y
    f32[(3*768@y)@x, 768@z]
    >>> print(Layout.parse("f32[16@x, (12@y*64)] +z"))      # canonical: a trailing unsplit sub-dim joins
    f32[16@x, 768@y] +z

Per mesh axis a value has one of six types (design: gradients are part of the type):

    S  split in a dim                       cotangent S
    P  pending sum (``+z``)                 cotangent R
    M  pending maximum (``max z``)          no cotangent
    R  the same on all ranks, its gradient a pending sum (``~y``)      cotangent P
    I  the same on all ranks, its gradient too (an axis named nowhere) cotangent I
    N  the same on all ranks, no gradient (``nograd``, integers)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from partir.dims import Dim, Part, join_used_up, parse_dim
from partir.errors import LayoutError
from partir.mesh import AXES, Mesh

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
BLOCK_LETTERS = {"data": "d", "x": "i", "y": "j", "z": "l"}


@dataclass(frozen=True)
class Layout:
    """Where a tensor's blocks live.

    Args:
        dtype: short name, ``f32``.
        dims: one ``Dim`` a tensor dim.
        pending: ``(axis, "sum" | "max")`` for each axis with a pending reduction.
        varied: axes of type R.
        grad: False for values without gradient.
        owner: ``("y", "z")``: only the rank along y whose y equals its z holds the block.

    Raises:
        LayoutError: an axis used twice.
    """

    dtype: str
    dims: tuple[Dim, ...]
    pending: tuple[tuple[str, str], ...] = ()
    varied: tuple[str, ...] = ()
    grad: bool = True
    owner: tuple[str, str] | None = field(default=None)

    def __post_init__(self) -> None:
        order = AXES.index
        object.__setattr__(self, "pending", tuple(sorted(self.pending, key=lambda item: order(item[0]))))
        object.__setattr__(self, "varied", tuple(sorted(self.varied, key=order)))
        if not _is_float(self.dtype):
            object.__setattr__(self, "grad", False)
        seen: set[str] = set()
        for axis in [*self.split_axes, *(axis for axis, _ in self.pending), *self.varied]:
            if axis in seen:
                raise LayoutError(f"layout {self} uses axis {axis} twice; an axis has one type in a layout.")
            seen.add(axis)
        if self.varied and not self.grad:
            raise LayoutError(f"layout {self} has type R without a gradient; such a value is N.")

    @classmethod
    def whole(cls, tensor: torch.Tensor, grad: bool = True) -> Layout:
        """Return the layout of a tensor that every rank holds whole."""
        return cls(dtype_name(tensor.dtype), tuple(Dim((Part(int(n)),)) for n in tensor.shape), grad=grad)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return tuple(dim.size for dim in self.dims)

    @cached_property
    def split_axes(self) -> tuple[str, ...]:
        """Axes of type S in the order of the dims."""
        return tuple(axis for dim in self.dims for axis in dim.all_axes)

    @property
    def block(self) -> str:
        """The paper's block name, in this tensor's own dim order: x -> i, y -> j, z -> l."""
        return "".join(BLOCK_LETTERS[axis] for axis in self.split_axes if axis != "data")

    @property
    def direction(self) -> str | None:
        """The axis along which the tensor is gathered or scattered: the innermost of the first dim that has several."""
        for dim in self.dims:
            if len([axis for axis in dim.all_axes if axis != "data"]) > 1:
                return dim.all_axes[-1]
        return None

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of one rank's block.

        Raises:
            LayoutError: the axes do not divide a sub-dim.
        """
        return tuple(dim.local_size(mesh) for dim in self.dims)

    def type(self, axis: str) -> str:
        """Return the type along ``axis``: one of S P M R I N."""
        if axis in self.split_axes:
            return "S"
        for name, reduction in self.pending:
            if name == axis:
                return "P" if reduction == "sum" else "M"
        if axis in self.varied:
            return "R"
        return "I" if self.grad else "N"

    @cached_property
    def _stripped(self) -> dict[tuple[str, ...], Layout]:
        return {}

    def strip(self, mesh: Mesh) -> Layout:
        """Return this layout without axes of size 1, which say nothing."""
        axes = mesh.split_axes()
        if axes not in self._stripped:
            self._stripped[axes] = self._keep(frozenset(axes))
        return self._stripped[axes]

    def _keep(self, keep: frozenset[str]) -> Layout:
        if keep.issuperset(self.split_axes) and keep.issuperset(self.varied) and keep.issuperset(a for a, _ in self.pending):
            if self.owner is None or self.owner[0] in keep:
                return self
        dims = tuple(
            Dim(tuple(Part(p.size, _kept(p.axes, keep)) for p in dim.parts), _kept(dim.axes, keep)) for dim in self.dims
        )
        pending = tuple(item for item in self.pending if item[0] in keep)
        owner = self.owner if self.owner and self.owner[0] in keep else None
        return replace(self, dims=dims, pending=pending, varied=_kept(self.varied, keep), owner=owner)

    def canonical(self, mesh: Mesh) -> Layout:
        """Return this layout under the one name that its blocks have on this mesh, to compare it with another.

        Where a sub-dim is split to single elements, ``(6@y*12@x)`` holds the blocks of ``72@y.x``. Its own name says more: which
        sub-dim can be gathered.
        """
        if mesh not in self._canonical:
            layout = self.strip(mesh)
            dims = tuple(Dim(join_used_up(dim.parts, mesh), dim.axes) for dim in layout.dims)
            self._canonical[mesh] = layout if dims == layout.dims else replace(layout, dims=dims)
        return self._canonical[mesh]

    @cached_property
    def _canonical(self) -> dict[Mesh, Layout]:
        return {}

    def __str__(self) -> str:
        text = f"{self.dtype}[{', '.join(str(dim) for dim in self.dims)}]"
        text += "".join(f" +{axis}" if reduction == "sum" else f" max {axis}" for axis, reduction in self.pending)
        text += "".join(f" ~{axis}" for axis in self.varied)
        if self.owner:
            text += f" on {self.owner[0]}={self.owner[1]}"
        return text if self.grad or not _is_float(self.dtype) else text + " nograd"

    @classmethod
    def parse(cls, text: str, shape: Sequence[int] | None = None, dtype: str | None = None) -> Layout:
        """Return the layout that a text in partir's notation means.

        Args:
            text: as printed, ``f32[16@x, 256@y] +z``. With ``shape``, sizes may be names:
                ``f[out@y.x, in@z]``.
            shape: global sizes that names stand for.
            dtype: dtype name to use for a text that begins with ``f`` alone.

        Raises:
            LayoutError: the text is not a layout; says where.
        """
        match = _LAYOUT.fullmatch(text.strip())
        if match is None:
            raise LayoutError(f"layout text {text!r} is not understood; write it as f32[16@x.y, 64@z] +z.")
        entries = [entry.strip() for entry in match["dims"].split(",")] if match["dims"].strip() else []
        if shape is not None and len(shape) != len(entries):
            raise LayoutError(f"layout text {text!r} has {len(entries)} dims, the tensor has {len(shape)}: {tuple(shape)}.")
        sizes = [None] * len(entries) if shape is None else list(shape)
        dims = tuple(parse_dim(entry, size, text) for entry, size in zip(entries, sizes))
        name = dtype if match["dtype"] == "f" and dtype else match["dtype"]
        if name not in DTYPES:
            raise LayoutError(f"layout text {text!r} has unknown dtype {name!r}; known: {', '.join(DTYPES)}.")
        tail = match["tail"]
        pending = [(axis, "sum") for axis in re.findall(r"\+(\w+)", tail)] + [(axis, "max") for axis in re.findall(r"\bmax (\w+)", tail)]
        owner = re.search(r"\bon (\w+)=(\w+)", tail)
        varied = tuple(re.findall(r"~(\w+)", tail))
        for axis in [axis for axis, _ in pending] + list(varied) + [axis for dim in dims for axis in dim.all_axes]:
            if axis not in AXES:
                raise LayoutError(f"layout text {text!r} has unknown axis {axis!r}; axes are {', '.join(AXES)}.")
        place = (owner[1], owner[2]) if owner else None
        return cls(name, dims, tuple(pending), varied, "nograd" not in tail.split(), place)


_LAYOUT = re.compile(r"(?P<dtype>\w+)\[(?P<dims>[^\]]*)\](?P<tail>(?: \+\w+| max \w+| ~\w+| on \w+=\w+| nograd)*)")


def _kept(axes: tuple[str, ...], keep: frozenset[str]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis in keep)


def _is_float(dtype: str) -> bool:
    return dtype[0] in "fc" or dtype == "bf16"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a torch dtype (``f32``)."""
    name = DTYPE_NAMES.get(dtype)
    if name is None:
        raise LayoutError(f"dtype {dtype} has no layout notation; known: {', '.join(DTYPES)}.")
    return name
