"""Compile a model as a plan document says: its mesh, its options, its parameters' layouts, and every layout edited in it.

What the compiler chose it chooses again, so that an unedited plan gives the same program. Inputs of other sizes keep the layouts of
parameters and, where the graph has the same ops, the edited ones of values.
"""

from __future__ import annotations

import glob
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from partir.dims import Dim
from partir.errors import LayoutError, MeshError, PlanError
from partir.layout import DTYPES, Layout, dtype_name
from partir.mesh import AXES, Mesh
from partir.module import ParallelModule, parallelized
from partir.options import Options
from partir.passes import pipeline
from partir.passes.trace import Traced, flatten_inputs, trace
from partir.plan_document import CHOSEN_KINDS, PlanDocument, PlannedTensor, as_document, settings_of
from partir.plan_edits import counted_dtype
from partir.plan_facts import call_digest, graph_digests, layouts_at_rest, parameter_types
from partir.printer import graph_text, op_text

Compile = Callable[..., pipeline.Compiled]
SETTINGS = ("memory", "vectors", "outputs", "rng", "compute_dtype", "reduce_dtype")


def requested(model: nn.Module, mesh: Any, plan: object, options: Options) -> tuple[Mesh, Options, Compile]:
    """Return the mesh, the options and the compiler that a user asks for, by a plan or without.

    Args:
        mesh: as for `parallelize`; with a plan None or the plan's.
        plan: None, a plan, a document or a path.
        options: what was given besides; with a plan, only what is not its business or agrees with it.

    Raises:
        MeshError: neither mesh nor plan, or two meshes.
        PlanError: a file that is no plan, a plan of another model, an option that contradicts it.
    """
    if plan is None:
        if mesh is None:
            raise MeshError('mesh None is not understood: give (x, y, z), (data, x, y, z), "auto", or plan=, which has a mesh.')
        return Mesh.parse(mesh), options, pipeline.compile_program
    document = as_document(plan)
    _check_rules(document, options)
    if mesh is not None and any(Mesh.parse(mesh)[axis] != document.mesh[axis] for axis in AXES):
        raise MeshError(f"mesh={Mesh.parse(mesh)} is given with a plan on mesh {document.mesh}. Leave mesh out, or plan for that mesh.")
    check_model(document, model)
    return document.mesh, _options(document, options), FollowedPlan(document)


def _options(document: PlanDocument, given: Options) -> Options:
    settings, default = document.settings, Options()
    for name in SETTINGS:
        if getattr(given, name) not in (getattr(default, name), getattr(settings, name)):
            message = f"{name}={getattr(given, name)!r} is given with a plan that has {name}={getattr(settings, name)!r}"
            raise PlanError(f"{message}. Leave it out, or edit the plan's options.")
    pins = {**settings.pin, **_pins(document, document.edits), **given.pin}
    return replace(given, pin=pins, **{name: getattr(settings, name) for name in SETTINGS})


def _check_rules(document: PlanDocument, given: Options) -> None:
    """Check that the rule files are those that the plan was made with: a document does not hold their text."""
    planned, found = document.settings.rules, tuple(source.identity for source in given.rules)
    if [text for _, text in planned] == [text for _, text in found]:
        return
    where, names = document.file or "the plan", [name for name, _ in planned]
    if not planned:
        given_names = [name for name, _ in found]
        raise PlanError(f"{where}: rules={given_names} is given with a plan made without rules. Leave it out, or plan again.")
    changed = [name for name, text in found if name in names and (name, text) not in planned]
    got = f"the text of {', '.join(changed)} has changed since" if changed else f"given are {[name for name, _ in found] or 'none'}"
    what = f"{where}: the plan was made with the rule files {document.settings.rules_text} (name, SHA-256 of the text); {got}"
    raise PlanError(f"{what}. Pass the same, rules={names}, or plan again with other rules.")


