"""Explain one tensor of a plan: where its blocks live, who reads it, what moves for it, its gradient, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from partir.block_places import blocks_text
from partir.collectives import cotangent
from partir.errors import PartirError
from partir.folding import columns
from partir.plan_edits import edits_caution
from partir.summary import fraction

if TYPE_CHECKING:
    from partir.plan_document import PlanDocument, PlannedCollective, PlannedTensor


def explain(document: PlanDocument, name: str) -> str:
    """Return what a plan says of one tensor, as text.

    Args:
        name: of a parameter, input, value or output, or of a module with one value.

    Raises:
        UnknownNameError: nothing is called so.
        PartirError: the name is no text.
    """
    if not isinstance(cast(object, name), str):
        raise PartirError(f"explain({name!r}): a tensor is called by a text, not by {type(name).__name__}: plan.layouts lists the names.")
    tensor = document[name]
    parts = [_title(document, tensor, name), _readers(tensor), _moves(document, tensor), _gradient(document, tensor)]
    blocks = ["blocks, by rank", *(f"  {line}" for line in blocks_text(tensor.layout.strip(document.mesh), document.mesh))]
    return "\n".join(line for part in [*parts, blocks] for line in part) + "\n"


def _title(document: PlanDocument, tensor: PlannedTensor, name: str) -> list[str]:
    local, layout = list(tensor.layout.local_shape(document.mesh)), tensor.layout
    copies = document.mesh.size // document.mesh.extent(layout.split_axes) if layout.owner is None else 1
    held, whole = tensor.local_bytes(document.mesh), tensor.bytes
    lines = [
        f"{tensor.name}: {tensor.kind} {tensor.layout} on mesh {document.mesh}",
        *([f"asked for as {name}"] if name != tensor.name else []),
        f"whole {list(tensor.shape)}, {whole:,} bytes; on each rank {local}, {held:,} bytes ({fraction(held, whole)})"
        + (f", held {copies} times" if copies > 1 else ""),
        f"block {tensor.layout.block or '-'}, direction {tensor.direction or '-'}, state {tensor.state or '-'}",
        *_origin(tensor),
        f"why: {_why(tensor)}",
    ]
    return [*lines, *(f"note: {note}" for note in tensor.notes), *edits_caution(document, "the plan was ")]


def _origin(tensor: PlannedTensor) -> list[str]:
    module = f" ({tensor.module})" if tensor.module else ""
    if tensor.kind == "value":
        return [f"computed by {tensor.op} at {tensor.line}{module}"]
    if tensor.kind == "output":
        return [f"the value {tensor.op}"]
    return [f"first used at {tensor.line}"] if tensor.line else []


def _why(tensor: PlannedTensor) -> str:
    if not tensor.edited:
        return tensor.why or "-"
    return "asked for in the plan" if tensor.chosen is None else f"edited in the plan; the compiler chose {tensor.chosen}: {tensor.why}"


def _readers(tensor: PlannedTensor) -> list[str]:
    if not tensor.read:
        return ["read by nothing"] if tensor.kind != "output" else []
    return ["read by", *(f"  {line}" for line in columns([(reader, f"as {layout}") for reader, layout in tensor.read]))]


def _moves(document: PlanDocument, tensor: PlannedTensor) -> list[str]:
    """Return the collectives for a tensor; a bucket's bytes are those of all its members."""
    rows: list[tuple[str, ...]] = []
    found = [c for c in document.collectives if _is_for(c, tensor)]
    for c in found:
        together = f", with {len(c.tensors) - 1} others" if len(c.tensors) > 1 else ""
        rows.append((c.stage, c.op, c.axis, f"{c.bytes:,}", c.reason + together))
    if not rows:
        return ["nothing moves for it"]
    total = sum(c.bytes for c in found)
    return [f"moves {total:,} bytes to each rank", *(f"  {line}" for line in columns(rows, right=[3]))]


def _is_for(collective: PlannedCollective, tensor: PlannedTensor) -> bool:
    if tensor.kind == "output":
        return collective.reason == f"output of {tensor.op}"
    return tensor.name in collective.tensors


def _gradient(document: PlanDocument, tensor: PlannedTensor) -> list[str]:
    layout = tensor.layout.strip(document.mesh)
    if not layout.grad or any(kind == "max" for _, kind in layout.pending):
        return ["gradient: none"]
    return [f"gradient: {cotangent(layout)}"]
