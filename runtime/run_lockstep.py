"""Run one rank's graph on all ranks of a mesh in lockstep, node by node.

The value of a node is a column: one entry a rank. Ranks whose operands are the very same objects share one result, so
what is the same on every rank is computed once and held once. Columns are let go after their last use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from partir.collectives import Backend, use_backend
from partir.errors import OutOfRangeError, PartirError, is_out_of_range, source_line
from partir.mesh import Mesh, use_mesh
from partir.runtime.lockstep_collectives import Column, bind_collective

# From the columns of a step's operands to the column of its result.
OnColumns = Callable[[list[Column]], Column]
Argument = Callable[[list[Column], int], Any]


@dataclass(frozen=True)
class _Step:
    """One node: which registers it reads, which it fills, and which are not read again."""

    run: OnColumns
    reads: tuple[int, ...]
    register: int
    frees: tuple[int, ...]
    node: Node


class LockstepGraph:
    """A local graph, ready to run on all ranks of a mesh.

    Args:
        module: placeholders are blocks; results are a flat tuple of nodes or None.
        mesh: the ranks.
        stage: ``"forward"`` or ``"backward"``, for the record of communication.
    """

    def __init__(self, module: GraphModule, mesh: Mesh, stage: str) -> None:
        self.mesh = mesh
        nodes = list(module.graph.nodes)
        registers = {node: index for index, node in enumerate(nodes)}
        results = cast("tuple[Node | None, ...]", module.graph.output_node().args[0])
        last_use = _last_uses(nodes)
        self._num_registers = len(nodes)
        self._names = [node.name for node in nodes]
        self._inputs = [registers[node] for node in nodes if node.op == "placeholder"]
        self._unread = [registers[node] for node in nodes if node.op == "placeholder" and not node.users]
        self._results = [None if node is None else registers[node] for node in results]
        self._steps = [
            _Step(
                _operation(node, mesh, stage),
                tuple(registers[read] for read in node.all_input_nodes),
                registers[node],
                tuple(registers[done] for done in last_use.get(node, ())),
                node,
            )
            for node in nodes
            if node.op not in ("placeholder", "output")
        ]

    def run(self, columns: Sequence[Column], look: Callable[[str, Column], None] | None = None) -> list[Column | None]:
        """Return the columns of the results, given those of the placeholders.

        The caller's list is not kept, so that a column which it drops is free after its last use.

        Args:
            look: is shown the name and column of each value.
        """
        assert len(columns) == len(self._inputs), "one column for each placeholder"
        registers: list[Column | None] = [None] * self._num_registers
        for register, column in zip(self._inputs, columns, strict=True):
            registers[register] = column
            if look is not None:
                look(self._names[register], column)
        for register in self._unread:
            if register not in self._results:
                registers[register] = None
        del columns
        for step in self._steps:
            try:
                registers[step.register] = step.run([cast(Column, registers[read]) for read in step.reads])
            except Exception as error:
                raise _located(error, step.node) from error
            if look is not None:
                look(step.node.name, cast(Column, registers[step.register]))
            for register in step.frees:
                registers[register] = None
        return [None if register is None else registers[register] for register in self._results]


def _located(error: Exception, node: Node) -> Exception:
    """Return an error with the user's line in front; an index beyond its dim is the same kind of error as on one device."""
    where = source_line(node.meta)
    if is_out_of_range(error):
        return OutOfRangeError(f"{where}: {error}")
    if isinstance(error, PartirError):
        return error
    return PartirError(f"{where}: %{node.name} ({node.target}) failed on the ranks' blocks: {error}")


