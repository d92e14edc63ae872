"""Trace a module: run it on fake tensors and return one flat functional graph of ATen ops, with global shapes.

    Before: model(ids, labels=ids)
    After:  %p_wte_weight, %ids, %labels -> %embedding = aten.embedding(%p_wte_weight, %ids) ... -> (%loss, %logits)

Requires: nothing; weights are not read, the module may be on the meta device.
Ensures: the graph is functional (no in-place op), flat, without dead code; each tensor of the module is one
placeholder, tied parameters too; outputs are one flat tuple of tensors. The module is unchanged, also after a failure.
``meta["site"]`` numbers the calls that draw random numbers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from partir.errors import TraceError, source_line
from partir.passes.capture import Capture, capture
from partir.passes.flatten_regions import Flattener, clean_meta, detach_no_grad, reachable
from partir.passes.functionalize import functionalize
from partir.passes.structure import Structure, flatten, leaf_paths, refuse_sparse
from partir.passes.user_lines import DATA_DEPENDENT
from partir.passes.write_casts import write_casts
from partir.precision import without_autocast
from partir.random_ops import draws

_WRAPPER = "model"
_IDENTITIES = (torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


@dataclass(frozen=True)
class InputSlot:
    """What one placeholder of a traced graph stands for.

    Attributes:
        name: unique text: the dotted name of a parameter or buffer, or the input as the user would write it.
        kind: "parameter", "buffer", "constant" or "input".
        target: dotted name in the module; for an input the same as `name`.
        value: the tensor of a constant, else None.
        requires_grad: a gradient may be asked for.
    """

    name: str
    kind: str
    target: str
    value: torch.Tensor | None
    requires_grad: bool


@dataclass(frozen=True, eq=False)
class Traced:
    """A module as a graph.

    Attributes:
        graph_module: flat functional graph, global shapes; ``meta`` of nodes holds val, stack_trace, nn_module_stack.
        slots: one for each placeholder, in order.
        inputs: structure of ``(args, kwargs)``, Python numbers included: equal structures may share a compiled program.
        outputs: structure of what forward returned; ``outputs.rebuild(tensors)`` makes it again.
        mutated_buffers: (output index, buffer name): new values to be written back after the call.
    """

    graph_module: fx.GraphModule
    slots: tuple[InputSlot, ...]
    inputs: Structure
    outputs: Structure
    mutated_buffers: tuple[tuple[int, str], ...]

    @property
    def num_outputs(self) -> int:
        """Number of graph outputs that belong to the user; the new values of buffers follow them."""
        return self.outputs.num_tensors


def flatten_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], Structure]:
    """Return the tensors of a call and the hashable structure of the rest, Python numbers included.

    A tensor that is given twice (``labels=input_ids``) is two leaves.
    """
    return flatten((tuple(args), dict(kwargs)))


def trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, compute_dtype: torch.dtype | None = None
) -> Traced:
    """Trace ``model(*args, **kwargs)`` in its present training mode and under the present grad mode.

    Args:
        model: any module; an `fx.GraphModule` too. Real, DTensor and meta parameters are equally good.
        args: example inputs; only shapes, dtypes and Python values matter.
        kwargs: example keyword inputs.
        compute_dtype: cast floating parameters and inputs to it first. An autocast that is on is traced as well.

    Raises:
        TraceError: no graph can hold what forward does; the message names the user's line.

    >>> traced = trace(nn.Linear(3, 2), (torch.ones(4, 3),))
    >>> [slot.name for slot in traced.slots]
    ['weight', 'bias', 'input']
    """
    leaves, structure = flatten_inputs(args, kwargs or {})
    names = input_names(model, structure)
    refuse_sparse(dict(zip(names, leaves, strict=True)))
    captured = capture(model, leaves, structure, names, compute_dtype)
    graph, slots = _flat_graph(model, captured, names)
    with without_autocast():
        return _traced(graph, slots, captured, structure)


def _traced(graph: fx.Graph, slots: list[InputSlot], captured: Capture, structure: Structure) -> Traced:
    write_casts(graph)
    _refuse_data_dependence(graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    assigned = [(captured.outputs.num_tensors + index, name) for index, name in enumerate(captured.assigned)]
    differentiable = {node for node, slot in zip(placeholders, slots, strict=True) if slot.requires_grad}
    written = functionalize(graph, differentiable)
    mutated = _add_outputs(graph, assigned, _written_buffers(dict(zip(placeholders, slots, strict=True)), written))
    _number_draws(graph)
    detach_no_grad(graph, differentiable)
    _erase_noise(graph, differentiable)
    slots = _drop_unused(graph, slots)
    graph.lint()
    module = fx.GraphModule({}, graph)
    return Traced(module, tuple(slots), structure, captured.outputs, tuple(mutated))


def input_names(model: nn.Module, structure: Structure) -> list[str]:
    """Return a name for every input tensor: the parameter of forward that takes it, and the path inside it.

    >>> _, structure = flatten_inputs(((torch.ones(1), torch.ones(1)),), {"mask": torch.ones(1)})
    >>> input_names(nn.LSTM(1, 1), structure)
    ['input[0]', 'input[1]', 'mask']
    """
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for path in leaf_paths(structure):
        argument, rest = cast("re.Match[str]", re.match(r"\[[01]\]\[(.*?)\](.*)$", path)).groups()
        names.append(_argument_name(argument, parameters) + rest)
    return names


def _argument_name(argument: str, parameters: list[inspect.Parameter]) -> str:
    if not argument.isdigit():
        return argument.strip("'")
    index = int(argument)
    if index < len(parameters) and parameters[index].kind is not inspect.Parameter.VAR_POSITIONAL:
        return parameters[index].name
    starred = [p for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
    if not starred:
        return f"args[{index}]"
    return f"{starred[0].name}[{index - parameters.index(starred[0])}]"


def _flat_graph(model: nn.Module, captured: Capture, names: list[str]) -> tuple[fx.Graph, list[InputSlot]]:
    """Copy the exported graph with one placeholder for each tensor; the first name of a tied parameter stays."""
    program = captured.program
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    slots: dict[fx.Node, InputSlot] = {}
    first: dict[str, fx.Node] = {}
    owners = _owners(model)
    inputs = iter(names)
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        slot = _slot(program, node, spec, inputs, owners)
        if slot.name not in first:
            first[slot.name] = graph.placeholder(re.sub(r"\W+", "_", _PREFIXES[slot.kind] + slot.name).strip("_"))
            first[slot.name].meta = clean_meta(node.meta, _WRAPPER)
            slots[first[slot.name]] = slot
        env[node] = first[slot.name]
    outputs = Flattener(graph, _WRAPPER).copy(program.graph_module, env, grad=True)
    graph.output(tuple(outputs))
    return graph, list(slots.values())


_PREFIXES = {"parameter": "p_", "buffer": "b_", "constant": "c_", "input": ""}


def _slot(program: ExportedProgram, node: fx.Node, spec: InputSpec, inputs: Iterator[str], owners: dict[str, tuple[str, str]]) -> InputSlot:
    if spec.kind is InputKind.USER_INPUT:
        name = next(inputs)
        return InputSlot(name, "input", name, None, bool(node.meta["val"].requires_grad))
    name = str(spec.target).removeprefix(_WRAPPER + ".")
    if spec.kind is InputKind.CONSTANT_TENSOR and name not in owners:
        return _constant(name, program.constants[str(spec.target)])
    if name not in owners:
        raise TraceError(f"`{name}`: an input of kind {spec.kind.name} cannot be captured; only tensors can.")
    kind, first = owners[name]
    return InputSlot(first, kind, first, None, bool(node.meta["val"].requires_grad))


def _constant(name: str, value: Any) -> InputSlot:
    if not isinstance(value, torch.Tensor):
        raise TraceError(f"`{name}`: a {type(value).__name__} cannot be captured; only tensors can.")
    if value.requires_grad:
        raise TraceError(
            f"`{name}`: a tensor that requires grad is used by forward but is not a parameter of the module, "
            "its gradient would be lost. Register it: self.name = nn.Parameter(...), nn.ParameterList or nn.ModuleList."
        )
    return InputSlot(name, "constant", name, value, False)


def _owners(model: nn.Module) -> dict[str, tuple[str, str]]:
    """Return for each name of a tensor its kind and the first name of the same tensor."""
    first: dict[int, tuple[str, str]] = {}
    owners: dict[str, tuple[str, str]] = {}
    for kind, named in (("parameter", model.named_parameters), ("buffer", model.named_buffers)):
        for name, tensor in named(remove_duplicate=False):
            owners[name] = first.setdefault(id(tensor), (kind, name))
    modules: dict[str, nn.Module] = dict(cast("Any", model).named_modules(remove_duplicate=False))
    for prefix, module in modules.items():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and id(value) in first:
                owners[f"{prefix}.{attribute}".lstrip(".")] = first[id(value)]
    return owners


def _refuse_data_dependence(graph: fx.Graph) -> None:
    """Refuse numbers and shapes that were read from tensors, which tracing leaves as symbols."""
    for node in graph.nodes:
        for value in node.meta["val"] if isinstance(node.meta.get("val"), (tuple, list)) else (node.meta.get("val"),):
            if isinstance(value, (list, tuple)):
                raise TraceError(f"{source_line(node.meta)}: `{node.target}` returns a list among its results, which a graph cannot hold.")
            symbolic = isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)
            if symbolic or isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise TraceError(f"{source_line(node.meta)}: " + DATA_DEPENDENT.format(what=f"`{node.target}` depends on data"))


def _written_buffers(slots: dict[fx.Node, InputSlot], written: dict[fx.Node, fx.Node]) -> dict[str, fx.Node]:
    """Return the new value of each buffer that forward writes; refuse writes into anything else."""
    for node in written:
        slot = slots[node]
        if slot.kind != "buffer":
            raise TraceError(
                f"forward writes into the {slot.kind} `{slot.name}` in place: only buffers may be written. "
                "Write into a copy: x = x.clone()."
            )
    return {slots[node].name: value for node, value in written.items()}


def _add_outputs(graph: fx.Graph, assigned: list[tuple[int, str]], written: dict[str, fx.Node]) -> list[tuple[int, str]]:
    """Append the new values of written buffers to the outputs; what was assigned is there already."""
    output = next(node for node in graph.nodes if node.op == "output")
    values = list(cast("tuple[fx.Node, ...]", output.args[0]))
    names = list(assigned)
    for name, value in written.items():
        if name not in {known for _, known in assigned}:
            names.append((len(values), name))
            values.append(value)
    output.args = (tuple(values),)
    return names


def _number_draws(graph: fx.Graph) -> None:
    """Number the calls that draw random numbers, in the order of eager calls, also those whose result nobody reads."""
    drawing = [node for node in graph.nodes if node.op == "call_function" and draws(node.target, node.args, node.kwargs)]
    for site, node in enumerate(drawing):
        node.meta["site"] = site


def _erase_noise(graph: fx.Graph, differentiable: set[fx.Node]) -> None:
    """Erase identities that tracing leaves, a detach of what has no gradient, and dead code, random ops included."""
    reached = reachable(differentiable)
    for node in list(graph.nodes):
        useless_detach = node.target is torch.ops.aten.detach.default and node not in reached
        if node.target in _IDENTITIES or useless_detach:
            node.replace_all_uses_with(cast("fx.Node", node.args[0]))
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def _drop_unused(graph: fx.Graph, slots: list[InputSlot]) -> list[InputSlot]:
    """Drop placeholders of buffers and constants that nothing reads; parameters and inputs stay."""
    kept: list[InputSlot] = []
    for node, slot in zip([node for node in graph.nodes if node.op == "placeholder"], slots, strict=True):
        if slot.kind in ("buffer", "constant") and not node.users:
            graph.erase_node(node)
        else:
            kept.append(slot)
    return kept
