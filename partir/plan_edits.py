"""What a person edited in a plan document since it was made, and what its numbers are worth then."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from partir.json_places import Entry
from partir.mesh import AXES, Mesh

if TYPE_CHECKING:
    from partir.plan_document import Origin, PlanDocument, PlannedTensor

STALE = "collectives, readers and bytes saved are those from before the edits: plan again to count"
MOST_NAMES = 3


def settings_by_name(text: str) -> dict[str, str]:
    """Return settings by name, of their text.

    >>> settings_by_name("mesh (x=2, y=1, z=1)  memory=low  pin={'w': 'f[a, b]'}")
    {'mesh': '(x=2, y=1, z=1)', 'memory': 'low', 'pin': "{'w': 'f[a, b]'}"}
    """
    options, _, pin = text.partition("  pin=")
    parts = re.split(r"  (?=\w+=)", options.replace("mesh ", "mesh=", 1))
    found = {name: value for name, _, value in (part.partition("=") for part in parts)}
    return found | ({"pin": pin} if pin else {})


def edited_settings(document: PlanDocument) -> list[str]:
    """Return the names of the settings that differ from those for which a document was counted."""
    then, now = settings_by_name(document.counted), settings_by_name(str(document.settings))
    return [name for name in {**now, **then} if now.get(name) != then.get(name)]


def edits_text(document: PlanDocument) -> str:
    """Return every kind of edit as text, ``mesh, memory, layouts of fc1.weight``; ``""`` where nothing was edited."""
    layouts = [tensor.name for tensor in document.edits]
    return ", ".join([*edited_settings(document), *_layouts(layouts)])


def _layouts(names: list[str]) -> Iterable[str]:
    if names:
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        yield f"layouts of {', '.join(names[:MOST_NAMES])}{more}"


def edits_caution(document: PlanDocument, what: str = "") -> list[str]:
    """Return lines that say what was edited and which numbers are old, none where nothing was edited.

    Args:
        what: begins the line, "the first plan was ".
    """
    text = edits_text(document)
    return [f"{what}edited since it was made: {text}", f"  {STALE}"] if text else []


def counted_mesh(counted: str) -> Mapping[str, int]:
    """Return the mesh for which a document was counted, of its settings as text.

    >>> counted_mesh("mesh (x=2, y=1, z=1)  memory=low")
    {'x': 2, 'y': 1, 'z': 1}
    """
    return {axis: int(size) for axis, size in re.findall(r"(\w+)=([0-9]{1,18})", settings_by_name(counted).get("mesh", ""))}


def counted_dtype(counted: str) -> str | None:
    """Return the compute_dtype for which a document was counted, of its settings as text: ``bf16``, or None."""
    return settings_by_name(counted).get("compute_dtype")


def check_parameters(tensors: Iterable[PlannedTensor], origin: Origin, entry: Entry) -> None:
    """Check that each parameter of the model has its row, of the model's dtype and shape: its layout is read there."""
    found = {tensor.name: tensor for tensor in tensors if tensor.kind == "parameter"}
    for name, tensor in found.items():
        planned = origin.parameters.get(name)
        actual = f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
        if planned != actual and tensor.place is not None:
            known = f"in model.parameters it is {planned}" if planned else "model.parameters has no such name"
            tensor.place.fail(f"is that of the parameter {name!r}, {actual}; {known}.")
    missing = [name for name in origin.parameters if name not in found]
    if missing:
        entry.fail(f"has no row of kind \"parameter\" for {missing[0]!r}, which model.parameters names.")


@dataclass(frozen=True)
class Fit:
    """Says whether it is an edited mesh that does not fit, or what is laid out on it.

    Args:
        mesh: the file's mesh.
        entry: where it stands.
        counted: the sizes for which the file was made.
    """

    mesh: Mesh
    entry: Entry
    counted: Mapping[str, int]

    def refuse(self, entry: Entry, message: str, touched: bool = False) -> NoReturn:
        """Refuse what does not fit: the mesh where it alone was edited.

        Args:
            touched: the entry was edited.
        """
        if touched or {axis: self.mesh[axis] for axis in AXES} == {axis: self.counted.get(axis, 1) for axis in AXES}:
            entry.fail(f"is {json.dumps(entry.value)}: {message}")
        said = f"is {self.mesh}, edited, and {entry.field} {json.dumps(entry.value)}, from before, does not fit it: {message}"
        self.entry.fail(f"{said} Choose sizes that fit, or plan the model on this mesh: partir.plan(model, {self.mesh.sizes}, ...).")
