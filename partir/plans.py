"""Plan a model on a mesh: what every tensor's layout is, and what moves, without a process group and without weights.

plan = partir.plan(model, mesh=(4, 4, 4), example_inputs=ids)
print(plan)                                # a screen: parameters, totals, the costliest collectives
print(plan.report())                       # every value and collective
print(plan.explain("blocks.0.mlp.fc1"))    # one tensor: its blocks, its readers, what moves for it, and why
plan.bytes(stage="forward", axis="z")      # bytes that one rank receives
plan.layouts["blocks.0.mlp.fc1.weight"]    # Layout.parse("f32[3072@y.x, 768@z]")
print(plan.text("lowered"))                # one rank's graph with its collectives
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from partir import rules as rule_files
from partir.accumulation_cost import AccumulationCost, accumulation_cost
from partir.errors import PartirError
from partir.follow_plan import requested
from partir.hardware import Hardware
from partir.layout_names import Layouts, layouts_by_name
from partir.limit import Limit, limit_of
from partir.mesh import Mesh
from partir.module import ParallelModule, original_class
from partir.options import Options, memory_text
from partir.passes import pipeline
from partir.passes.trace import flatten_inputs
from partir.plan_document import PlanDocument
from partir.plan_facts import call_digest, document_of, parameter_types
from partir.program import Program
from partir.records import Collective, check_filter, collectives_of
from partir.report import report
from partir.signature import positional
from partir.timing import StepTime, step_seconds

if TYPE_CHECKING:
    from graphviz import Digraph  # pyright: ignore[reportMissingTypeStubs]

    from partir.cost import Cost
    from partir.plan_difference import PlanDifference

STAGES = ("traced", "annotated", "lowered", "forward", "backward")


def plan(
    model: nn.Module,
    mesh: Any = None,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    memory: str | int = "low",
    vectors: str = "balanced",
    outputs: str = "auto",
    pin: Mapping[str, str] | None = None,
    rules: str | Path | Iterable[str | Path] | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    plan: Plan | PlanDocument | str | os.PathLike[str] | None = None,
) -> Plan:
    """Compile a model for a mesh and return what every rank would hold and receive. Nothing runs.

    The model may be on the meta device, and is not changed. Its present training and grad mode is the one planned.

    Args:
        model: any module.
        mesh: as for `parallelize`; no process needs to exist.
        example_inputs: a tensor or a tuple of arguments; only shapes, dtypes and Python values matter.
        example_kwargs: keyword arguments of the example.
        memory, vectors, outputs, pin, rules, compute_dtype, reduce_dtype, plan: as for `parallelize`.

    Raises:
        PartirError: anything that compiling finds: an op without a rule, sizes that axes do not divide, a pin that
            matches nothing or is no layout of what it matches.

    >>> import torch
    >>> linear = plan(nn.Linear(16, 32, device="meta"), (2, 2, 2), torch.empty(8, 16, device="meta"), outputs="sharded")
    >>> print(linear.layouts["weight"], linear.bytes(stage="forward", axis="x"))
    f32[32@y.x, 16@z] 272
    """
    given = Options(
        memory_text(memory),
        vectors,
        outputs,
        pin=dict(pin or {}),
        rules=rule_files.read(rules),
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
    )
    ranks, options, compile_program = requested(model, mesh, plan, given)
    args, kwargs = positional(example_inputs), dict(example_kwargs or {})
    with original_class(model) if isinstance(model, ParallelModule) else contextlib.nullcontext():
        compiled = compile_program(model, args, kwargs, ranks, options)
        leaves, structure = flatten_inputs(args, kwargs)
        call = call_digest(model, leaves, structure.text)
        return Plan(type(model).__name__, options, compiled, _aliases(model), parameter_types(model), call)


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter by its other names: ``head.weight`` -> ``token_embedding.weight``."""
    first: dict[int, str] = {}
    names = [(name, first.setdefault(id(p), name)) for name, p in model.named_parameters(remove_duplicate=False)]
    return {name: known for name, known in names if name != known}


