"""What `print(cost)` shows: expressions by axis and kind, with the plan's own numbers beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import sympy  # pyright: ignore[reportMissingTypeStubs]

if TYPE_CHECKING:
    from partir.cost.cost import Cost


def cost_text(cost: Cost) -> str:
    """Return the text of a cost."""
    sizes = ", ".join(f"{name}={value}" for name, value in cost.values.items())
    numbers = [f"{letter} is a number here: {why}" for letter, why in cost.left_out.items()]
    head = "\n".join([f"one rank, one step, with {sizes}", *numbers])
    return "\n\n".join([head, _received(cost), _flops(cost), _memory(cost)]) + "\n"


def _received(cost: Cost) -> str:
    axes = sorted({one.record.axis for one in cost.received})
    rows = [(axis, stage, cost.bytes(stage, axis)) for axis in axes for stage in ("forward", "backward")]
    rows = [row for row in rows if row[2] != 0]
    lines = [f"  {axis:<5} {stage:<9} {cost.value(e):>18,}  {readable(e)}" for axis, stage, e in rows]
    everything = cost.bytes()
    return "\n".join(["bytes received, by axis", *lines, f"  {'all':<5} {'both':<9} {cost.value(everything):>18,}"])


def _flops(cost: Cost) -> str:
    rows = [(stage, cost.flops(stage)) for stage in ("forward", "backward")]
    return "\n".join(["FLOPs", *(f"  {stage:<15} {cost.value(e):>18,}  {readable(e)}" for stage, e in rows)])


def _memory(cost: Cost) -> str:
    lines = [f"  {kind:<18} {cost.value(e):>15,}  {readable(e)}" for kind, e in cost.memory.items()]
    peak = f"  {'at most':<18} {int(cost.peak_memory()):>15,}"
    return "\n".join(["bytes held at the peak, with AdamW", *lines, peak])


def readable(expression: sympy.Expr) -> str:
    """Return an expression with what its terms share in front: ``1024*B*S*(z - 1)/(x*y*z)``.

    >>> x, y = sympy.symbols("x y", positive=True)
    >>> readable(6 * (x - 1) / (x * y) + 2 * (x - 1) / x)
    '2*(x - 1)*(y + 3)/(x*y)'
    """
    if cast(Any, expression).has(sympy.ceiling, sympy.Piecewise):
        return str(expression)
    return str(cast(Any, sympy).factor_terms(cast(Any, sympy).factor(expression)))
