"""Compare a module on one device with the same module on a simulated mesh, in float64: loss, outputs, every gradient."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partir.api import parallelize
from partir.eager_randomness import same_randomness
from partir.errors import PartirError, VerifyError, source_line
from partir.mesh import Mesh
from partir.module import parallelized
from partir.passes.structure import refuse_sparse
from partir.passes.trace import flatten_inputs, input_names
from partir.printer import op_text


@dataclass(frozen=True)
class Report:
    """How far a mesh is from one device: the largest relative difference of each tensor.

    The relative difference of a tensor is ``max|a - b| / max(max|b|, 1e-6 * the largest |b| of all its kind)``: a key bias
    has a gradient that is zero but for rounding, the batches of a normalised value a mean.

    Args:
        mesh: the simulated mesh.
        loss: relative difference of the loss.
        outputs: of each output.
        gradients: of each parameter's gradient, by name, and of each input's that requires one.
        buffers: of each buffer after the call, by name.
        tolerance: the largest difference allowed.
    """

    mesh: Mesh
    loss: float
    outputs: tuple[float, ...]
    gradients: Mapping[str, float]
    buffers: Mapping[str, float]
    tolerance: float

    @property
    def worst(self) -> float:
        """The largest difference of all."""
        return max([self.loss, *self.outputs, *self.gradients.values(), *self.buffers.values()])

    def __str__(self) -> str:
        rows = [("loss", self.loss), *((f"output {i}", d) for i, d in enumerate(self.outputs)), *self.gradients.items()]
        rows += self.buffers.items()
        width = max(len(name) for name, _ in rows)
        head = f"mesh {self.mesh} against one device, float64, largest relative differences"
        return "\n".join([head, *(f"  {name:<{width}}  {value:.2e}" for name, value in rows)])


def verify(
    model: nn.Module,
    mesh: Any,
    example_inputs: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    tolerance: float = 1e-10,
    memory: str = "low",
    vectors: str = "balanced",
    pin: Mapping[str, str] | None = None,
    rules: str | Path | Iterable[str | Path] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Report:
    """Run a copy of a module on one device and on a simulated mesh, in float64, and compare them.

    The loss is the first 0-d output that has a gradient, else a weighted sum of all outputs. Where the model draws random
    numbers, one device draws them under `partir.same_randomness`.

    Args:
        model: a module with weights; it is left as it is.
        mesh: as ``partir.parallelize`` takes it.
        example_inputs: a tensor or a tuple of arguments.
        example_kwargs: keyword arguments.
        memory, vectors, pin, rules: as for `partir.parallelize`.
        tolerance: largest relative difference allowed; 1e-5 where the model itself computes in float32.
        dtype: of the copies, for a model with an op that has no float64.

    Raises:
        VerifyError: names the first output or parameter that differs, and by how much.
    """
    Mesh.parse(mesh)
    _refuse_meta(model)
    given = tuple(cast("list[Any]", example_inputs)) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    call = (given, dict(example_kwargs or {}))
    leaves, structure = flatten_inputs(*call)
    refuse_sparse(dict(zip(input_names(model, structure), leaves, strict=True)))
    options = {"memory": memory, "vectors": vectors, "pin": pin, "rules": rules, "outputs": "whole"}
    parallel = parallelize(_copy(model, dtype), mesh, **cast(Any, options))
    ours = _run(parallel, call, dtype)
    random = any(slot.kind == "seed" for program in parallelized(parallel).programs() for slot in program.inputs)
    with same_randomness(torch.initial_seed()) if random else nullcontext():
        theirs = _run(_copy(model, dtype), call, dtype)
    report = _compare(Mesh.parse(mesh), ours, theirs, tolerance, _negligible(dtype, tolerance))
    _raise_on_difference(report, _narrow_calls(parallelized(parallel).compiled(), dtype))
    return report


@dataclass(frozen=True)
class _Result:
    loss: Tensor
    outputs: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


def _refuse_meta(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise PartirError(f"{name} is on the meta device: verify needs weights. Use model.to_empty(device='cpu') and initialise it.")


def _copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(model).to(dtype)


def _negligible(dtype: torch.dtype, tolerance: float) -> float:
    """Return the part of the largest number that may be zero but for rounding."""
    return 1e-6 if dtype is torch.float64 else torch.finfo(dtype).eps / tolerance


def _converted(value: Any, dtype: torch.dtype) -> Any:
    def convert(item: Any) -> Any:
        if isinstance(item, Tensor) and item.is_floating_point():
            return item.detach().to(dtype).requires_grad_(item.requires_grad)
        return item

    return tree_map(convert, value)


def _run(model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], dtype: torch.dtype) -> _Result:
    args, kwargs = cast("tuple[tuple[Any, ...], dict[str, Any]]", _converted(call, dtype))
    inputs, _ = flatten_inputs(args, kwargs)
    model.zero_grad()
    tensors, _ = flatten_inputs((model(*args, **kwargs),), {})
    outputs = tuple(tensor for tensor in tensors)
    loss = _loss(outputs)
    if loss.requires_grad:
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients |= {f"input {number}": given.grad for number, given in enumerate(inputs) if given.requires_grad}
    return _Result(loss.detach(), tuple(output.detach() for output in outputs), gradients, dict(model.named_buffers()))


def _loss(outputs: tuple[Tensor, ...]) -> Tensor:
    for output in outputs:
        if output.dim() == 0 and output.requires_grad:
            return output
    total = torch.zeros((), dtype=torch.float64)
    for number, output in enumerate(output for output in outputs if output.is_floating_point()):
        weights = torch.arange(1, output.numel() + 1, dtype=torch.float64).mul(0.7 + number).sin().view(output.shape)
        total = total + (output.double().cpu() * weights).sum()
    return total


def relative_difference(a: Tensor, b: Tensor, scale: float = 0.0) -> float:
    """Return ``max|a - b| / max(max|b|, scale)`` over the finite b; 0 for two zero or empty tensors."""
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = float(torch.where(same, 0.0, (a - b).abs()).max())
    if difference != difference:
        return float("inf")
    return difference / max(float(b.nan_to_num(0.0, 0.0, 0.0).abs().max()), scale) if difference else 0.0


def _compare(mesh: Mesh, ours: _Result, theirs: _Result, tolerance: float, negligible: float) -> Report:
    scale = negligible * _largest(theirs.gradients.values())
    gradients: dict[str, float] = {}
    for name, expected in theirs.gradients.items():
        found = ours.gradients[name]
        if expected is None or found is None:
            present = found if expected is None else expected
            gradients[name] = 0.0 if present is None or not bool(present.any()) else float("inf")
            continue
        gradients[name] = relative_difference(found, expected, scale)
    outputs = tuple(relative_difference(a, b) for a, b in zip(ours.outputs, theirs.outputs, strict=True))
    least = negligible * _largest(theirs.buffers.values())
    buffers = {name: relative_difference(ours.buffers[name], expected, least) for name, expected in theirs.buffers.items()}
    return Report(mesh, relative_difference(ours.loss, theirs.loss), outputs, gradients, buffers, tolerance)


def _largest(tensors: Iterable[Tensor | None]) -> float:
    return max([float(t.abs().max()) for t in tensors if t is not None and t.is_floating_point() and t.numel()], default=0.0)


ROUNDINGS = 64  # differences of this many machine epsilons are what a narrow dtype may round


@dataclass(frozen=True)
class _Narrow:
    """The calls that compute in a narrower dtype than verify converts a model to: the model casts inside.

    Args:
        dtype: the narrowest.
        calls: how many there are, of all.
        first: the line and op of the first.
    """

    dtype: torch.dtype
    calls: tuple[int, int]
    first: str

    @property
    def rounding(self) -> float:
        """The largest relative difference that rounding may make."""
        return ROUNDINGS * torch.finfo(self.dtype).eps

    def __str__(self) -> str:
        name, eps = str(self.dtype).removeprefix("torch."), torch.finfo(self.dtype).eps
        where = f"{self.calls[0]} of the {self.calls[1]} calls of the model, first {self.first}, compute in {name}"
        rounds = f"such a difference is what {name} rounds (its epsilon is {eps:.1e}), in another order on a mesh"
        allow = f"Allow for that with a tolerance of {self.rounding:.0e}; what is above it would be a bug."
        return f"{where} though verify converts it: {rounds}. {allow}"


def _narrow_calls(compiled: Iterable[Any], dtype: torch.dtype) -> _Narrow | None:
    """Return the calls of the traced graphs that stay narrower than ``dtype``, None where none does."""
    eps = torch.finfo(dtype).eps
    calls = [node for each in compiled for node in each.traced.graph_module.graph.nodes if node.op == "call_function"]
    values = [(node, value.dtype) for node in calls if isinstance(value := node.meta.get("val"), Tensor) and value.is_floating_point()]
    narrow = [(node, kind) for node, kind in values if torch.finfo(kind).eps > eps]
    if not narrow:
        return None
    first = narrow[0][0]
    worst = max((kind for _, kind in narrow), key=lambda kind: torch.finfo(kind).eps)
    return _Narrow(worst, (len(narrow), len(calls)), f"{op_text(first)} at {source_line(first.meta)}")


def _raise_on_difference(report: Report, narrow: _Narrow | None) -> None:
    """Raise for the first difference that no rounding explains, else for the first above the tolerance."""
    rows = [("the loss", report.loss), *((f"output {i}", d) for i, d in enumerate(report.outputs))]
    rows += [(f"the gradient of {name}", d) for name, d in report.gradients.items()]
    rows += [(f"the buffer {name}", d) for name, d in report.buffers.items()]
    bug = "This is a bug in partir or in a rule; partir.check_rules() finds wrong rules."
    steps = [(max(narrow.rounding, report.tolerance), bug), (report.tolerance, str(narrow))] if narrow else [(report.tolerance, bug)]
    for limit, why in steps:
        for what, difference in rows:
            if not difference <= limit:
                differs = f"on mesh {report.mesh} {what} differs from one device's by {difference:.2e} (relative), more than"
                raise VerifyError(f"{differs} {report.tolerance:.0e}. {why}")