def _pins(document: PlanDocument, tensors: Iterable[PlannedTensor]) -> dict[str, str]:
    """Return layouts as pins that match one name each and leave sizes open."""
    found: dict[str, str] = {}
    for tensor in tensors:
        alike = [other for other in document.of(*CHOSEN_KINDS) if other.name == tensor.name]
        if len(alike) > 1:
            kinds = " and ".join(other.kind for other in alike)
            raise PlanError(f"{_place(tensor, document)}: {tensor.name!r} is the name of a {kinds}: neither can be pinned by it.")
        found[glob.escape(tensor.name)] = f"f[{', '.join(_dim_text(dim) for dim in tensor.layout.dims)}]"
    return found


def _dim_text(dim: Dim) -> str:
    if len(dim.parts) > 1:
        return str(dim)
    return "n" + (f"@{'.'.join(dim.all_axes)}" if dim.all_axes else "")


def _place(tensor: PlannedTensor, document: PlanDocument) -> str:
    return tensor.place.where if tensor.place else document.file or "the plan"


def check_model(document: PlanDocument, model: nn.Module) -> None:
    """Check that a model is the one that was planned: its class, and its parameters' names, shapes and dtypes.

    Raises:
        PlanError: says which are missing, unexpected or different.
    """
    name = (parallelized(model).original if isinstance(model, ParallelModule) else type(model)).__name__
    planned, found = document.origin.parameters, parameter_types(model)
    differ = [f"{key} is {found[key]}, planned {planned[key]}" for key in planned if key in found and found[key] != planned[key]]
    facts = {
        "missing": [f"{key} {planned[key]}" for key in planned if key not in found],
        "unexpected": [f"{key} {found[key]}" for key in found if key not in planned],
        "different": differ,
    }
    said = [f"{kind}: {_some(items)}" for kind, items in facts.items() if items]
    if name == document.origin.model and not said:
        return
    where, what = document.file or "the plan", "another model" if name != document.origin.model else "other parameters"
    is_of = f"{where} is of {what}: it was made for {document.origin.model}, this is {name}"
    raise PlanError(f"{is_of}{'; parameters ' if said else ''}{'; '.join(said)}. Plan this model, or build the planned one.")


def _some(items: list[str]) -> str:
    return ", ".join(items[:3]) + (f", and {len(items) - 3} more" if len(items) > 3 else "")


def _calls(traced: Traced) -> list[tuple[str, str]]:
    """Return name and op of each call but casts."""
    calls = [(node.name, op_text(node)) for node in traced.graph_module.graph.nodes if node.op == "call_function"]
    return [call for call in calls if not _is_cast(call[1])]


def _is_cast(op: str) -> bool:
    return op.split(".")[:2] in (["aten", "to"], ["aten", "_to_copy"])


