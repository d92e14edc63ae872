"""What the collectives of a program move, read from its graphs: one record for each collective that has something to move."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch.fx import GraphModule, Node

from partir.collectives import received_bytes, split_axes
from partir.collectives.vocabulary import SCHEMAS
from partir.errors import PartirError, source_line
from partir.graph import collective_name, is_collective, operands, tensor_of
from partir.layout import dtype_name
from partir.mesh import AXES, Mesh
from partir.program import Program

Stage = Literal["forward", "backward"]


@dataclass(frozen=True)
class Collective:
    """One collective of a program, as one rank sees it.

    Args:
        op: the collective, ``all_gather``.
        axis: the mesh axes of its group, ``"y"`` or ``"z.x"``.
        bytes: bytes that one rank receives; for ``broadcast`` and ``reduce_to``, the rank that receives most.
        stage: ``"forward"`` or ``"backward"``.
        reason: what it is for, ``blocks.0.mlp.fc1.weight for linear_2`` or ``gradient of layer_norm``.
        source: the user's line that it serves, ``gpt.py:71 (blocks.0.mlp)``.
        node: its name in the graph of its stage.
        again: the backward repeats what the forward has moved, because only shards were kept.
        dtype: of what moves, ``"bf16"``.
    """

    op: str
    axis: str
    bytes: int
    stage: Stage
    reason: str
    source: str
    node: str
    again: bool = False
    dtype: str = ""

    @property
    def layer(self) -> str:
        """The list item that it serves, ``blocks.0``, or ``""``."""
        return layer_of(self.source.rpartition("(")[2].rstrip(")") if self.source.endswith(")") else "")


def check_filter(stage: str | None = None, axis: str | None = None, op: str | None = None) -> None:
    """Refuse words that no collective can have, for which a sum would be 0.

    Raises:
        PartirError: naming the word, and what there is.
    """
    known = {"stage": (stage, ("forward", "backward")), "axis": (axis, AXES), "op": (op, tuple(SCHEMAS))}
    for name, (word, legal) in known.items():
        words = split_axes(word) if word and name == "axis" else (word,)
        if word is not None and not set(words) <= set(legal):
            raise PartirError(f"{name}={word!r}: there is no such {name}; choose from {', '.join(legal)}.")


def layer_of(path: str) -> str:
    """Return the part of a dotted path up to its first number.

    >>> layer_of("blocks.0.mlp.fc1"), layer_of("norm")
    ('blocks.0', '')
    """
    found = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", path)
    return found[0] if found else ""


def collectives_of(program: Program) -> tuple[Collective, ...]:
    """Return the collectives of a program that move data, in the order in which they run."""
    names = {node.name: str(node.meta["slot"]) for node in program.forward.graph.find_nodes(op="placeholder")}
    records = list(_records(program.forward, program.mesh, "forward", names))
    if program.backward is not None:
        records += _records(program.backward, program.mesh, "backward", names)
    return tuple(records)


def _records(graph_module: GraphModule, mesh: Mesh, stage: Stage, names: Mapping[str, str]) -> Iterator[Collective]:
    for node in graph_module.graph.nodes:
        if not is_collective(node):
            continue
        axis, num_bytes = message_of(node, mesh)
        if not num_bytes:
            continue
        again = bool(node.meta.get("again"))
        reason = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(node.meta.get("reason", "")))
        reason, line, dtype = reason + ", again" * again, source_line(node.meta), dtype_name(tensor_of(operands(node)[0]).dtype)
        yield Collective(collective_name(node), axis, num_bytes, stage, reason, line, node.name, again, dtype)


def axis_of(node: Node) -> str:
    """Return the axes of a collective's group, ``"z.x"``."""
    return str(_arguments(node)["axis"])


def message_of(node: Node, mesh: Mesh) -> tuple[str, int]:
    """Return the axes of a collective's group, ``"z.x"``, and the bytes that one rank receives, 0 where nothing moves."""
    axis = axis_of(node)
    blocks = [tensor_of(operand) for operand in operands(node)]
    if not blocks:
        return axis, 0
    name = collective_name(node)
    shapes = [tuple(block.shape) for block in blocks]
    shape = shapes if name.endswith("_bucket") else shapes[0]
    return axis, received_bytes(name, shape, blocks[0].dtype, mesh.extent(split_axes(axis)))


def _arguments(node: Node) -> dict[str, Any]:
    schema = [argument.name for argument in cast(Any, node.target)._schema.arguments]
    return dict(zip(schema, node.args)) | dict(node.kwargs)
