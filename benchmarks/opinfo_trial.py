"""Run one call of an op as partir splits it, on simulated ranks, and compare results and gradients with the op itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.opinfo import Sample, Split
from partir.dims import Dim, Part
from partir.errors import LayoutError, PartirError
from partir.graph import is_call
from partir.layout import Layout
from partir.mesh import Mesh
from partir.options import Options
from partir.passes.node_facts import is_view
from partir.passes.pipeline import Compiled, compile_traced
from partir.passes.structure import flatten
from partir.passes.trace import Traced, trace
from partir.runtime.simulated import SimulatedProgram

AXIS = "x"
TOLERANCES = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-5, torch.complex64: 1e-5}


@dataclass(frozen=True)
class Outcome:
    """What one split of one call showed.

    verdict: "right", "wrong", "refused" (a PartirError), "crashed" (any other error), "drawn" (random: shapes agree).
    share: of the elements that the op's computations read and write, the part that one rank holds; 1.0 where all are whole.
    """

    verdict: str
    detail: str = ""
    share: float = 1.0


@dataclass(frozen=True)
class Expected:
    """What the op itself gives: results, a gradient to give to each, the gradients of the tensors (None: it has none)."""

    results: tuple[Tensor, ...]
    cotangents: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]
    drawn: bool


class CallModule(nn.Module):
    """A function of tensors as a module without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        """Call the function."""
        return self.function(*tensors)


class _Draws(TorchDispatchMode):
    """Notes whether an op moves the random number generator; some samples set its seed themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        self.seen |= not torch.equal(before, torch.get_rng_state())
        return result


def expect(sample: Sample, seed: int = 0) -> Expected | None:
    """Run the op itself, twice to see whether it draws; None where it does not run or has no tensor result."""
    try:
        runs: list[tuple[Tensor, ...]] = []
        leaves, seen = tuple[Tensor, ...](), False
        for number in (1, 0):
            torch.manual_seed(seed + number)
            leaves = sample.leaves()
            with _Draws() as draws:
                runs.append(tuple(flatten(sample.call(*leaves), merge=True)[0]))
            seen |= draws.seen
        results = runs[1]
        if not results:
            return None
        drawn = seen or difference(runs[0], results, "result") is not None
        cotangents = tuple(torch.randn_like(result) if result.requires_grad else result for result in results)
        return Expected(results, cotangents, gradients_of(results, leaves, cotangents), drawn)
    except Exception:  # what the op itself refuses is no trial
        return None


def gradients_of(results: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradient of each leaf, None where it has none."""
    pairs = [(result, cotangent) for result, cotangent in zip(results, cotangents, strict=True) if result.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not wanted:
        return tuple(None for _ in leaves)
    outputs, given = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, given, allow_unused=True))
    return tuple(next(found) if leaf.requires_grad else None for leaf in leaves)


def try_sample(sample: Sample, expected: Expected, splits: Iterable[Split]) -> list[Outcome]:
    """Return the outcome of each split; one trace serves all of them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = trace(CallModule(sample.call), sample.leaves())
    except PartirError as error:
        return [Outcome("refused", str(error))]
    except Exception as error:
        return [Outcome("crashed", f"trace: {type(error).__name__}: {error}")]
    return [_try_split(traced, sample, expected, split) for split in splits]


def _try_split(traced: Traced, sample: Sample, expected: Expected, split: Split) -> Outcome:
    mesh = Mesh.parse({AXIS: split.count, "y": 1, "z": 1})
    try:
        compiled = _compile(traced, sample, split, mesh)
        problem = _run(compiled, sample, expected)
    except PartirError as error:
        return Outcome("refused", f"{split}: {error}")
    except Exception as error:
        return Outcome("crashed", f"{split}: {type(error).__name__}: {error}")
    if problem is not None:
        return Outcome("wrong", f"{split}: {problem}")
    drawn = expected.drawn or _draws(compiled)
    return Outcome("drawn" if drawn else "right", "", share_of(compiled.annotated, mesh))


def _draws(compiled: Compiled) -> bool:
    return any(slot.kind == "seed" for slot in compiled.program.inputs)


def _compile(traced: Traced, sample: Sample, split: Split, mesh: Mesh) -> Compiled:
    """Compile with one tensor split; the others are laid as the op wants them, or whole where a weight could not lie so."""
    place = [index for index, slot in enumerate(traced.slots) if slot.kind == "input"][split.tensor]
    layouts = {traced.slots[place].name: split_layout(sample.tensors[split.tensor], split)}
    options = Options(outputs="whole")
    try:
        return compile_traced(_let_others_follow(traced, place), mesh, options, None, layouts)
    except LayoutError:
        return compile_traced(traced, mesh, options, None, layouts)


def split_layout(tensor: Tensor, split: Split) -> Layout:
    """Return the layout of the split tensor: `f64[4@x, 6]`."""
    layout = Layout.whole(tensor, tensor.requires_grad)
    dims = [Dim((Part(int(size), (AXIS,) if dim == split.dim else ()),)) for dim, size in enumerate(tensor.shape)]
    return Layout(layout.dtype, tuple(dims), grad=layout.grad)


def _let_others_follow(traced: Traced, place: int) -> Traced:
    """Return the trace with all inputs but one as parameters, whose layouts are free: the op's."""
    others = [index != place and slot.kind == "input" for index, slot in enumerate(traced.slots)]
    slots = tuple(replace(slot, kind="parameter") if other else slot for slot, other in zip(traced.slots, others))
    return replace(traced, slots=slots)


