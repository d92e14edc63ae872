"""What each collective does to a layout: `apply(name, operand, mesh, **args)` is the result's layout.

The type table, per axis (`layout.py` has the letters):

    all_gather       S->R      all_gather_same  S->I      reduce_scatter  P->S      all_to_all  S->S
    all_reduce sum   P->I      all_reduce max   M->N      slice       I or N->S     slice varied  R->S
    zero_pad         S->P      spread           I->R      settle          R->I      once   I or N->P
    once varied      R->P      broadcast    owner->R      reduce_to   P->owner

A value without gradient has N where one with gradient has R or I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from partir.collectives.addressing import exchange_blocks, split_axes
from partir.collectives.dims import join_dim, rename_axis, split_dim
from partir.dims import Dim
from partir.errors import TypeRuleError
from partir.layout import Layout
from partir.mesh import Mesh

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Law:
    """The types that an op wants along its axes, and the sentence of an error."""

    op: str
    axis: str
    wants: tuple[str, ...]
    words: str

    @property
    def axes(self) -> Axes:
        return split_axes(self.axis)

    def refuse(self, operand: Layout, why: str = "") -> TypeRuleError:
        law = f"{self.op} along {self.axis} needs {self.words}"
        return TypeRuleError(f"{law}, got {operand}" + (f": {why}" if why else "") + ".")

    def check(self, operand: Layout) -> None:
        for axis in self.axes:
            actual = operand.type(axis)
            if operand.owner and axis in operand.owner:
                raise self.refuse(operand, "only broadcast reads a value that the diagonal owns")
            if actual not in self.wants:
                raise self.refuse(operand, f"{axis} has type {actual}, expected {' or '.join(self.wants)}")


def apply(name: str, operand: Layout | Sequence[Layout], mesh: Mesh, /, **args: Any) -> Any:
    """Return the layout of a collective's result.

    Args:
        name: of the collective.
        operand: layout of its operand; a sequence, one per tensor, for a bucket.
        mesh: gives the sizes that `blocks` counts.
        args: the op's other arguments, by name.

    Returns:
        A Layout, or a tuple of them for a bucket.

    Raises:
        TypeRuleError: the operand's types or dims are not what the op needs: says the law, expected and actual.

    >>> mesh = Mesh.parse((4, 2, 2))
    >>> print(apply("all_gather", Layout.parse("f32[16@x.y, 64@z]"), mesh, axis="y", dim=0))
    f32[16@x, 64@z] ~y
    >>> print(apply("reduce_scatter", Layout.parse("f32[16@x, 256@y] +z"), mesh, axis="z", dim=0))
    f32[16@x.z, 256@y]
    """
    if name in ("all_gather_bucket", "reduce_scatter_bucket"):
        if isinstance(operand, Layout):
            raise TypeRuleError(f"{name} needs a list of operands, got one: {operand}.")
        single = name.removesuffix("_bucket")
        return tuple(LAWS[single](one, mesh, dim=0, **args) for one in operand)
    if name not in LAWS:
        hint = " It differs by rank, so no layout describes it." if name == "coordinate" else ""
        raise TypeRuleError(f"{name} has no layout rule.{hint} Known: {', '.join(LAWS)}.")
    if not isinstance(operand, Layout):
        raise TypeRuleError(f"{name} needs one operand, got {len(operand)}.")
    return LAWS[name](operand, mesh, **args)


def cotangent(layout: Layout) -> Layout:
    """Return the layout of a value's gradient: S<->S, P<->R, I<->I.

    Raises:
        TypeRuleError: the value has no gradient.

    >>> print(cotangent(Layout.parse("f32[16@x, 256] +z ~y")))
    f32[16@x, 256] +y ~z
    """
    if not layout.grad:
        raise TypeRuleError(f"cotangent needs a value with a gradient, got {layout}.")
    for axis, reduction in layout.pending:
        if reduction != "sum":
            raise TypeRuleError(f"cotangent needs a value without pending maximum, got {layout}: {axis} has type M.")
    pending = tuple((axis, "sum") for axis in layout.varied)
    return replace(layout, pending=pending, varied=tuple(axis for axis, _ in layout.pending))


def _with_dim(operand: Layout, index: int, dim: Dim) -> tuple[Dim, ...]:
    index = index % len(operand.dims)
    return (*operand.dims[:index], dim, *operand.dims[index + 1 :])


def _joined(law: Law, operand: Layout, mesh: Mesh, dim: int, blocks: int) -> tuple[Dim, ...]:
    law.check(operand)
    _check_dim(law, operand, dim)
    found = join_dim(operand.dims[dim], law.axes, blocks, mesh)
    if found is None:
        raise law.refuse(operand, f"the part that blocks={blocks} addresses does not have {law.axis} innermost")
    return _with_dim(operand, dim, found)


def _splitted(law: Law, operand: Layout, mesh: Mesh, dim: int, blocks: int) -> tuple[Dim, ...]:
    law.check(operand)
    _check_dim(law, operand, dim)
    found = split_dim(operand.dims[dim], law.axes, blocks, mesh)
    if found is None:
        local = operand.dims[dim].local_size(mesh)
        why = f"local size {local} is not divisible by {law.axis}={mesh.extent(law.axes)}"
        raise law.refuse(operand, why + _at(blocks))
    return _with_dim(operand, dim, found)


def _at(blocks: int) -> str:
    return f" (blocks={blocks})" if blocks != 1 else ""


def _check_dim(law: Law, operand: Layout, dim: int) -> None:
    if not -len(operand.dims) <= dim < len(operand.dims):
        raise law.refuse(operand, f"there is no dim {dim}")


def _varied(operand: Layout, axes: Iterable[str]) -> Axes:
    """Add type R along `axes`, which a value without gradient does not have."""
    return (*operand.varied, *axes) if operand.grad else ()


def _without(operand: Layout, axes: Axes) -> tuple[tuple[str, str], ...]:
    return tuple(item for item in operand.pending if item[0] not in axes)


def _not_varied(operand: Layout, axes: Axes) -> Axes:
    return tuple(axis for axis in operand.varied if axis not in axes)


def _sums(operand: Layout, axes: Axes) -> tuple[tuple[str, str], ...]:
    return (*operand.pending, *((axis, "sum") for axis in axes))


def _all_gather(operand: Layout, mesh: Mesh, axis: str, dim: int, blocks: int = 1) -> Layout:
    law = Law("all_gather", axis, ("S",), f"a dim split over {axis} innermost at dim {dim}")
    dims = _joined(law, operand, mesh, dim, blocks)
    return replace(operand, dims=dims, varied=_varied(operand, law.axes))


def _all_gather_same(operand: Layout, mesh: Mesh, axis: str, dim: int, blocks: int = 1) -> Layout:
    law = Law("all_gather_same", axis, ("S",), f"a dim split over {axis} innermost at dim {dim}")
    return replace(operand, dims=_joined(law, operand, mesh, dim, blocks))


def _reduce_scatter(operand: Layout, mesh: Mesh, axis: str, dim: int, blocks: int = 1) -> Layout:
    law = Law("reduce_scatter", axis, ("P",), f"a pending sum over {axis} and a dim {dim} that {axis} divides")
    dims = _splitted(law, operand, mesh, dim, blocks)
    return replace(operand, dims=dims, pending=_without(operand, law.axes))


def _all_reduce(operand: Layout, mesh: Mesh, axis: str, op: str = "sum") -> Layout:
    if op not in ("sum", "max"):
        raise TypeRuleError(f'all_reduce along {axis} needs op "sum" or "max", got {op!r}.')
    words = f"a pending {'sum' if op == 'sum' else 'maximum'} over {axis}"
    law = Law("all_reduce", axis, ("P",) if op == "sum" else ("M",), words)
    law.check(operand)
    reduced = replace(operand, pending=_without(operand, law.axes))
    return reduced if op == "sum" else replace(reduced, varied=(), grad=False)


def _slice(operand: Layout, mesh: Mesh, axis: str, dim: int, blocks: int = 1, varied: bool = False) -> Layout:
    wants, state = (("R",), "of type R") if varied else (("I", "N"), "the same, with its gradient,")
    law = Law("slice", axis, wants, f"a value {state} along {axis} and a dim {dim} that {axis} divides")
    dims = _splitted(law, operand, mesh, dim, blocks)
    return replace(operand, dims=dims, varied=_not_varied(operand, law.axes))


def _zero_pad(operand: Layout, mesh: Mesh, axis: str, dim: int, blocks: int = 1) -> Layout:
    law = Law("zero_pad", axis, ("S",), f"a dim split over {axis} innermost at dim {dim}")
    dims = _joined(law, operand, mesh, dim, blocks)
    return replace(operand, dims=dims, pending=_sums(operand, law.axes))


def _spread(operand: Layout, mesh: Mesh, axis: str) -> Layout:
    law = Law("spread", axis, ("I",), f"a value that is the same, with its gradient, along {axis}")
    law.check(operand)
    return replace(operand, varied=_varied(operand, law.axes))


def _settle(operand: Layout, mesh: Mesh, axis: str) -> Layout:
    law = Law("settle", axis, ("R",), f"a value of type R along {axis}")
    law.check(operand)
    return replace(operand, varied=_not_varied(operand, law.axes))


def _once(operand: Layout, mesh: Mesh, axis: str, varied: bool = True) -> Layout:
    wants, state = (("R",), "of type R") if varied else (("I", "N"), "the same, with its gradient,")
    law = Law("once", axis, wants, f"a value {state} along {axis}")
    law.check(operand)
    return replace(operand, pending=_sums(operand, law.axes), varied=_not_varied(operand, law.axes))


def _all_to_all(
    operand: Layout, mesh: Mesh, axis: str, src: int, dst: int, src_blocks: int = 1, dst_blocks: int = 1
) -> Layout:
    law = Law(
        "all_to_all", axis, ("S",), f"a dim split over {axis} innermost at dim {src} and a dim {dst} that it divides"
    )
    whole = replace(operand, dims=_joined(law, operand, mesh, src, src_blocks))
    _check_dim(law, operand, dst)
    same_dim = src % len(operand.dims) == dst % len(operand.dims)
    if exchange_blocks(mesh.extent(law.axes), same_dim, src_blocks, dst_blocks) is None:
        raise law.refuse(operand, f"src_blocks={src_blocks} and dst_blocks={dst_blocks} overlap in dim {dst}")
    found = split_dim(whole.dims[dst], law.axes, dst_blocks, mesh)
    if found is None:
        raise law.refuse(operand, f"{law.axis}={mesh.extent(law.axes)} does not divide dim {dst}" + _at(dst_blocks))
    return replace(whole, dims=_with_dim(whole, dst, found))


def _broadcast(operand: Layout, mesh: Mesh, axis: str, root: str) -> Layout:
    law = Law("broadcast", axis, ("S", "I", "N"), f"a value owned on {axis}={root}")
    if operand.owner is None or set(operand.owner) != {axis, root}:
        raise law.refuse(operand)
    # On the diagonal both axes have one coordinate: what was split along `axis` is split along `root`.
    dims = tuple(rename_axis(dim, axis, root) for dim in operand.dims)
    return replace(operand, dims=dims, varied=_varied(operand, (axis,)), owner=None)


def _reduce_to(operand: Layout, mesh: Mesh, axis: str, root: str) -> Layout:
    law = Law("reduce_to", axis, ("P",), f"a pending sum over {axis}, the same or split along {root}")
    law.check(operand)
    if mesh[axis] != mesh[root]:
        raise law.refuse(operand, f"{axis}={mesh[axis]} and {root}={mesh[root]} differ, a diagonal needs them equal")
    if operand.type(root) not in ("S", "I", "N"):
        raise law.refuse(operand, f"{root} has type {operand.type(root)}, expected S, I or N")
    first, second = sorted((axis, root))
    dims = tuple(rename_axis(dim, second, first) for dim in operand.dims)
    return replace(operand, dims=dims, pending=_without(operand, law.axes), owner=(first, second))


LAWS: dict[str, Callable[..., Layout]] = {
    "all_gather": _all_gather,
    "all_gather_same": _all_gather_same,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "slice": _slice,
    "zero_pad": _zero_pad,
    "spread": _spread,
    "settle": _settle,
    "once": _once,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce_to": _reduce_to,
}