@dataclass(frozen=True, eq=False)
class Plan:
    """What a model becomes on a mesh. `print` it.

    Args:
        model: name of the model's class.
        options: what was asked for.
        compiled: the compiler's result.
        aliases: further names of tied parameters.
        parameters: dtype and shape of each parameter, ``f32[64, 16]``, by name.
        call: digest of all that the trace depended on.
    """

    model: str
    options: Options
    compiled: pipeline.Compiled
    aliases: Mapping[str, str]
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])
    call: str = ""

    @property
    def program(self) -> Program:
        """One rank's program."""
        return self.compiled.program

    @property
    def mesh(self) -> Mesh:
        """The ranks."""
        return self.program.mesh

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds of each pass, in the order in which they ran."""
        return self.compiled.timings

    @property
    def notes(self) -> tuple[str, ...]:
        """What the compiler did where sizes do not divide, and what it costs: pads, copies, work done more than once; what a budget of
        memory led to."""
        return self.compiled.notes + tuple(note for node in self.compiled.annotated.graph.nodes for note in node.meta.get("notes", ()))

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """A record for each collective that moves data, in the order in which they run."""
        return collectives_of(self.program)

    def bytes(self, stage: str | None = None, axis: str | None = None, op: str | None = None) -> int:
        """Return the bytes that one rank receives in one step, in all collectives that match.

        Raises:
            PartirError: no such stage, axis or op.
        """
        check_filter(stage, axis, op)
        wanted = [(name, value) for name, value in (("stage", stage), ("axis", axis), ("op", op)) if value is not None]
        return sum(c.bytes for c in self.collectives if all(getattr(c, name) == value for name, value in wanted))

    @cached_property
    def accumulation(self) -> AccumulationCost:
        """What one rank receives and holds in a block of `partir.accumulate`; `print` it.

        Raises:
            PartirError: nothing has a gradient.
        """
        return accumulation_cost(self.compiled, self.options)

    @cached_property
    def layouts(self) -> Layouts:
        """The layout at rest of each parameter, input and value, by name."""
        return layouts_by_name(self.compiled.annotated, self.program.inputs, self.aliases)

    def pinned(self, name: str) -> str | None:
        """Return the pattern of the pin that fixes the layout of ``name``, None where the compiler chose."""
        return next((pattern for pattern in reversed(list(self.options.pin)) if fnmatchcase(name, pattern)), None)

    def text(self, stage: str) -> str:
        """Return the graph after a stage as text, one line a node.

        Args:
            stage: "traced" (global, no layouts), "annotated" (layouts chosen), "lowered" (one rank's, with collectives), "forward",
                "backward" (derived).

        Raises:
            PartirError: another stage.
        """
        if stage not in STAGES:
            raise PartirError(f"plan.text({stage!r}): there is no such stage; choose from {', '.join(map(repr, STAGES))}.")
        return self.program.texts[stage] or f"# no {stage}: nothing has a gradient\n"

    def report(self, fold: bool = True) -> str:
        """Return every layout, collective and total as text; `print` shows what fits a screen.

        Args:
            fold: say "as blocks.0" of a repeated layer whose rows differ in nothing but numbers of names.
        """
        return report(self, fold)

    def time(self, hardware: str | Path | Hardware = "dgx-h100") -> StepTime:
        """Return the predicted seconds of one step; `print` shows forward, backward, compute and messages by axis.

        Args:
            hardware: name of a shipped profile, path of a TOML file (`partir calibrate` measures one), or a profile.

        Raises:
            HardwareError: there is no such profile, it is no profile, or it lacks a dtype of the model.
        """
        return step_seconds(self.program, hardware)

    def timeline(self, path: str | Path, hardware: str | Path | Hardware = "dgx-h100") -> None:
        """Write the predicted step of one rank as a trace that Perfetto (ui.perfetto.dev) opens.

        Args:
            path: where, by custom ``trace.json``.
            hardware: as for `time`.

        Raises:
            HardwareError: as for `time`.
            PartirError: the path cannot be written.
        """
        from partir.draw.timeline import timeline_events, timeline_of

        timeline_events(timeline_of(self, hardware), path, f"{self.model} on mesh {self.mesh}, one rank")

    def cost(self, symbols: Mapping[str, tuple[str, int]] | None = None) -> Cost:
        """Return what one rank receives, computes and holds in a step, as expressions in the sizes of axes, batch and sequence.

        Args:
            symbols: name -> (input, dim) whose size it stands for; by default `B` and `S` are the first two dims of the first input.

        Raises:
            PartirError: no such input or dim.
        """
        from partir.cost import cost_of

        return cost_of(self.compiled, self.collectives, symbols)

    def limit(self) -> Limit:
        """Return how far each matrix product, and all of them, are from the least that any algorithm must move; see `partir.limit`."""
        return limit_of(self.compiled, self.collectives)

    def dot(self, fold: bool = True) -> Digraph:
        """Return a drawing of what moves: `plan.dot().source` is graphviz text, `.save(path)` writes it.

        Args:
            fold: draw repeated layers once.
        """
        from partir.draw import draw

        return draw(self, fold)

    def draw(self, path: str | Path, fold: bool = True) -> None:
        """Write a drawing of what moves, by the suffix of its path.

        Args:
            path: .svg, .png and .pdf need the program `dot`; .dot and .gv (text) and .html (a page to explore) need none.
            fold: draw repeated layers once.

        Raises:
            PartirError: another suffix, a path that cannot be written, or no program `dot`.
        """
        from partir.draw import save

        save(self, path, fold)

    @cached_property
    def document(self) -> PlanDocument:
        """The plan as plain values, without graphs."""
        return document_of(self)

    def explain(self, name: str) -> str:
        """Return what happens to one tensor, and why: its blocks, its readers, what moves for it, its gradient.

        Args:
            name: of a parameter, input, value or output, or of a module with one value.

        Raises:
            UnknownNameError: nothing is called so.
        """
        return self.document.explain(name)

    def diff(self, other: Plan | PlanDocument | str | os.PathLike[str]) -> PlanDifference:
        """Return how another plan differs, a document or a file too: settings, layouts, bytes. `print` it; false if nothing does."""
        return self.document.diff(other)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, whole or not at all: the same plan gives the same bytes.

        Raises:
            PlanError: the path cannot be written.
        """
        self.document.save(path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> PlanDocument:
        """Read a saved plan, edited or not; `parallelize(model, plan=...)` follows it.

        Raises:
            PlanError: the file cannot be read, is no plan, or has a field that means nothing; names the line.
        """
        return PlanDocument.load(path)

    def __str__(self) -> str:
        return str(self.document)

    def __repr__(self) -> str:
        return f"<Plan of {self.model} on {self.mesh}: {len(self.collectives)} collectives, {self.bytes():,} bytes a rank>"
