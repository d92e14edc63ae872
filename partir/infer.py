"""The type rules: given its operands' layouts, the layouts of what a local call computes, or an error.

Per axis (design: gradients are part of the type): I mixes only with I and N; S with S, R and N; a split factor that is summed
leaves P; P passes only through ops that are linear in it. A call that breaks one of these would be right forward
and wrong backward, so it is refused.

    >>> from partir.mesh import Mesh
    >>> mesh = Mesh.parse((2, 2, 2))
    >>> x, w = Layout.parse("f32[16@x, 64@z] ~y"), Layout.parse("f32[256@y, 64@z] ~x")
    >>> a, b = torch.empty(16, 64, device="meta"), torch.empty(256, 64, device="meta")
    >>> linear = rules.find(torch.ops.aten.linear.default)
    >>> binding = linear.bind((a, b), {}, torch.empty(16, 256, device="meta"))
    >>> print(*infer(binding, (x, w), (torch.empty(16, 256, device="meta"),), (True,), mesh))
    f32[16@x, 256@y] +z
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from partir import rules
from partir.assignment import Assignment, Call, SubFactor, operand_layouts, project, result_layouts
from partir.errors import TypeRuleError
from partir.layout import DTYPES, Layout
from partir.mesh import Mesh
from partir.rules import Binding
from partir.subdims import Piece, frozen, leaves, tie

__all__ = ["infer", "rules"]


def infer(
    binding: Binding,
    layouts: Sequence[Layout],
    outputs: Sequence[torch.Tensor],
    grads: Sequence[bool],
    mesh: Mesh,
    results: Sequence[Layout] = (),
    recipes: bool = False,
) -> tuple[Layout, ...]:
    """Return the layouts of a call's results.

    Args:
        binding: the call's rule, bound to global shapes.
        layouts: its operands' layouts.
        outputs: (fake) results with global shapes.
        grads: whether each result has a gradient.
        recipes: whether factors may be split that the op itself needs whole, its rule having a recipe that will replace it.
        results: the layouts claimed for the results; they decide only how factors that no operand has are split.

    Raises:
        TypeRuleError: the operands' layouts may not meet in this call.
    """
    key = _Question(
        binding, tuple(layouts), tuple((tuple(t.shape), t.dtype) for t in outputs), tuple(grads), mesh, tuple(results), recipes
    )
    if key not in _answers:
        if len(_answers) >= MOST_ANSWERS:
            _answers.clear()
        _answers[key] = _infer(binding, layouts, outputs, grads, mesh, results, recipes)
    return _answers[key]


@dataclass(frozen=True)
class _Question:
    """What `infer` is asked. Layers are alike, and each graph is checked after each pass: most questions come many times."""

    binding: Binding
    layouts: tuple[Layout, ...]
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    grads: tuple[bool, ...]
    mesh: Mesh
    results: tuple[Layout, ...]
    recipes: bool

    def __hash__(self) -> int:
        return hash((self.binding.rule, self.layouts, self.outputs, self.grads, self.mesh, self.results, self.recipes))


MOST_ANSWERS = 10_000
_answers: dict[_Question, tuple[Layout, ...]] = {}


def _infer(
    binding: Binding,
    layouts: Sequence[Layout],
    outputs: Sequence[torch.Tensor],
    grads: Sequence[bool],
    mesh: Mesh,
    results: Sequence[Layout],
    recipes: bool,
) -> tuple[Layout, ...]:
    layouts = [layout.strip(mesh) for layout in layouts]
    call = _call(binding, layouts, outputs, results, any(grads), recipes)
    passing = _pass_through(binding, layouts)
    shown = [_settled(layout, passing) for layout in layouts]
    assignment = _assignment(call, shown, results, mesh)
    wanted = operand_layouts(call, assignment, shown, mesh)
    for index, (have, need) in enumerate(zip(shown, wanted)):
        if have.canonical(mesh) != need.canonical(mesh):
            raise TypeRuleError(_message(index, have, need.strip(mesh), layouts))
    computed = result_layouts(call, assignment, wanted, grads, mesh)
    return tuple(_pending(layout, passing).strip(mesh) for layout in computed)


def _call(
    binding: Binding,
    layouts: Sequence[Layout],
    outputs: Sequence[torch.Tensor],
    results: Sequence[Layout],
    grad: bool,
    recipes: bool,
) -> Call:
    pieces = {name: [Piece(size)] for name, size in binding.sizes.items()}
    tied = [*zip(binding.operands, layouts), *zip(binding.results, results)]
    broken: set[str] = set()
    dims_of = [([Piece(part.size) for part in dim.parts], names) for factors, layout in tied for names, dim in zip(factors, layout.dims)]
    for dim, names in dims_of:
        tie(dim, [piece for name in names for piece in pieces[name]])
    for dim, names in dims_of:
        wanted = leaves([piece for name in names for piece in pieces[name]])
        if [id(p) for p in wanted] != [id(p) for p in leaves(dim)]:
            broken.update(names)
    maxima = frozenset[str]() if grad else binding.maxima
    unsplit = (binding.whole - binding.offsets) | broken | (binding.maxima - maxima)
    splits = frozenset(binding.splits) - maxima
    unsplit = unsplit - splits if recipes else unsplit | splits
    inputs = tuple(torch.empty(layout.shape, dtype=DTYPES[layout.dtype], device="meta") for layout in layouts)
    factors = {name: frozen(dim) for name, dim in pieces.items()}
    return Call(binding, factors, frozenset(unsplit), maxima, inputs, tuple(outputs))


def _assignment(
    call: Call, layouts: Sequence[Layout], results: Sequence[Layout], mesh: Mesh
) -> dict[SubFactor, tuple[str, ...]]:
    assignment: dict[SubFactor, tuple[str, ...]] = {}
    for index, layout in enumerate(layouts):
        for pair, axes in project(call, index, layout, mesh).items():
            if assignment.setdefault(pair, axes) != axes:
                raise TypeRuleError(
                    f"operand {index} ({layout}) splits factor {pair[0]} over {'.'.join(axes)}, another operand over "
                    f"{'.'.join(assignment[pair])}: re-lay one of them first."
                )
    produced = replace(call, binding=replace(call.binding, operands=call.binding.results), inputs=call.outputs)
    read = {name for dims in call.binding.operands for names in dims for name in names}
    for index, layout in enumerate(results):
        for pair, axes in project(produced, index, layout.strip(mesh), mesh).items():
            if pair[0] not in read:
                assignment.setdefault(pair, axes)
    _check_axes_once(assignment, layouts)
    return assignment


def _check_axes_once(assignment: Assignment, layouts: Sequence[Layout]) -> None:
    """An axis splits one factor of a call: with two, each rank would combine some of their blocks and nobody the others."""
    found: dict[str, str] = {}
    for (factor, _), axes in assignment.items():
        for axis in axes:
            if axis in found:
                shown = "; ".join(str(layout) for layout in layouts)
                raise TypeRuleError(f"axis {axis} splits factors {found[axis]} and {factor} of operands {shown}: gather one first.")
            found[axis] = factor


def _pass_through(binding: Binding, layouts: Sequence[Layout]) -> tuple[tuple[str, str], ...]:
    """Return the pending sums that pass: held by every operand in which the op is linear, the others being the same on all ranks."""
    passing: list[str] = []
    for group in binding.linear_groups:
        linear = [layouts[index] for index in sorted(group)]
        others = [layout for index, layout in enumerate(layouts) if index not in group]
        axes = [axis for axis, kind in linear[0].pending if kind == "sum" and axis not in passing]
        passing += [a for a in axes if all(o.type(a) == "P" for o in linear) and all(o.type(a) in "RN" for o in others)]
    return tuple((axis, "sum") for axis in passing)


def _settled(layout: Layout, passing: Sequence[tuple[str, str]]) -> Layout:
    return replace(layout, pending=tuple(item for item in layout.pending if item not in passing))


def _pending(layout: Layout, passing: Sequence[tuple[str, str]]) -> Layout:
    held = {axis for axis, _ in passing}
    return replace(layout, pending=(*layout.pending, *passing), varied=tuple(a for a in layout.varied if a not in held))


def _message(index: int, have: Layout, need: Layout, layouts: Sequence[Layout]) -> str:
    together = "; ".join(str(layout) for layout in layouts)
    hint = "re-lay it first"
    for axis in ("data", "x", "y", "z"):
        kinds = have.type(axis), need.type(axis)
        if kinds == ("I", "R"):
            hint = f"spread it along {axis} first, else its gradient would be counted once instead of summed"
        elif kinds[0] == "P":
            hint = f"reduce it along {axis} first: the op is not linear in it"
    return f"operand {index} is {have} where {need} is needed, beside operands {together}: {hint}."
