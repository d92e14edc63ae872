"""Small random programs: ops drawn one after the other on what was computed before, with random sizes, meshes and pins.

Elementwise ops come from the rule table itself (every op with torch's pointwise tag that takes one or two tensors); ops with
attributes are listed here with how to draw them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from partir import rules

Draw = Callable[[Any], Any]
Build = Callable[[Draw, Sequence[Tensor]], "Step | None"]
LARGEST = 4000


@dataclass(frozen=True)
class Step:
    """One call: `text` says it, `weights` are the shapes of the parameters that it gets besides the values it reads."""

    text: str
    function: Callable[..., Any]
    reads: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...] = ()


class Program(nn.Module):
    """Steps on one input; every value that nothing reads is a result, and their sum is the loss."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.steps = list(steps)
        self.weights = nn.ParameterList()
        generator = torch.Generator().manual_seed(0)
        for step in steps:
            for shape in step.weights:
                self.weights.append(nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5))

    def forward(self, x: Tensor) -> Any:
        values, weights = [x], iter(self.weights)
        for step in self.steps:
            values.append(step.function(*(values[place] for place in step.reads), *(next(weights) for _ in step.weights)))
        read = {place for step in self.steps for place in step.reads}
        results = [value for place, value in enumerate(values) if place not in read]
        return sum((value.double() * value).mean() for value in results), *results

    def __repr__(self) -> str:
        read = [", ".join(f"v{place}" for place in step.reads) for step in self.steps]
        return "; ".join(f"v{number} = {step.text} of {names}" for number, (step, names) in enumerate(zip(self.steps, read), 1))


def elementwise_ops() -> list[Any]:
    """Return the differentiable pointwise ops that take only tensors, one or two, and make one."""
    names = [
        "sin", "cos", "tanh", "sigmoid", "relu", "gelu", "silu", "softplus", "atan", "erf", "exp2", "neg", "abs", "sinh", "square",
        "mish", "log1p", "add.Tensor", "sub.Tensor", "mul.Tensor", "maximum", "minimum", "atan2", "hypot", "logaddexp",
    ]  # fmt: skip
    found: list[Any] = []
    for name in names:
        op, _, overload = name.partition(".")
        target = getattr(getattr(torch.ops.aten, op), overload or "default")
        assert rules.find(target) is not None, name
        found.append(target)
    return found


ELEMENTWISE = elementwise_ops()


def elementwise(draw: Draw, values: Sequence[Tensor]) -> Step | None:
    op = draw(st.sampled_from(ELEMENTWISE))
    count = sum("Tensor" in str(argument.type) for argument in op._schema.arguments)
    first = draw(st.integers(0, len(values) - 1))
    reads = [first]
    for _ in range(count - 1):
        fitting = [place for place, value in enumerate(values) if _broadcasts(values[first].shape, value.shape)]
        reads.append(draw(st.sampled_from(fitting)))
    return Step(str(op), op, tuple(reads))


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b)))


def with_weights(draw: Draw, values: Sequence[Tensor]) -> Step | None:
    place = draw(st.integers(0, len(values) - 1))
    x = values[place]
    if x.dim() == 0:
        return None
    size, out = x.shape[-1], draw(st.integers(1, 9))
    calls: list[tuple[str, Callable[..., Any], tuple[tuple[int, ...], ...]]] = [
        ("linear", F.linear, ((out, size), (out,))),
        ("linear without bias", F.linear, ((out, size),)),
        ("matmul", torch.matmul, ((size, out),)),
        ("layer_norm", lambda x, w, b: F.layer_norm(x, (size,), w, b), ((size,), (size,))),
        ("rms_norm", lambda x, w: F.rms_norm(x, (size,), w, 1e-6), ((size,),)),
        ("scale", torch.mul, ((size,),)),
        ("einsum ...k,kn", lambda x, w: torch.einsum("...k,kn->...n", x, w), ((size, out),)),
    ]
    if x.dim() == 3:
        calls.append(("conv1d", lambda x, w: F.conv1d(x, w, padding=1), ((out, x.shape[1], 3),)))
        calls.append(("bmm", torch.bmm, ((x.shape[0], size, out),)))
    text, function, weights = draw(st.sampled_from(calls))
    return Step(f"{text} to {out}", function, (place,), weights)


