"""Plan documents in files: JSON, one tensor or collective a line, the same bytes for the same plan in every process.

    "tensors": [
     {"name": "fc1.weight", "kind": "parameter", "shape": [64, 16], "dtype": "f32", "layout": "f32[64@y.x, 16@z]", "chosen": ...
To pin a tensor, edit its "layout" and leave "chosen", which says what the compiler chose. To ask for other memory, edit "options".
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import torch

from partir.collectives.vocabulary import SCHEMAS
from partir.errors import LayoutError, MeshError, PartirError, PlanError
from partir.json_places import Entry, Repeated, read_json
from partir.layout import DTYPES, Layout, dtype_name
from partir.mesh import AXES, Mesh
from partir.options import LEGAL
from partir.paths import path_of_file
from partir.plan_document import Kind, Origin, PlanDocument, PlannedCollective, PlannedTensor, Settings
from partir.plan_edits import Fit, check_parameters, counted_dtype, counted_mesh
from partir.precision import DTYPES as PRECISIONS
from partir.quantities import parse_bytes

FORMAT, VERSION = "partir plan", 1
HELP = 'a "layout" that differs from its "chosen" is a pin; mesh and options may be edited; the rest says what follows'
OPTIONS = ("memory", "vectors", "outputs", "rng")
PRECISION = ("compute_dtype", "reduce_dtype")
PARTS = ("format", "version", "edit", "model", "mesh", "options", "totals", "notes", "tensors", "collectives")
MODEL = ("class", "torch", "call", "graph", "ops", "tied", "parameters")
TOTALS = ("counted_for", "parameters", "held", "saved", "forward", "backward")
TENSOR = ("name", "kind", "shape", "dtype", "layout"), ("chosen", "direction", "state", "op", "module", "line", "why", "read", "notes")
COLLECTIVE = ("stage", "op", "axis", "bytes", "reason"), ("line", "module", "tensors")

Value = TypeVar("Value")


def write(document: PlanDocument, to: str | os.PathLike[str]) -> None:
    """Write a document whole or not at all.

    Raises:
        PlanError: the path cannot be written.
    """
    path = path_of_file(to, "the plan", "plan.json", PlanError)
    path = path.resolve()  # a link is written through
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():  # a device or a pipe, as /dev/stdout: nothing may take its place
            path.write_text(text_of(document), encoding="ascii")
            return
        beside.write_text(text_of(document), encoding="ascii")
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True) if beside.parent.is_dir() else None
        raise PlanError(f"{path}: the plan cannot be written: {error.strerror or error}.") from error


def text_of(document: PlanDocument) -> str:
    """Return a document as JSON."""
    lines = [f" {_json(key)}: {text}" for key, text in _parts(document)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _parts(document: PlanDocument) -> Iterator[tuple[str, str]]:
    settings, origin = document.settings, document.origin
    yield "format", _json(FORMAT)
    yield "version", _json(VERSION)
    yield "edit", _json(HELP)
    model = {"class": origin.model, "torch": origin.torch, "call": origin.call, "graph": origin.graph, "ops": origin.ops}
    yield "model", _object(model, {"tied": origin.tied, "parameters": origin.parameters})
    yield "mesh", _json(dict(zip(document.mesh.names, document.mesh.sizes)))
    yield "options", _object(_options(settings), {"pin": settings.pin})
    yield "totals", _object(_totals(document), {})
    yield "notes", _rows(document.notes)
    yield "tensors", _rows(_tensor_row(tensor) for tensor in document.tensors)
    yield "collectives", _rows(_collective_row(collective) for collective in document.collectives)


def _options(settings: Settings) -> dict[str, object]:
    found: dict[str, object] = {name: getattr(settings, name) for name in OPTIONS}
    found |= settings.precision
    return found | ({"rules": settings.rules} if settings.rules else {})


def _totals(document: PlanDocument) -> dict[str, object]:
    parameters = document.of("parameter")
    held = sum(tensor.local_bytes(document.mesh) for tensor in parameters)
    moved = {stage: document.bytes(stage) for stage in ("forward", "backward")}
    whole = sum(tensor.bytes for tensor in parameters)
    return {"counted_for": document.counted, "parameters": whole, "held": held, "saved": document.saved, **moved}


def _tensor_row(tensor: PlannedTensor) -> dict[str, object]:
    row: dict[str, object] = {"name": tensor.name, "kind": tensor.kind, "shape": tensor.shape, "dtype": tensor.dtype}
    row |= {"layout": str(tensor.layout), "chosen": "" if tensor.chosen is None else str(tensor.chosen)}
    row |= {name: getattr(tensor, name) for name in TENSOR[1][1:]}
    return {key: value for key, value in row.items() if value or key == "shape"}


def _collective_row(collective: PlannedCollective) -> dict[str, object]:
    row = {name: getattr(collective, name) for names in COLLECTIVE for name in names}
    return {key: value for key, value in row.items() if value}


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def _object(items: Mapping[str, object], named: Mapping[str, Mapping[str, str]]) -> str:
    """Return an object with one entry a line, the texts of its inner objects too."""
    inner = [f"  {_json(key)}: {_json(value)}" for key, value in items.items()]
    inner += [f"  {_json(key)}: {_named(texts)}" for key, texts in named.items()]
    return "{\n" + ",\n".join(inner) + "\n }"


def _named(texts: Mapping[str, str]) -> str:
    lines = [f"   {_json(key)}: {_json(text)}" for key, text in texts.items()]
    return "{\n" + ",\n".join(lines) + "\n  }" if lines else "{}"


def _rows(rows: Iterable[object]) -> str:
    lines = [f"  {_json(row)}" for row in rows]
    return "[\n" + ",\n".join(lines) + "\n ]" if lines else "[]"


def read(path: Path) -> PlanDocument:
    """Read a document.

    Raises:
        PlanError: the file cannot be read, is no plan or of another version, or a field of it means nothing; names the line.
    """
    whole = read_json(path)
    found = whole.value
    if isinstance(found, Repeated):
        whole.object()
    if not isinstance(found, dict) or cast("dict[str, object]", found).get("format") != FORMAT:
        raise PlanError(f"{path}: is no plan: a plan is written by plan.save and has \"format\": {_json(FORMAT)}.")
    parts = whole.object(("format", "version"))
    if type(parts["version"].value) is not int or parts["version"].value != VERSION:
        parts["version"].fail(f"is {_json(parts['version'].value)}; this partir reads version {VERSION}. Save the plan again.")
    parts = whole.object([name for name in PARTS if name != "edit"], ("edit",))
    settings, totals = _settings(parts["mesh"], parts["options"]), parts["totals"].object(TOTALS, ())
    fit = Fit(settings.mesh, parts["mesh"], counted_mesh(totals["counted_for"].text()))
    tensors = tuple(_tensor(entry, fit) for entry in parts["tensors"].list())
    _refuse_repeats(tensors)
    check_parameters(tensors, origin := _origin(parts["model"]), parts["tensors"])
    collectives = tuple(_collective(entry, fit) for entry in parts["collectives"].list())
    notes = tuple(entry.text() for entry in parts["notes"].list())
    counted, saved = totals["counted_for"].text(), totals["saved"].integer()
    if counted_dtype(counted) not in (None, *DTYPES):
        totals["counted_for"].fail(f"is {_json(counted)}: no dtype is called {counted_dtype(counted)}.")
    document = PlanDocument(origin, settings, tensors, collectives, saved, notes, counted, str(path))
    _check_totals(document, totals)
    return document


def _check_totals(document: PlanDocument, totals: Mapping[str, Entry]) -> None:
    for name in ("parameters", "held"):
        totals[name].integer()
    for stage in ("forward", "backward"):
        if totals[stage].integer() != document.bytes(stage):
            totals[stage].fail(f"is {totals[stage].value}; the {stage}'s collectives add up to {document.bytes(stage)}.")


def _origin(entry: Entry) -> Origin:
    items = entry.object(MODEL, ())
    parameters, tied = ({key: item.text() for key, item in items[name].object().items()} for name in ("parameters", "tied"))
    call, graph, ops, torch = (items[name].text() for name in ("call", "graph", "ops", "torch"))
    return Origin(items["class"].text(), parameters, tied, call, graph, ops, torch)


def _settings(mesh: Entry, options: Entry) -> Settings:
    sizes = {name: entry.integer(least=1) for name, entry in mesh.object((), AXES).items()}
    items = options.object((*OPTIONS, "pin"), (*PRECISION, "rules"))
    for name in OPTIONS:
        if items[name].text() not in LEGAL[name] and not (name == "memory" and _is_budget(items[name].text())):
            more = ', or a number of bytes, "40GB"' if name == "memory" else ""
            items[name].fail(f"is {_json(items[name].value)}; choose from {', '.join(map(_json, LEGAL[name]))}{more}.")
    pin = {pattern: entry.text() for pattern, entry in items["pin"].object().items()}
    memory, vectors, outputs, rng = (items[name].text() for name in OPTIONS)
    precision = {name: _dtype(items[name]) for name in PRECISION if name in items}
    rules = tuple(_pair(pair, "a rule file's name and digest") for pair in items["rules"].list()) if "rules" in items else ()
    return Settings(_meant(mesh, Mesh.parse, sizes), memory, vectors, outputs, rng, pin, **precision, rules=rules)


def _dtype(entry: Entry) -> torch.dtype:
    legal = {dtype_name(dtype): dtype for dtype in PRECISIONS}
    if entry.text() not in legal:
        entry.fail(f"is {_json(entry.value)}; choose from {', '.join(map(_json, legal))}, or leave it out.")
    return legal[entry.text()]


def _is_budget(text: str) -> bool:
    try:
        return parse_bytes(text) > 0
    except PartirError:
        return False


def _tensor(entry: Entry, fit: Fit) -> PlannedTensor:
    items = entry.object(*TENSOR)
    kind = items["kind"].text()
    if kind not in get_args(Kind):
        items["kind"].fail(f"is {_json(kind)}; choose from {', '.join(map(_json, get_args(Kind)))}.")
    shape = tuple(size.integer() for size in items["shape"].list())
    layout = _layout(items["layout"], None if kind == "output" else shape, items["dtype"].text())
    chosen = _meant(items["chosen"], Layout.parse, items["chosen"].text()) if "chosen" in items else None
    _check_fit(items["layout"], layout, fit, touched=layout != chosen)
    if chosen is not None:
        if kind != "output" and chosen.shape != shape:
            items["chosen"].fail(f"is {chosen} of a tensor of shape {list(shape)}.")
        _check_edit(items["layout"], layout, chosen, kind)
    words = {name: items[name].text() for name in TENSOR[1] if name in items and name not in ("chosen", "read", "notes")}
    read = tuple(_pair(reader, "a reader and a layout") for reader in items["read"].list()) if "read" in items else ()
    notes = tuple(note.text() for note in items["notes"].list()) if "notes" in items else ()
    for name in ("direction", "state"):
        if words.get(name, AXES[0]) not in AXES:
            items[name].fail(f"is {_json(words[name])}; choose from {', '.join(map(_json, AXES))}, or leave it out.")
    kind = cast(Kind, kind)
    return PlannedTensor(items["name"].text(), kind, shape, layout, chosen, **words, read=read, notes=notes, place=items["layout"])


def _pair(entry: Entry, what: str) -> tuple[str, str]:
    items = [item.text() for item in entry.list()]
    return (items[0], items[1]) if len(items) == 2 else entry.fail(f"is no pair of {what}.")


def _check_fit(entry: Entry, layout: Layout, fit: Fit, touched: bool) -> None:
    try:
        layout.local_shape(fit.mesh)
    except LayoutError as error:
        message = str(error)
    else:
        return
    fit.refuse(entry, message, touched)


def _layout(entry: Entry, shape: tuple[int, ...] | None, dtype: str) -> Layout:
    layout = _meant(entry, lambda text: Layout.parse(text, shape, dtype), entry.text())
    if layout.dtype != dtype:
        entry.fail(f"has dtype {layout.dtype}, the tensor's is {dtype}; a layout does not convert.")
    return layout


def _check_edit(entry: Entry, layout: Layout, chosen: Layout, kind: str) -> None:
    """An edit says how dims are split; types along the other axes follow from that."""
    tail = (layout.pending, layout.varied, layout.owner)
    if kind == "output" and layout != chosen:
        entry.fail('of an output follows from options.outputs; edit that: "auto", "whole" or "sharded".')
    if tail not in (((), (), None), (chosen.pending, chosen.varied, chosen.owner)):
        entry.fail(f"is {layout}: an edit says how dims are split, without +, max, ~ or on; the compiler chose {chosen}.")


def _meant(entry: Entry, parse: Callable[[Any], Value], given: object) -> Value:
    """Return what a field means, its mistakes named with their place."""
    try:
        return parse(given)
    except (LayoutError, MeshError) as error:
        message = str(error)
    return entry.fail(f"is {_json(entry.value)}: {message}")


def _collective(entry: Entry, fit: Fit) -> PlannedCollective:
    items = entry.object(*COLLECTIVE)
    words = {name: items[name].text() if name in items else "" for name in ("stage", "op", "axis", "reason", "line", "module")}
    if words["stage"] not in ("forward", "backward"):
        items["stage"].fail(f'is {_json(words["stage"])}; choose from "forward", "backward".')
    if words["op"] not in SCHEMAS:
        items["op"].fail(f"is {_json(words['op'])}; choose from {', '.join(map(_json, SCHEMAS))}.")
    unknown = [axis for axis in words["axis"].split(".") if axis not in fit.mesh.names]
    if unknown:
        fit.refuse(items["axis"], f"the mesh's axes are {', '.join(fit.mesh.names)}.")
    tensors = tuple(name.text() for name in items["tensors"].list()) if "tensors" in items else ()
    return PlannedCollective(**words, bytes=items["bytes"].integer(), tensors=tensors)


def _refuse_repeats(tensors: Iterable[PlannedTensor]) -> None:
    seen: set[tuple[str, str]] = set()
    for tensor in tensors:
        if (tensor.kind, tensor.name) in seen and tensor.place is not None:
            tensor.place.fail(f"is the second of {tensor.kind} {tensor.name!r}; list each tensor once.")
        seen.add((tensor.kind, tensor.name))