@dataclass(frozen=True)
class FollowedPlan:
    """A compiler that follows a document; called as `pipeline.compile_program`."""

    document: PlanDocument

    def __call__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mesh: Mesh,
        options: Options,
        parameter_layouts: Mapping[str, Layout] | None = None,
        input_layouts: Mapping[str, Layout] | None = None,
    ) -> pipeline.Compiled:
        """Compile; see `pipeline.compile_program`.

        Raises:
            PlanError: the model computes something else than when the plan was made.
            LayoutError: an edited layout that cannot be kept; names its line.
        """
        start = time.perf_counter()
        traced = trace(model, args, kwargs, options.compute_dtype)
        timings = {"trace": time.perf_counter() - start}
        planned = self._as_planned(model, args, kwargs, traced, options)
        graph, ops = graph_digests(planned.graph_module, graph_text(planned.graph_module))
        same, fixed = graph == self.document.origin.graph, dict(parameter_layouts or {})
        if not same:
            self._refuse_other_graph(model, args, kwargs)
            fixed = {**self._parameters(options), **fixed}
            options = options if ops == self.document.origin.ops else self._without_values(options)
        compiled = self._compile(traced, mesh, options, fixed, input_layouts or {}, timings, same)
        missed = self._missed(compiled, options) if same and not fixed else []
        if not missed:
            return compiled
        options = replace(options, pin={**options.pin, **_pins(self.document, missed)})
        return self._compile(traced, mesh, options, fixed, input_layouts or {}, timings, same)

    def _as_planned(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], traced: Traced, options: Options) -> Traced:
        """Return a trace in the dtype for which the plan was made, which its digests are of, however the dtype was edited.

        Raises:
            PlanError: an edited value that has no counterpart in the other dtype's graph.
        """
        made_for = counted_dtype(self.document.counted)
        if made_for == (dtype_name(options.compute_dtype) if options.compute_dtype else None):
            return traced
        planned = trace(model, args, kwargs, DTYPES[made_for] if made_for else None)
        self._check_values(planned, traced)
        return planned

    def _check_values(self, planned: Traced, traced: Traced) -> None:
        values = [tensor for tensor in self.document.edits if tensor.kind == "value"]
        if values and (_calls(planned) != _calls(traced) or any(_is_cast(tensor.op) for tensor in values)):
            edited = f"compute_dtype and the layout of the value {values[0].name!r} are both edited"
            message = f"{edited}, but in another dtype the graph has other values. Edit the dtype, plan again and save, then edit layouts"
            raise PlanError(f"{_place(values[0], self.document)}: {message}.")

    def _compile(
        self,
        traced: Traced,
        mesh: Mesh,
        options: Options,
        parameters: Mapping[str, Layout],
        inputs: Mapping[str, Layout],
        timings: Mapping[str, float],
        same: bool,
    ) -> pipeline.Compiled:
        try:
            return pipeline.compile_traced(traced, mesh, options, parameters, inputs, timings)
        except (LayoutError, MeshError) as error:
            named = (edit for edit in self.document.edits if f" {edit.name}: " in str(error))
            where = next((_place(edit, self.document) for edit in named), self.document.file or "the plan")
            sizes = ", ".join(f"{t.name} {t.dtype}{list(t.shape)}" for t in self.document.of("input"))
            raise type(error)(f"{where}: {error}" + ("" if same else f" The plan was made for {sizes}.")) from error

    def _refuse_other_graph(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Inputs, modes and attributes as planned, and yet another graph: another forward."""
        leaves, structure = flatten_inputs(args, kwargs)
        origin = self.document.origin
        if call_digest(model, leaves, structure.text) == origin.call:
            raise PlanError(
                f"{self.document.file or 'the plan'}: {origin.model} has the parameters and inputs that were planned with torch "
                f"{origin.torch}, but its forward computes something else now. Plan it again."
            )

    def _parameters(self, options: Options) -> dict[str, Layout]:
        """Return the planned layouts of parameters, all but those that pins say."""
        planned = self.document.of("parameter")
        return {t.name: t.layout for t in planned if not any(fnmatchcase(t.name, pattern) for pattern in options.pin)}

    def _without_values(self, options: Options) -> Options:
        """Leave out edited values: their names may mean something else in another graph."""
        values = [tensor for tensor in self.document.edits if tensor.kind == "value"]
        edited = {glob.escape(tensor.name) for tensor in values}
        return replace(options, pin={pattern: text for pattern, text in options.pin.items() if pattern not in edited})

    def _missed(self, compiled: pipeline.Compiled, options: Options) -> list[PlannedTensor]:
        """Return the tensors of an unedited plan that a fresh compilation lays elsewhere (another version of partir)."""
        document = self.document
        asked = settings_of(compiled.program.mesh, options)
        if document.edits or str(asked) != document.counted:
            return []
        held = layouts_at_rest(compiled.program, compiled.annotated)
        return [
            tensor
            for tensor in document.of(*CHOSEN_KINDS)
            if (rest := held.get((tensor.kind, tensor.name))) and rest.strip(document.mesh).dims != tensor.layout.strip(document.mesh).dims
        ]

