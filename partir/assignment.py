"""Assignments: which axes split which factor of one call, and the layouts and types that follow.

A call's rule names its factors; each factor has sub-dims. An assignment gives axes to (factor, sub-dim) pairs. From it
follow the layout that each operand must have for the call to run on blocks, and the layout of
what it computes:

    linear(x[* k], w[n k]) -> y[* n], sum k      with  *1 -> x, k -> z, n -> y
    operands  f32[16@x, 64@z] ~y   f32[256@y, 64@z] ~x        result  f32[16@x, 256@y] +z
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch.fx import Node

from partir.dims import Dim, Part
from partir.graph import operands, results_of
from partir.layout import Layout, dtype_name
from partir.mesh import Mesh
from partir.rules import Binding
from partir.subdims import SubDim, axes_of

SubFactor = tuple[str, int]
Assignment = Mapping[SubFactor, tuple[str, ...]]


@dataclass(frozen=True)
class Call:
    """One call of a graph: its bound rule, its factors' sub-dims and its tensors.

    Args:
        binding: factors of each dim.
        factors: sub-dims of each factor.
        unsplit: factors that may not be split here.
        maxima: factors whose split leaves a pending maximum, which has no gradient: none where the result has one.
        inputs, outputs: fake tensors with global shapes.
        grads: whether each input has a gradient.
    """

    binding: Binding
    factors: Mapping[str, tuple[SubDim, ...]]
    unsplit: frozenset[str]
    maxima: frozenset[str]
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    grads: tuple[bool, ...] = ()

    @classmethod
    def of(cls, node: Node, grad: bool) -> Call:
        """Return the call that a factorised node makes; ``grad``: its results have gradients."""
        binding = cast(Binding, node.meta["binding"])
        unsplit = binding.unsplit | (node.meta["broken"] - set(binding.splits))
        if grad:
            unsplit |= frozenset(name for name in binding.maxima if name not in binding.splits)
        inputs = tuple(operand.meta["val"] for operand in operands(node))
        grads = tuple(bool(operand.meta["grad"]) for operand in operands(node))
        maxima = frozenset[str]() if grad else binding.maxima
        return cls(binding, node.meta["factors"], unsplit, maxima, inputs, results_of(node), grads)

    def subfactors(self, names: Iterable[str]) -> list[SubFactor]:
        """Return the (factor, sub-dim) pairs of factors, in order."""
        return [(name, index) for name in names for index in range(len(self.factors.get(name, ())))]

    def subdim(self, subfactor: SubFactor) -> SubDim:
        """Return the sub-dim of a pair."""
        return self.factors[subfactor[0]][subfactor[1]]


def project(call: Call, index: int, layout: Layout, mesh: Mesh) -> dict[SubFactor, tuple[str, ...]]:
    """Return the assignment that leaves operand ``index`` where it is, as far as its factors may be split."""
    found: dict[SubFactor, tuple[str, ...]] = {}
    for names, dim in zip(call.binding.operands[index], layout.dims):
        pairs = call.subfactors(names)
        sizes = [call.subdim(pair).size for pair in pairs]
        if any(name in call.unsplit for name in names):
            pairs = [pair if pair[0] not in call.unsplit else None for pair in pairs]
        axes = axes_of(dim, sizes, mesh) if _matches(dim, sizes) else None
        for pair, split in zip(pairs, axes or ()):
            if pair is not None and split and _may_split(call, pair, split):
                found[pair] = split
    return found


def _matches(dim: Dim, sizes: Sequence[int]) -> bool:
    product = 1
    for size in sizes:
        product *= size
    return product == dim.size


def _may_split(call: Call, pair: SubFactor, axes: tuple[str, ...]) -> bool:
    """An index into a factor finds one contiguous range a rank, so only the factor's first sub-dim may be split."""
    indexed = any(pair[0] == factor for _, _, factor in call.binding.index)
    return not indexed or pair[1] == 0


def merge(first: Assignment, second: Assignment) -> dict[SubFactor, tuple[str, ...]]:
    """Return ``first`` with what of ``second`` disagrees with nothing in it."""
    merged = dict(first)
    used = {axis for axes in first.values() for axis in axes}
    for pair, axes in second.items():
        if pair not in merged and not used.intersection(axes):
            merged[pair] = axes
            used.update(axes)
    return merged


