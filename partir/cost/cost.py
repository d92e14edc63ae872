"""The cost of a plan in symbols: what one rank receives, computes and holds.

cost = plan.cost()
cost.bytes(axis="z", stage="forward")             # 1024*B*S*(z - 1)/(x*y*z)
cost.value(cost.bytes(), B=64, S=2048, y=8)       # for other sizes; what is not given is the plan's own
print(cost)

The symbols are the axes of the plan's mesh that have more than one rank, the batch `B` and the sequence `S`. An expression holds for
every mesh and batch on which the compiler lays things out in the same way: that the sizes divide is the user's part here;
`partir.suggest_mesh` checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import sympy  # pyright: ignore[reportMissingTypeStubs]
from torch.fx import Node

from partir.collectives import split_axes
from partir.cost.lifetimes import GRADIENTS, OUTPUTS, SAVED, TEMPORARY, Block, blocks_of, peak
from partir.cost.monomial import Monomial, symbol
from partir.cost.received import Received, total
from partir.cost.sizes import ProgramSizes
from partir.cost.symbols import input_symbols
from partir.cost.work import Work, work_of
from partir.errors import PartirError
from partir.graph import collective_name, is_collective, operands, tensor_of
from partir.program import Program
from partir.records import check_filter, layer_of

if TYPE_CHECKING:
    from partir.passes.pipeline import Compiled
    from partir.records import Collective

PARAMETERS, OPTIMIZER = "parameters", "optimizer"
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, SAVED, TEMPORARY, OUTPUTS)
MOMENTS = 2  # AdamW keeps two numbers of the parameter's dtype for each of its elements


@dataclass(frozen=True, eq=False)
class Cost:
    """What one rank receives, computes and holds in one step, as expressions.

    Args:
        values: the value of each symbol in the plan.
        received: one for each collective that moves data.
        work: one for each node that computes.
        blocks: the storages that a step makes.
        parameters: bytes of each parameter and buffer at rest (times the layers that it stands for), and whether it is trained.
        left_out: a letter that is no symbol -> why.
    """

    values: Mapping[str, int]
    received: tuple[Received, ...]
    work: tuple[Work, ...]
    blocks: tuple[Block, ...]
    parameters: tuple[tuple[Monomial, bool], ...]
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])

    def bytes(self, stage: str | None = None, axis: str | None = None, op: str | None = None, layer: str | None = None) -> sympy.Expr:
        """Return the bytes that one rank receives in one step, in all collectives that match.

        Args:
            stage: "forward" or "backward".
            axis: ``"y"``, or ``"z.x"`` for a group over both.
            op: "all_gather", ...
            layer: a list item's path, ``"blocks.0"``.

        Raises:
            PartirError: no such stage, axis or op.
        """
        check_filter(stage, axis, op)
        wanted = [(k, v) for k, v in (("stage", stage), ("axis", axis), ("op", op), ("layer", layer)) if v is not None]
        return total(one for one in self.received if all(getattr(one.record, name) == value for name, value in wanted))

    def flops(self, stage: str | None = None) -> sympy.Expr:
        """Return the floating-point operations of one rank in one step; a multiplication and an addition are two."""
        check_filter(stage)
        return _sum(one.flops * one.count for one in self.work if stage in (None, one.stage))

    @cached_property
    def memory(self) -> Mapping[str, sympy.Expr]:
        """Bytes that one rank holds at the peak of a step, by kind: parameters, gradients, optimizer (AdamW), saved activations,
        temporaries (what was gathered for an op, and results on their way), outputs. The peak is the plan's own: for other sizes it may
        fall on another node, which `peak_memory` takes into account.
        """
        stage, place = self._peak_place()
        found = {PARAMETERS: _sum(held for held, _ in self.parameters)}
        found[OPTIMIZER] = _sum(held * MOMENTS for held, trained in self.parameters if trained)
        live = [block for block in self.blocks if block.stage == stage and block.born <= place <= block.dies]
        for kind in (GRADIENTS, SAVED, TEMPORARY, OUTPUTS):
            found[kind] = _sum(block.bytes * block.count for block in live if block.kind == kind)
        return {kind: found[kind] for kind in KINDS}

    def _peak_place(self) -> tuple[str, int]:
        peaks = {stage: peak(self.blocks, stage, lambda size: size.value(self.values)) for stage in ("forward", "backward")}
        stage = max(peaks, key=lambda name: float(_number(peaks[name][0])))
        return stage, int(_number(peaks[stage][1]))

    def peak_memory(self, sizes: Mapping[str, Any] | None = None) -> Any:
        """Return the most bytes that one rank holds in a step, for these sizes of symbols.

        Args:
            sizes: numbers, or arrays of one length, for as many results; what is not given is the plan's own.
        """
        self._check("peak_memory", sizes or {})
        at = {**self.values, **(sizes or {})}
        result = self.peak_of(lambda size: size.value(at))
        return result if sizes and any(hasattr(v, "shape") for v in sizes.values()) else float(_number(result))

    def peak_of(self, bytes_of: Callable[[Monomial], Any]) -> Any:
        """Return the most bytes that one rank holds in a step; ``bytes_of``: the value of a monomial, a number or an array."""
        held: Any = sum((bytes_of(one) for one, _ in self.parameters), 0)
        step: Any = sum((bytes_of(one) for one, trained in self.parameters if trained), 0)
        peaks = [peak(self.blocks, stage, bytes_of)[0] for stage in ("forward", "backward")]
        most = peaks[0] + (peaks[1] - peaks[0]) * (peaks[1] > peaks[0])
        # the optimizer's step holds every gradient and nothing of the forward
        return held + MOMENTS * step + most + (step - most) * (step > most)

    def value(self, expression: sympy.Expr, **sizes: int) -> int:
        """Return an expression's value for these sizes of symbols; what is not given is the plan's own.

        Raises:
            PartirError: a size of something that is no symbol here, or none.
        """
        self._check("value", sizes)
        at = [(symbol(name), value) for name, value in {**self.values, **sizes}.items()]
        number: Any = cast(Any, expression).subs(at)
        return int(number) if number.is_Integer else float(number)  # pyright: ignore[reportReturnType]

    def _check(self, name: str, sizes: Mapping[str, Any]) -> None:
        for letter, size in sizes.items():
            if letter in self.left_out:
                raise PartirError(f"cost.{name}({letter}=...): {letter} is no symbol of this plan: {self.left_out[letter]}.")
            if letter not in self.values:
                known = ", ".join(f"{name}={value}" for name, value in self.values.items())
                raise PartirError(f"cost.{name}({letter}=...): no such symbol; this plan's are {known}.")
            least: Any = size if hasattr(size, "shape") else [size]
            if any(isinstance(one, (bool, str)) or not one >= 1 for one in least):
                raise PartirError(f"cost.{name}({letter}={size!r}): a size is a number, 1 or more.")

    def __str__(self) -> str:
        from partir.cost.text import cost_text

        return cost_text(self)


def cost_of(
    compiled: Compiled,
    collectives: Sequence[Collective],
    symbols: Mapping[str, tuple[str, int]] | None = None,
    counts: Mapping[str, int] | None = None,
) -> Cost:
    """Return the cost of a compiled program in symbols.

    Args:
        compiled: the compiler's result.
        collectives: its records.
        symbols: name -> (input, dim) whose size it stands for; by default `B` and `S` are the first two dims of the first input.

        counts: the path of a layer -> how many layers it stands for (`fold_layers`).

    Raises:
        PartirError: no such input or dim.
    """
    found = input_symbols(compiled, symbols)
    cost = cost_in_symbols(compiled, collectives, sizes_of(compiled, found.keys, found.values), found.values, counts or {})
    return replace(cost, left_out=found.left_out)


def sizes_of(compiled: Compiled, keys: Mapping[int, str], values: Mapping[str, int]) -> ProgramSizes:
    """Return the size of each value of a compiled program in symbols.

    Args:
        keys: the key of a sub-dim -> its symbol.
        values: the size of each symbol in the program.
    """
    program = compiled.program
    graphs = [module for module in (program.forward, program.backward) if module is not None]
    return ProgramSizes(graphs, compiled.lowered, program.mesh, keys, values)


def cost_in_symbols(
    compiled: Compiled, collectives: Sequence[Collective], sizes: ProgramSizes, values: Mapping[str, int], counts: Mapping[str, int]
) -> Cost:
    """Return the cost of a compiled program.

    Args:
        sizes: of its values.
        values: the size of each symbol but the axes in the program.
        counts: as for `cost_of`.
    """
    program = compiled.program
    axes = {axis: program.mesh[axis] for axis in program.mesh.split_axes()}
    received = tuple(_received(program, collectives, sizes, counts))
    work, blocks = work_of(compiled, sizes, counts), blocks_of(program, sizes, counts)
    return Cost({**axes, **values}, received, work, blocks, _parameters(compiled, sizes, counts))


def _received(
    program: Program, collectives: Sequence[Collective], sizes: ProgramSizes, counts: Mapping[str, int]
) -> list[Received]:
    nodes: dict[tuple[str, str], Node] = {}
    for stage, module in (("forward", program.forward), ("backward", program.backward)):
        for node in module.graph.nodes if module is not None else ():
            if is_collective(node):
                nodes[(stage, node.name)] = node
    found: list[Received] = []
    for record in collectives:
        node = nodes[(record.stage, record.node)]
        parts = tuple(sizes.numels(read)[0] for read in operands(node))
        parts = parts if collective_name(node).endswith("_bucket") else parts[:1]
        itemsize = tensor_of(operands(node)[0]).dtype.itemsize
        found.append(Received(record, split_axes(record.axis), parts, itemsize, counts.get(record.layer, 1)))
    return found


def _parameters(compiled: Compiled, sizes: ProgramSizes, counts: Mapping[str, int]) -> tuple[tuple[Monomial, bool], ...]:
    nodes = list(compiled.lowered.graph.find_nodes(op="placeholder"))
    pairs = zip(nodes, compiled.program.inputs, strict=True)
    found: list[tuple[Monomial, bool]] = []
    for node, slot in pairs:
        if slot.kind in ("parameter", "buffer"):
            held = sizes.numel(slot.layout, node.meta["subdims"][0]) * slot.dtype.itemsize
            found.append((held * counts.get(layer_of(slot.name), 1), slot.differentiable))
    return tuple(found)


def _sum(monomials: Any) -> sympy.Expr:
    totals: dict[tuple[tuple[str, int], ...], Any] = {}
    for one in monomials:
        totals[one.powers] = totals.get(one.powers, 0) + one.coefficient
    return sympy.Add(*(Monomial(coefficient, powers).expression for powers, coefficient in totals.items()))


def _number(value: Any) -> Any:
    return value[0] if hasattr(value, "shape") and getattr(value, "shape", ()) else value
