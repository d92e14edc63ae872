"""What the user and earlier compilations have fixed before layouts are chosen: gradients, parameters, inputs, layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from partir.layout import Layout
from partir.passes.trace import InputSlot


@dataclass(frozen=True)
class Given:
    """What the user and earlier compilations have fixed.

    Args:
        grads: placeholder name -> it gets a gradient.
        parameters: placeholder name -> its dotted parameter name.
        inputs: names of placeholders that the user passes at every call.
        layouts: layouts by placeholder or node name that must be kept (earlier compiles, DTensor inputs, pins).
    """

    grads: Mapping[str, bool]
    parameters: Mapping[str, str]
    inputs: frozenset[str]
    layouts: Mapping[str, Layout] = field(default_factory=dict[str, Layout])


def given_layouts(
    slots: Mapping[str, InputSlot],
    dtypes: Mapping[str, str],
    training: bool,
    pinned: Mapping[str, Layout],
    parameter_layouts: Mapping[str, Layout],
    input_layouts: Mapping[str, Layout],
) -> Given:
    """Return what is fixed of a traced graph.

    Args:
        slots: by the name of a placeholder.
        dtypes: of the placeholders now, by name.
        training: gradients are recorded.
        pinned: layouts by placeholder or node name.
        parameter_layouts: layouts at rest that an earlier compilation has fixed, by dotted name.
        input_layouts: layouts of inputs that arrive as blocks, by slot name.
    """
    grads = {name: training and slot.requires_grad for name, slot in slots.items()}
    parameters = {name: slot.name for name, slot in slots.items() if slot.kind == "parameter"}
    fixed = dict(pinned)
    for name, slot in slots.items():
        layout = parameter_layouts.get(slot.name) or input_layouts.get(slot.name)
        if layout is not None:
            fixed[name] = layout
    fixed = {name: _with_grad(layout, grads.get(name, layout.grad), dtypes.get(name, layout.dtype)) for name, layout in fixed.items()}
    inputs = frozenset(name for name, slot in slots.items() if slot.kind == "input")
    return Given(grads, parameters, inputs, fixed)


def _with_grad(layout: Layout, grad: bool, dtype: str) -> Layout:
    """Return a layout for the present dtype: `model.bfloat16()` after the first call changes no block."""
    return Layout(dtype, layout.dims, layout.pending, layout.varied if grad else (), grad, layout.owner)
