"""The order of the passes: from a module and example inputs to a program.

    trace -> decompose_ops -> factorise_dims -> pad_dims -> annotate_layouts -> insert_collectives -> expand_recipes -> localize_shapes
    -> bucket_vectors -> name_values -> differentiate

Only this file knows the order; `run_passes` copies, verifies, times and prints.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.fx import GraphModule, Node

from partir import rules
from partir.cost.held import peak_bytes
from partir.errors import RuleError
from partir.garbage import paused_collector
from partir.graph import outputs_of
from partir.layout import Layout, dtype_name
from partir.mesh import Mesh
from partir.options import Options, budget_of
from partir.passes.annotate_layouts import annotate_layouts
from partir.passes.bucket_vectors import bucket_vectors
from partir.passes.choose_pads import choose_pads
from partir.passes.decompose_ops import decompose_ops
from partir.passes.differentiate import Differentiated, Joint, extract, join, made_again_in, parts_of
from partir.passes.expand_recipes import expand_recipes
from partir.passes.factorise_dims import bind, factorise_dims
from partir.passes.fit_memory import fit_memory, say
from partir.passes.given import given_layouts
from partir.passes.insert_collectives import insert_collectives
from partir.passes.leave_padded import leave_padded
from partir.passes.localize_shapes import localize_shapes
from partir.passes.match_pins import check_pins, match_pins
from partir.passes.name_values import name_values
from partir.passes.pad_dims import pad_dims
from partir.passes.partition import Partition
from partir.passes.run_passes import Run, copy_graph
from partir.passes.slots import input_slots, output_slots, outputs_reached, placeholders, with_tangent
from partir.passes.trace import InputSlot, Traced, trace
from partir.precision import without_autocast
from partir.printer import graph_text
from partir.program import Program, Slot
from partir.random_ops import DRAWN
from partir.rules.placement import placement


@dataclass(frozen=True, eq=False)
class Compiled:
    """A program with what was known on the way.

    Args:
        program: what every rank runs.
        traced: structure of inputs and outputs, slots, buffers that are written back.
        annotated: the graph with the chosen layouts, sizes global.
        lowered: one rank's forward graph before differentiation.
        timings: seconds of each pass.
        notes: on what is kept for the backward, where a budget of bytes was asked for.
    """

    program: Program
    traced: Traced
    annotated: GraphModule
    lowered: GraphModule
    timings: Mapping[str, float]
    notes: tuple[str, ...] = ()


def compile_program(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: Mesh,
    options: Options,
    parameter_layouts: Mapping[str, Layout] | None = None,
    input_layouts: Mapping[str, Layout] | None = None,
) -> Compiled:
    """Compile ``model(*args, **kwargs)`` for every rank of ``mesh``, in the present training and grad mode.

    Args:
        model: any module; its weights are not read.
        args, kwargs: example inputs; only shapes, dtypes and Python values matter.
        parameter_layouts: layouts at rest that an earlier compilation has fixed, by dotted name.
        input_layouts: layouts of inputs that arrive as blocks, by slot name.

    Raises:
        PartirError: the model cannot be traced, an op has no rule, or sizes do not divide.
    """
    start = time.perf_counter()
    traced = trace(model, args, kwargs, options.compute_dtype)
    timings = {"trace": time.perf_counter() - start}
    return compile_traced(traced, mesh, options, parameter_layouts, input_layouts, timings)


def compile_traced(
    traced: Traced,
    mesh: Mesh,
    options: Options,
    parameter_layouts: Mapping[str, Layout] | None = None,
    input_layouts: Mapping[str, Layout] | None = None,
    timings: Mapping[str, float] | None = None,
) -> Compiled:
    """Compile what `trace` has made; see `compile_program`. One trace serves any number of meshes and layouts."""
    with rules.using(options.rules), without_autocast(), paused_collector():
        return derive(lower(traced, mesh, options, parameter_layouts, input_layouts, timings), options.memory)


@dataclass(frozen=True, eq=False)
class Lowered:
    """One rank's forward graph, not yet differentiated.

    Args:
        mesh, traced: what it was made of.
        annotated: the graph with the chosen layouts, sizes global.
        collectives: that graph with collectives, sizes global.
        graph: one rank's, sizes local.
        inputs, outputs: the slots of a program.
        training: gradients are recorded.
        texts, timings: of the passes.
        reduce_dtype: of sums between ranks.
    """

    mesh: Mesh
    traced: Traced
    annotated: GraphModule
    collectives: GraphModule
    graph: GraphModule
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    training: bool
    texts: Mapping[str, str]
    timings: Mapping[str, float]
    reduce_dtype: torch.dtype | None = None


def lower(
    traced: Traced,
    mesh: Mesh,
    options: Options,
    parameter_layouts: Mapping[str, Layout] | None = None,
    input_layouts: Mapping[str, Layout] | None = None,
    timings: Mapping[str, float] | None = None,
    factorised: GraphModule | None = None,
) -> Lowered:
    """Run every pass but the last; see `compile_program`.

    Args:
        factorised: what `factorise` made of ``traced`` before. The graph is then to be costed, not run: it is neither checked nor printed.
    """
    run = Run(mesh, dict(timings or {}), check=factorised is None)
    training = torch.is_grad_enabled()
    annotated, slots = _annotated(run, traced, options, parameter_layouts or {}, input_layouts or {}, factorised)
    run.text("annotated", annotated, {name: slot.name for name, slot in slots.items()})
    sharded = _sharded_outputs(annotated, traced, options.outputs, training)
    shapes = [tuple(value.meta["val"].shape) for value in outputs_of(annotated)]
    annotated, collectives = _with_collectives(run, annotated, sharded)
    graph = run.pass_("expand_recipes", collectives, lambda g: expand_recipes(g, mesh), "lowered", kept=True)
    graph = run.pass_("localize_shapes", graph, lambda g: localize_shapes(g, mesh, options.rng), "lowered")
    graph = run.pass_("bucket_vectors", graph, lambda g: bucket_vectors(g, mesh), "lowered")
    lowered = run.pass_("name_values", graph, lambda g: name_values(g, annotated), "lowered")
    run.text("lowered", lowered, {name: slot.name for name, slot in slots.items()})
    inputs = input_slots(lowered, slots, outputs_reached(annotated) if training else {})
    outputs = output_slots(lowered, shapes, traced, training)
    return Lowered(mesh, traced, annotated, collectives, lowered, inputs, outputs, training, run.texts, run.timings, options.reduce_dtype)


def lay_out(traced: Traced, mesh: Mesh, options: Options, factorised: GraphModule) -> GraphModule:
    """Return the graph with the layouts and the collectives that `lower` gives it; ``factorised``: what `factorise` made of it."""
    run = Run(mesh, {}, check=False)
    annotated, _ = _annotated(run, traced, options, {}, {}, factorised)
    return _with_collectives(run, annotated, _sharded_outputs(annotated, traced, options.outputs, torch.is_grad_enabled()))[1]


def _with_collectives(run: Run, annotated: GraphModule, sharded: Sequence[bool]) -> tuple[GraphModule, GraphModule]:
    """Return the graph whose outputs keep pads, and that with collectives."""
    annotated = run.pass_("leave_padded", annotated, lambda g: leave_padded(g, run.mesh, sharded))
    return annotated, run.pass_("insert_collectives", annotated, lambda g: insert_collectives(g, run.mesh, sharded), "collectives")


def _annotated(
    run: Run,
    traced: Traced,
    options: Options,
    parameter_layouts: Mapping[str, Layout],
    input_layouts: Mapping[str, Layout],
    factorised: GraphModule | None,
) -> tuple[GraphModule, dict[str, InputSlot]]:
    """Return the graph with layouts, and the slot of each placeholder by its name."""
    mesh, training = run.mesh, torch.is_grad_enabled()
    run.text("traced", traced.graph_module)
    graph = copy_graph(factorised) if factorised is not None else _factorised(run, traced)
    law = placement(options.placement)
    padded = choose_pads(graph, mesh, law)
    graph = run.pass_("pad_dims", graph, lambda g: factorise_dims(pad_dims(g, padded)) if padded else g)
    _add_seed(graph)
    slots = {node.name: slot for node, slot in zip(placeholders(graph), traced.slots)}
    dtypes = {node.name: dtype_name(node.meta["val"].dtype) for node in placeholders(graph)}
    pinned = match_pins(options.pin, graph, {name: slot.name for name, slot in slots.items()}, mesh)
    given = given_layouts(slots, dtypes, training, pinned, parameter_layouts, input_layouts)
    annotated = run.pass_("annotate_layouts", graph, lambda g: annotate_layouts(g, mesh, law, given, options.vectors), "annotated")
    check_pins(annotated, given.layouts, mesh)
    return annotated, slots


def factorise(traced: Traced) -> GraphModule:
    """Return the traced graph, each op with a rule and each dim with named sub-dims; no mesh is needed."""
    return _factorised(Run(Mesh.parse((1, 1, 1)), {}), traced)


def _factorised(run: Run, traced: Traced) -> GraphModule:
    graph = run.pass_("decompose_ops", traced.graph_module, lambda g: decompose_ops(g, _has_rule), kept=True)
    return run.pass_("factorise_dims", graph, factorise_dims)


def derive(low: Lowered, memory: str) -> Compiled:
    """Differentiate a lowered graph; ``memory`` as for `parallelize`."""
    return derive_each(low, (memory,))[memory]


def derive_each(low: Lowered, memories: Sequence[str]) -> dict[str, Compiled]:
    """Differentiate a lowered graph once, and split it into forward and backward for each memory mode."""
    start = time.perf_counter()
    joint = join(low.graph, low.mesh, low.inputs, low.outputs, low.training, low.reduce_dtype)
    joined = time.perf_counter() - start
    return {memory: _split(low, joint, memory, joined) for memory in memories}


def _split(low: Lowered, joint: Joint, memory: str, joined: float) -> Compiled:
    run = Run(low.mesh, dict(low.timings))
    parts, notes = run.time("differentiate", lambda: _parts(low, joint, memory))
    program = run.time("extract", lambda: _program(low, extract(joint, parts), memory))
    run.timings["differentiate"] += joined + run.timings.pop("extract")
    texts = dict(low.texts)
    if texts:
        texts["forward"] = graph_text(program.forward)
        texts["backward"] = graph_text(program.backward) if program.backward is not None else ""
    return Compiled(program.with_texts(texts), low.traced, low.annotated, low.graph, run.timings, notes)


def _parts(low: Lowered, joint: Joint, memory: str) -> tuple[Partition, tuple[str, ...]]:
    """Return which nodes run where, and notes on what was chosen to fit a budget."""
    budget = budget_of(memory)
    if budget is None:
        return parts_of(joint, made_again_in(joint, memory)), ()
    peaks: dict[frozenset[Node], int] = {}

    def peak_of(again: frozenset[Node]) -> int:
        if again not in peaks:
            peaks[again] = peak_bytes(_program(low, extract(joint, parts_of(joint, again)), memory))
        return peaks[again]

    again = fit_memory(joint, budget, peak_of)
    parts = parts_of(joint, again)
    return parts, say(parts, budget, peak_of(again))


def _program(low: Lowered, derived: Differentiated, memory: str) -> Program:
    outputs = tuple(with_tangent(slot, takes) for slot, takes in zip(low.outputs, derived.differentiable))
    return Program(low.mesh, memory, low.inputs, outputs, derived.forward, derived.backward, derived.num_outputs)


def _has_rule(node: Node) -> bool:
    """Attention with dropout has a rule, but its random numbers are hidden inside: it is decomposed."""
    if rules.find(node.target) is None:
        return False
    try:
        return node.target in DRAWN or not bind(node).random
    except RuleError:  # no form of the rule fits: a decomposition may
        return False


def _add_seed(graph_module: GraphModule) -> bool:
    """Give a graph that draws random numbers an int64 [2] input on the CPU: the seed and the number of the call."""
    calls = [node for node in graph_module.graph.nodes if "binding" in node.meta]
    if not any(node.meta["binding"].random for node in calls):
        return False
    last = placeholders(graph_module)[-1]
    with graph_module.graph.inserting_after(last):
        seed = graph_module.graph.placeholder("seed")
    seed.meta = {"val": last.meta["val"].new_empty((2,), dtype=torch.int64, device="cpu"), "subdims": (((),),)}
    return True


def _sharded_outputs(annotated: GraphModule, traced: Traced, outputs: str, training: bool) -> list[bool]:
    """0-d tensors and buffers leave whole; the others as the user says, or as blocks where a loss is what matters."""
    values = [cast(Node, value) for value in outputs_of(annotated)]
    shapes = [tuple(value.meta["val"].shape) for value in values]
    has_loss = training and any(shape == () and value.meta["grad"] for shape, value in zip(shapes, values))
    blocks = outputs == "sharded" or (outputs == "auto" and has_loss)
    return [blocks and shape != () and index < traced.num_outputs for index, shape in enumerate(shapes)]
