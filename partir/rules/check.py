"""Prove rules by trial: run each op whole and in blocks as its rule says, and compare outputs and gradients.

Every factor is split in 2, 3 and 4 blocks; the op runs on each block and the results are put together as the rule
says: concatenated along the factor, summed, maximised, looked up with masks, or by the recipe of a `split` clause.
Everything is differentiable: one backward through the blocks gives the gradients to compare with the whole op's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from partir.errors import RuleError
from partir.rules.binding import Binding
from partir.rules.blocks import as_tuple, run_in_blocks
from partir.rules.registry import builtin, find, misfit
from partir.rules.rule import Rule
from partir.rules.trial import Trial, make_trial

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Finding:
    """What the trial of one factor showed. verdict: "ok", "wrong", "missing" (it could be split) or "not tried"."""

    op: str
    signature: str
    factor: str
    kind: str
    verdict: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.op:<34} {self.factor:<8} {self.kind:<8} {self.verdict:<10} {self.detail}".rstrip()


@dataclass(frozen=True)
class Report:
    """All findings; `str(report)` is a table."""

    findings: tuple[Finding, ...]

    def of(self, verdict: str) -> tuple[Finding, ...]:
        """Return the findings of one verdict."""
        return tuple(finding for finding in self.findings if finding.verdict == verdict)

    def __str__(self) -> str:
        counts = ", ".join(f"{len(self.of(verdict))} {verdict}" for verdict in ("ok", "wrong", "missing", "not tried"))
        header = f"{'op':<34} {'factor':<8} {'kind':<8} {'verdict':<10} detail"
        return "\n".join([header, *map(str, self.findings), counts])

    def raise_on_error(self) -> None:
        """Raise RuleError that lists every wrong rule, if there is one."""
        wrong = self.of("wrong")
        if wrong:
            raise RuleError("rules that are wrong:\n" + "\n".join(f"  {finding}" for finding in wrong))


def check_rules(
    rules: Mapping[str, Rule] | None = None,
    ops: Iterable[Any] | None = None,
    blocks: Sequence[int] = (2, 3, 4),
    seed: int = 0,
) -> Report:
    """Try every factor of every rule and report which are right.

    Args:
        rules: name -> Rule as `rules.load` returns them; all built-in rules by default.
        ops: only these, as OpOverloads or names such as "aten.linear".
        blocks: the numbers of blocks to try.
    """
    if rules is None and ops is not None:
        targets = [op for op in ops if not isinstance(op, str)]
        rules = {str(op): found for op in targets if (found := find(op)) is not None}
        rules |= {name: builtin()[name] for name in ops if isinstance(name, str)}
    elif ops is not None and rules is not None:
        rules = {name: rules[name] for name in map(str, ops)}
    generator = torch.Generator().manual_seed(seed)
    findings: list[Finding] = []
    for name, rule in (builtin() if rules is None else rules).items():
        findings += _check_rule(name, rule, tuple(blocks), generator)
    return Report(tuple(findings))


def _check_rule(name: str, rule: Rule, blocks: tuple[int, ...], generator: torch.Generator) -> list[Finding]:
    findings: list[Finding] = []
    op = _op_of(name, rule)
    if op is None:
        return [Finding(name, "", "", "", "not tried", "no overload of this op fits")]
    for form in rule.forms:
        single = Rule(name, (form,), rule.where, op._schema)
        trial = make_trial(single, form, generator)
        if isinstance(trial, str):
            findings.append(Finding(name, form.signature, "", "", "not tried", trial))
            continue
        try:
            result = op(*trial.args, **trial.kwargs)
            binding = single.bind(trial.args, trial.kwargs, result)
        except (RuntimeError, RuleError, IndexError, TypeError, ValueError) as error:
            reason = f"the example does not run: {_first_line(error)}"
            findings.append(Finding(name, form.signature, "", "", "not tried", reason))
            continue
        case = _Case(op, form.signature, binding, trial, generator)
        findings += [_check_factor(case, factor, blocks) for factor in binding.sizes]
    return findings


def _op_of(name: str, rule: Rule) -> Any:
    """Return the overload to try: the named one, or the first whose tensors are the rule's."""
    namespace, op, *overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), op)
    if overload:
        return getattr(packet, overload[0])
    for each in packet.overloads():
        target = getattr(packet, each)
        out = any(argument.is_out for argument in target._schema.arguments)
        if not out and all(misfit(form, target._schema) is None for form in rule.forms):
            return target
    return None