def with_dim(draw: Draw, values: Sequence[Tensor]) -> Step | None:
    place = draw(st.integers(0, len(values) - 1))
    x = values[place]
    if x.dim() == 0:
        return None
    dim, keep = draw(st.integers(-x.dim(), x.dim() - 1)), draw(st.booleans())
    size = x.shape[dim]
    start = draw(st.integers(0, size - 1))
    length = draw(st.integers(1, size - start))
    calls: dict[str, Callable[..., Any]] = {
        "sum": lambda x: x.sum(dim, keep),
        "mean": lambda x: x.mean(dim, keep),
        "amax": lambda x: x.amax(dim, keep),
        "logsumexp": lambda x: x.logsumexp(dim, keep),
        "softmax": lambda x: x.softmax(dim),
        "log_softmax": lambda x: x.log_softmax(dim),
        "cumsum": lambda x: x.cumsum(dim),
        "flip": lambda x: x.flip(dim),
        "roll": lambda x: x.roll(length, dim),
        "narrow": lambda x: x.narrow(dim, start, length),
        "select": lambda x: x.select(dim, start),
        "unsqueeze": lambda x: x.unsqueeze(dim),
        "sort": lambda x: x.sort(dim).values,
        "topk": lambda x: x.topk(length, dim).values,
        "cat with itself": lambda x: torch.cat([x, x], dim),
        "stack with itself": lambda x: torch.stack([x, -x], dim),
        "repeat_interleave": lambda x: x.repeat_interleave(2, dim),
        "index_select": lambda x: x.index_select(dim, torch.arange(size - 1, -1, -1)),
        "gather": lambda x: x.gather(dim, x.argsort(dim)),
        "norm": lambda x: (x + 2).norm(dim=dim, keepdim=keep),
        "var": lambda x: x.var(dim, correction=0, keepdim=keep),
        "chunk": lambda x: x.chunk(2, dim)[-1],
        "transpose": lambda x: x.transpose(dim, -1),
    }
    name = draw(st.sampled_from(sorted(calls)))
    return Step(f"{name}(dim={dim}, keep={keep}, start={start}, length={length})", calls[name], (place,))


def whole_tensor(draw: Draw, values: Sequence[Tensor]) -> Step | None:
    place = draw(st.integers(0, len(values) - 1))
    x = values[place]
    first = x.shape[0] if x.dim() else 1
    calls: dict[str, Callable[..., Any]] = {
        "flatten": lambda x: x.flatten(),
        "flatten the first": lambda x: x.flatten(0, min(1, x.dim() - 1)) if x.dim() else x,
        "rows apart": lambda x: x.reshape(first, -1),
        "reversed dims": lambda x: x.permute(*reversed(range(x.dim()))),
        "times its transpose": lambda x: x @ x.transpose(-1, -2) if x.dim() > 1 else x * x,
        "expand": lambda x: x.unsqueeze(0).expand(3, *x.shape),
        "masked_fill": lambda x: x.masked_fill(x > 0.5, 0.25),
        "where": lambda x: torch.where(x > 0, x, x * 0.1),
        "tril": lambda x: x.tril() if x.dim() > 1 else x + 1,
        "pad": lambda x: F.pad(x, (1, 2)) if x.dim() else x,
        "attention": lambda x: F.scaled_dot_product_attention(x, x, x) if x.dim() > 2 else x,
        "causal attention": lambda x: F.scaled_dot_product_attention(x, x * 2, x, is_causal=True) if x.dim() > 2 else x,
        "halves apart": lambda x: x.unflatten(-1, (2, -1)) if x.dim() and x.shape[-1] % 2 == 0 else x,
        "thirds apart": lambda x: x.unflatten(-1, (-1, 3)) if x.dim() and x.shape[-1] % 3 == 0 else x,
        "mean": lambda x: x.mean(),
        "float32 and back": lambda x: x.float().double(),
        "plus arange": lambda x: x + torch.arange(x.shape[-1]) if x.dim() else x,
        "in place": lambda x: x.clone().mul_(2).add_(1),
    }
    name = draw(st.sampled_from(sorted(calls)))
    return Step(name, calls[name], (place,))


BUILDERS: tuple[Build, ...] = (elementwise, with_weights, with_weights, with_dim, with_dim, whole_tensor)


@st.composite
def programs(draw: Draw, depth: int = 12) -> tuple[Program, Tensor, tuple[int, int, int], dict[str, str]]:
    """Draw a program, its input, a mesh of at most 12 ranks and pins of parameters."""
    shape = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values, steps = [x], list[Step]()
    for _ in range(draw(st.integers(1, depth))):
        step = draw(st.sampled_from(BUILDERS))(draw, values)
        if step is None:
            continue
        weights = [torch.full(shape, 0.3, dtype=torch.float64) for shape in step.weights]
        try:
            value = step.function(*(values[place] for place in step.reads), *weights)
        except (RuntimeError, IndexError):
            continue  # the op does not take this shape
        if value.numel() in range(1, LARGEST) and bool((value.isfinite() & (value.abs() < 100)).all()):
            values.append(value)
            steps.append(step)
    mesh = draw(st.tuples(*[st.integers(1, 4)] * 3).filter(lambda sizes: sizes[0] * sizes[1] * sizes[2] <= 12))
    program = Program(steps)
    return program, x, mesh, draw(pins(program, mesh))


@st.composite
def pins(draw: Draw, program: Program, mesh: tuple[int, int, int]) -> dict[str, str]:
    """Draw layouts for some parameters: each dim split by one axis that divides it, or none."""
    found: dict[str, str] = {}
    for number, weight in enumerate(program.weights):
        if not draw(st.integers(0, 3)) == 0:
            continue
        axes, dims = dict(zip("xyz", mesh)), list[str]()
        for size in weight.shape:
            fitting = [axis for axis, extent in axes.items() if size % extent == 0]
            axis = draw(st.sampled_from(["", *fitting]))
            dims.append(f"{size}@{axis}" if axis else str(size))
            axes.pop(axis, None)
        found[f"weights.{number}"] = f"f[{', '.join(dims)}]"
    return found