def _last_uses(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return, for each node, the operands that no later node reads."""
    seen: set[Node] = set()
    last: dict[Node, list[Node]] = {}
    for node in reversed(nodes):
        fresh = [read for read in node.all_input_nodes if read not in seen]
        seen.update(fresh)
        if node.op != "output" and fresh:
            last[node] = fresh
    return last


def _operation(node: Node, mesh: Mesh, stage: str) -> OnColumns:
    target = cast(object, node.target)
    if isinstance(target, OpOverload) and target.namespace == "partir":
        return _collective(node, cast("OpOverload[..., Any]", target), mesh, stage)
    return _local(node, cast("Callable[..., Any]", target), mesh)


def _collective(node: Node, target: OpOverload[..., Any], mesh: Mesh, stage: str) -> OnColumns:
    """Bind a partir op: its first argument is the column unless it has none, as ``coordinate``."""
    name = target.name().removeprefix("partir::").split(".")[0]
    schema = target._schema.arguments  # pyright: ignore[reportPrivateUsage]
    arguments: dict[str, Any] = {argument.name: argument.default_value for argument in schema}
    arguments.update(zip((argument.name for argument in schema), node.args, strict=False))
    arguments.update(node.kwargs)
    tensors = [arguments.pop(schema[0].name)] if schema[0].name in ("t", "ts") else []
    run = bind_collective(name, arguments, mesh, stage)
    reads = {read: index for index, read in enumerate(node.all_input_nodes)}
    ranks = range(mesh.size)
    if tensors and isinstance(tensors[0], Node):
        return lambda columns: run(columns[0])
    pick = _argument(tensors[0], reads) if tensors else None
    return lambda columns: run([] if pick is None else [pick(columns, rank) for rank in ranks])


def _local(node: Node, target: Callable[..., Any], mesh: Mesh) -> OnColumns:
    """Bind an op that runs on each rank alone, once for ranks with identical operands."""
    reads = {read: index for index, read in enumerate(node.all_input_nodes)}
    positional = [_argument(argument, reads) for argument in node.args]
    named = [(name, _argument(argument, reads)) for name, argument in node.kwargs.items()]
    here = _on_rank(target, mesh)
    shares = here is target and torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ())

    def one(columns: list[Column], rank: int) -> Any:
        values = [argument(columns, rank) for argument in positional]
        keywords = {name: argument(columns, rank) for name, argument in named}
        return target(*values, **keywords) if here is target else here(rank, *values, **keywords)

    def run(columns: list[Column]) -> Column:
        made: dict[tuple[int, ...], Any] = {}
        result: Column = []
        for rank in range(mesh.size):
            key = tuple([id(column[rank]) for column in columns]) if shares else (rank,)
            if key not in made:
                made[key] = one(columns, rank)
            result.append(made[key])
        return result

    return run


class _Place:
    """The communication backend of a rank's local functions: they may ask where they are and nothing else."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh = mesh
        self._rank = rank

    def coordinate(self, axes: tuple[str, ...]) -> int:
        """Return this rank's place in its group over ``axes``."""
        return self.mesh.index(self._rank, axes)


def _on_rank(target: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Return ``target``, or for a Python function, which may ask for its coordinate, one that takes the rank first."""
    if isinstance(cast(object, target), OpOverload) or target.__module__ in ("_operator", "builtins"):
        return target
    places = [cast(Backend, _Place(mesh, rank)) for rank in range(mesh.size)]

    def run(rank: int, *args: Any, **kwargs: Any) -> Any:
        with use_mesh(mesh), use_backend(places[rank]):
            return target(*args, **kwargs)

    return run


def _argument(value: Any, reads: dict[Node, int]) -> Argument:
    """Return how to find an argument: what a node holds on a rank, a list of such, or a constant."""
    if isinstance(value, Node):
        index = reads[value]
        return lambda columns, rank: columns[index][rank]
    if isinstance(value, (list, tuple)) and any(
        isinstance(item, (Node, list, tuple)) for item in cast("list[Any]", value)
    ):
        items = [_argument(item, reads) for item in cast("list[Any]", value)]
        return lambda columns, rank: [item(columns, rank) for item in items]
    constant = cast(Any, value)
    return lambda columns, rank: constant