@dataclass(frozen=True)
class _Case:
    """One form of a rule with a call to try it on."""

    op: Any
    signature: str
    binding: Binding
    trial: Trial
    generator: torch.Generator

    def finding(self, factor: str, verdict: str, detail: str = "") -> Finding:
        return Finding(self.binding.rule, self.signature, factor, kind_of(self.binding, factor), verdict, detail)


class _NotTried(Exception):
    """The whole op itself does not run or has no gradient."""


def _check_factor(case: _Case, factor: str, blocks: tuple[int, ...]) -> Finding:
    size = case.binding.sizes[factor]
    tried = [count for count in blocks if size % count == 0 and size > 1]
    if case.binding.random:
        return case.finding(factor, "not tried", "random")
    if not tried:
        return case.finding(factor, "not tried", f"size {size} has no such blocks")
    if "empty" in case.op._schema.name:
        return case.finding(factor, "not tried", "the values are undefined")
    kind = kind_of(case.binding, factor)
    try:
        if kind == "whole":
            return case.finding(factor, *_try_whole(case, factor, tried))
        problem = _first_problem(case, factor, kind, tried)
        return case.finding(factor, "wrong" if problem else "ok", problem or "")
    except _NotTried as reason:
        return case.finding(factor, "not tried", str(reason))


def _first_problem(case: _Case, factor: str, kind: str, tried: list[int]) -> str | None:
    problems = (_compare(case, factor, kind, count) for count in tried)
    return next((problem for problem in problems if problem is not None), None)


def _try_whole(case: _Case, factor: str, tried: list[int]) -> tuple[str, str]:
    """Try whether a factor that the rule keeps whole could be split, or summed, after all."""
    if not any(factor in dim for dims in case.binding.operands for dim in dims):
        return "ok", "made whole on each rank"
    kept = any(factor in dim for dims in case.binding.results for dim in dims)
    for kind, what in (("free", "split"),) if kept else (("free", "split"), ("sum", "summed")):
        if _first_problem(case, factor, kind, tried) is None:
            return "missing", f"{factor} could be {what}"
    return "ok", ""


def kind_of(binding: Binding, factor: str) -> str:
    """Say how a binding treats a factor."""
    kinds = {"whole": binding.whole, "split": binding.splits, "sum": binding.sums, "max": binding.maxima}
    return next((kind for kind, factors in kinds.items() if factor in factors), "free")


def _compare(case: _Case, factor: str, kind: str, count: int) -> str | None:
    """Return how the run in blocks differs from the whole op, or None when it does not."""
    op, first = case.op, _leaves(case.trial)
    try:
        whole, cotangents, expected = _run_whole(case, first)
    except RuntimeError:  # an op without a gradient, or with an operand that has none
        first = _without_gradients(first)
        try:
            whole, cotangents, expected = _run_whole(case, first)
        except RuntimeError as error:
            raise _NotTried(_first_line(error)) from None
    second = _leaves(case.trial) if any(leaf.requires_grad for leaf in first.tensors()) else first
    try:
        parts = run_in_blocks(op, case.binding, second.args, second.kwargs, factor, kind, count)
        if problem := _difference(whole, parts, "result"):
            return f"{count} blocks: {problem}"
        problem = _difference(expected, _gradients(parts, cotangents, second), "the gradient of operand")
    except (RuntimeError, IndexError, ValueError, TypeError, RuleError) as error:
        return f"{count} blocks: {_first_line(error)}"
    return f"{count} blocks: {problem}" if problem else None


def _run_whole(case: _Case, trial: Trial) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor | None], list[torch.Tensor]]:
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
            return f"{what} {number} differs by {float((_wide(one) - _wide(other)).abs().max()):.2g}"
    return None


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


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:100] if str(error).strip() else type(error).__name__