def split_axes(assignment: Assignment, names: Iterable[str]) -> tuple[str, ...]:
    """Return the axes that split any of the factors."""
    wanted = set(names)
    return tuple(axis for pair, axes in assignment.items() if pair[0] in wanted for axis in axes)


def operand_layouts(call: Call, assignment: Assignment, present: Sequence[Layout | None], mesh: Mesh) -> tuple[Layout, ...]:
    """Return the layout that each operand must have.

    Args:
        present: each operand's layout at rest, None where it is not decided yet; its ``grad`` and its type along
            axes that split nothing here decide between R and I.
    """
    whole = _types_of_whole_axes(assignment, present, mesh)
    return tuple(_operand(call, index, assignment, layout, whole, mesh) for index, layout in enumerate(present))


def _types_of_whole_axes(assignment: Assignment, present: Sequence[Layout | None], mesh: Mesh) -> dict[str, str]:
    """Along an axis that splits nothing here every operand is whole: R if one of them is R already, else I."""
    used = {axis for axes in assignment.values() for axis in axes}
    free = [axis for axis in mesh.split_axes() if axis not in used]
    return {axis: "R" if any(layout and layout.type(axis) == "R" for layout in present) else "I" for axis in free}


def _operand(
    call: Call, index: int, assignment: Assignment, present: Layout | None, whole: Mapping[str, str], mesh: Mesh
) -> Layout:
    tensor = call.inputs[index]
    grad = present.grad if present else call.grads[index]
    dims = _dims(call, call.binding.operands[index], tensor, assignment)
    mine = {axis for dim in dims for axis in dim.all_axes}
    used = {axis for axes in assignment.values() for axis in axes}
    once = {name for operand, names in call.binding.once if operand == index for name in names}
    pending = tuple((axis, "sum") for axis in split_axes(assignment, once) if axis not in mine and mesh[axis] > 1)
    varied = [axis for axis in mesh.split_axes() if axis in used - mine or whole.get(axis) == "R"]
    held = {axis for axis, _ in pending}
    return Layout(dtype_name(tensor.dtype), dims, pending, tuple(a for a in varied if a not in held) if grad else (), grad)


def result_layouts(
    call: Call, assignment: Assignment, operand_types: Sequence[Layout], grads: Sequence[bool], mesh: Mesh
) -> tuple[Layout, ...]:
    """Return the layout of each result, sums and maxima pending."""
    return tuple(_result(call, index, assignment, operand_types, grad, mesh) for index, grad in enumerate(grads))


def _result(
    call: Call, index: int, assignment: Assignment, operand_types: Sequence[Layout], grad: bool, mesh: Mesh
) -> Layout:
    tensor = call.outputs[index]
    names = call.binding.results[index]
    dims = _dims(call, names, tensor, assignment)
    split = {axis for dim in dims for axis in dim.all_axes}
    sums = [axis for axis in split_axes(assignment, call.binding.sums) if axis not in split and mesh[axis] > 1]
    maxima = [axis for axis in split_axes(assignment, call.maxima) if axis not in split and mesh[axis] > 1]
    pending = tuple((axis, "sum") for axis in sums) + tuple((axis, "max") for axis in maxima)
    used = {axis for axes in assignment.values() for axis in axes}
    rest = [axis for axis in mesh.split_axes() if axis not in {*split, *sums, *maxima}]
    varied = tuple(a for a in rest if a in used or any(o.type(a) == "R" for o in operand_types)) if grad else ()
    return Layout(dtype_name(tensor.dtype), dims, pending, varied, grad)


def result_dims(call: Call, index: int, assignment: Assignment) -> tuple[Dim, ...]:
    """Return the dims of a result under an assignment."""
    return _dims(call, call.binding.results[index], call.outputs[index], assignment)


def _dims(call: Call, factors: Sequence[Sequence[str]], tensor: torch.Tensor, assignment: Assignment) -> tuple[Dim, ...]:
    dims: list[Dim] = []
    for names, size in zip(factors, tensor.shape):
        pairs = call.subfactors(names)
        parts = tuple(Part(call.subdim(pair).size, assignment.get(pair, ())) for pair in pairs)
        dim = Dim(parts) if parts else Dim((Part(int(size)),))
        dims.append(dim if dim.size == int(size) else Dim((Part(int(size)),)))
    return tuple(dims)
