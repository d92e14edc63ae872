"""Compare one op whole with the same op in blocks of one factor: outputs, then gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from partir.errors import RuleError, first_line
from partir.rules.binding import Binding
from partir.rules.blocks import as_tuple, run_in_blocks
from partir.rules.trial import Trial

TOLERANCE = 1e-9
Blocks = int | tuple[int, ...]  # 4, or (2, 2): blocks of blocks, as two axes on one dim make them


@dataclass(frozen=True)
class Case:
    """One form of a rule with a call to try it on."""

    op: Any
    signature: str
    binding: Binding
    trial: Trial
    generator: torch.Generator

    @property
    def call(self) -> str:
        """The call as text: `self f64[12, 12], dim 1`."""
        return ", ".join(f"{name} {_show(value)}" for name, value in self.trial.named(self.op._schema).items())


class NotTried(Exception):
    """The whole op itself does not run."""


def axes_of(blocks: Blocks) -> tuple[int, ...]:
    """Return the numbers of blocks by axis, the outer first."""
    return (blocks,) if isinstance(blocks, int) else blocks


def first_problem(case: Case, factor: str, kind: str, tried: Sequence[Blocks]) -> str | None:
    """Return how a run in blocks of a factor, split as `kind` says, first differs from the whole op; None where it does not.

    Raises:
        NotTried: the whole op itself does not run.
    """
    problems = (_compare(case, factor, kind, axes_of(blocks)) for blocks in tried)
    return next((problem for problem in problems if problem is not None), None)


def _compare(case: Case, factor: str, kind: str, blocks: tuple[int, ...]) -> str | None:
    """Return how the run in blocks differs from the whole op, or None when it does not."""
    op, first = case.op, _leaves(case.trial)
    try:
        whole, cotangents, expected = _run_whole(case, first)
    except RuntimeError:  # an op without a gradient, or with an operand that has none
        first = _without_gradients(first)
        try:
            whole, cotangents, expected = _run_whole(case, first)
        except RuntimeError as error:
            raise NotTried(short(error)) from None
    second = _leaves(case.trial) if any(leaf.requires_grad for leaf in first.tensors()) else first
    shown = f"{'x'.join(map(str, blocks))} blocks"
    try:
        parts = run_in_blocks(op, case.binding, second.args, second.kwargs, factor, kind, blocks)
        if problem := _difference(whole, parts, "result"):
            return f"{shown}: {problem}"
        problem = _difference(expected, _gradients(parts, cotangents, second), "the gradient of operand")
    except (RuntimeError, IndexError, ValueError, TypeError, RuleError) as error:
        return f"{shown}: {short(error)}"
    return f"{shown}: {problem}" if problem else None


def _run_whole(case: Case, trial: Trial) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor | None], list[torch.Tensor]]:
    """Return the whole op's results, a gradient to give to each, and the gradients of its operands."""
    whole = as_tuple(case.op(*trial.args, **trial.kwargs))
    cotangents = [_cotangent(result, case.generator) for result in whole]
    return whole, cotangents, _gradients(whole, cotangents, trial)


def _without_gradients(trial: Trial) -> Trial:
    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        return value.detach() if isinstance(value, torch.Tensor) else value

    return Trial(tuple(map(plain, trial.args)), {name: plain(value) for name, value in trial.kwargs.items()})


def _cotangent(result: torch.Tensor, generator: torch.Generator) -> torch.Tensor | None:
    """Return a random gradient of a result, None for integers."""
    if not (result.is_floating_point() or result.is_complex()):
        return None
    return torch.rand(result.shape, generator=generator, dtype=result.dtype)


def _difference(expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor], what: str) -> str | None:
    for number, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if one.shape != other.shape:
            return f"{what} {number} has shape {list(other.shape)}, not {list(one.shape)}"
        if one.dtype != other.dtype:
            return f"{what} {number} has dtype {other.dtype}, not {one.dtype}"
        if not _close(one, other):
            return f"{what} {number} differs{_worst(_wide(one), _wide(other))}"
    return None


def _worst(one: torch.Tensor, other: torch.Tensor) -> str:
    """Say where two tensors differ most: ` at [0, 6]: 1.5, not 0.7`."""
    distance = (one - other).abs()
    distance = distance.masked_fill(distance.isnan(), torch.inf).flatten()
    place = int(distance.argmax())
    index = [place // prod(one.shape[dim + 1 :]) % one.shape[dim] for dim in range(one.dim())]
    return f" at {index}: {other.flatten()[place].item():.4g}, not {one.flatten()[place].item():.4g}"


def _leaves(trial: Trial) -> Trial:
    """Copy the call with fresh tensors that record gradients."""
    return Trial(tuple(map(_leaf, trial.args)), {name: _leaf(value) for name, value in trial.kwargs.items()})


def _leaf(value: Any) -> Any:
    if isinstance(value, list):
        return [_leaf(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.is_floating_point() or value.is_complex())
    return value


def _gradients(results: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor | None], trial: Trial) -> list[torch.Tensor]:
    """Return the gradient of every tensor of the call that has one."""
    wanted = [leaf for leaf in trial.tensors() if leaf.requires_grad]
    pairs = zip(results, cotangents, strict=True)
    terms = [torch.real((y * c).sum()) for y, c in pairs if c is not None and y.requires_grad]
    if not terms:
        return [torch.zeros_like(leaf) for leaf in wanted]
    return list(torch.autograd.grad(torch.stack(terms).sum(), wanted, allow_unused=True, materialize_grads=True))


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = _wide(one), _wide(other)
    scale = float(one[one.isfinite()].abs().max()) if one.isfinite().any() else 0.0
    return torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)


def _wide(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return value if value.is_complex() else value.double()


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_show, value)) + "]"  # pyright: ignore[reportUnknownArgumentType]
    return repr(value)


def short(error: Exception) -> str:
    """Return the first line of an error's message, cut to 100 characters."""
    return first_line(error)[:100]