def _run(compiled: Compiled, sample: Sample, expected: Expected) -> str | None:
    """Run on all ranks; return how results or gradients differ, None where they do not."""
    leaves = sample.leaves()
    given = iter(leaves)
    values = [cast(Tensor, slot.value) if slot.kind == "constant" else next(given) for slot in compiled.traced.slots]
    seeds = [torch.tensor([1, 0])] * (len(compiled.program.inputs) - len(values))
    results = SimulatedProgram(compiled.program, check_ranks=True)(*values, *seeds)[: compiled.traced.num_outputs]
    if expected.drawn or _draws(compiled):
        return shape_difference(expected.results, results, "result")
    problem = difference(expected.results, results, "result")
    if problem is not None:
        return problem
    needed = [result for result, whole in zip(results, expected.results, strict=True) if whole.requires_grad]
    cotangents = [given for given, whole in zip(expected.cotangents, expected.results, strict=True) if whole.requires_grad]
    gradients = gradients_of(needed, leaves, cotangents)
    return difference(*known_gradients(expected.gradients, gradients, leaves), "gradient")


def known_gradients(
    one: Sequence[Tensor | None], other: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return both lists of gradients, zeros for those that only one side has: no gradient and a gradient of zero are the same."""
    known = [place for place, pair in enumerate(zip(one, other, strict=True)) if any(gradient is not None for gradient in pair)]
    filled = [[side[place] for place in known] for side in (one, other)]
    zeros = [torch.zeros_like(leaves[place]) for place in known]
    first, second = ([zero if value is None else value for value, zero in zip(side, zeros, strict=True)] for side in filled)
    return first, second


def difference(expected: Sequence[Tensor], actual: Sequence[Tensor], what: str) -> str | None:
    """Say how two lists of tensors differ, None where they agree to the tolerance of their dtype, relative to the largest."""
    problem = shape_difference(expected, actual, what)
    if problem is not None:
        return problem
    for number, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if not is_close(one.detach(), other.detach()):
            return f"{what} {number} differs"
    return None


def is_close(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors agree; integers exactly, NaN and infinities in the same places."""
    tolerance = TOLERANCES.get(one.dtype)
    if tolerance is None:
        return torch.equal(one, other)
    finite = one[one.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def shape_difference(expected: Sequence[Tensor], actual: Sequence[Tensor], what: str) -> str | None:
    """Say how two lists of tensors differ in number, shape or dtype."""
    if len(expected) != len(actual):
        return f"{len(actual)} {what}s, not {len(expected)}"
    for number, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{what} {number} is {other.dtype}{list(other.shape)}, not {one.dtype}{list(one.shape)}"
    return None


def share_of(annotated: GraphModule, mesh: Mesh) -> float:
    """Return the part of all elements read and written that one rank holds; views count where there is nothing else."""
    calls = [node for node in annotated.graph.nodes if is_call(node) and node.meta.get("factors") is not None]
    computing = [node for node in calls if not is_view(node)] or calls
    layouts = [layout for node in computing for layout in _layouts(node)]
    if not layouts:
        layouts = [node.meta["layout"] for node in annotated.graph.nodes if node.op == "placeholder"]
    whole = sum(_numel(layout.shape) for layout in layouts)
    held = sum(_numel(layout.local_shape(mesh)) for layout in layouts)
    return held / whole if whole else 1.0


def _layouts(node: Node) -> list[Layout]:
    computed = node.meta["computed"]
    return [*node.meta["operands"], *((computed,) if isinstance(computed, Layout) else computed)]


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())
