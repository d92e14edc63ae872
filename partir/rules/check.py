"""Prove rules by trial: run each op whole and in blocks as its rule says, and compare outputs and gradients.

Every factor is split in 2, 3 and 4 blocks, and in 2 blocks of 2 as two axes on one dim make them; the op runs on each block and the
results are put together as the rule says: concatenated along the factor, summed, maximised, looked up with masks, or by the recipe of
a `split` clause. Everything is differentiable: one backward through the blocks gives the gradients to compare with the whole op's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from partir.errors import RuleError
from partir.rules.binding import Binding
from partir.rules.compare import Blocks, Case, NotTried, axes_of, first_problem, short
from partir.rules.registry import builtin, find, misfit, overload_of, user_rules
from partir.rules.rule import Rule
from partir.rules.trial import make_trial

BLOCKS: tuple[Blocks, ...] = (2, 3, 4, (2, 2))


@dataclass(frozen=True)
class Finding:
    """What the trial of one factor showed.

    verdict: "ok", "wrong", "missing" (it could be split) or "not tried".
    call: the arguments with which it was tried.
    """

    op: str
    signature: str
    factor: str
    kind: str
    verdict: str
    detail: str = ""
    call: str = ""

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
    blocks: Sequence[Blocks] = BLOCKS,
    seed: int = 0,
) -> Report:
    """Try every factor of every rule and report which are right.

    Args:
        rules: name -> Rule as `rules.load` returns them; all built-in rules by default.
        ops: only these: ops, what `partir.rule` returned, or names such as "aten.linear" and "my.op.default".
        blocks: the numbers of blocks to try; `(2, 3)` is 2 blocks of 3 each, as two axes on one dim make them.

    Raises:
        RuleError: a name has no rule.
    """
    if rules is None and ops is not None:
        rules = dict(map(_rule_of, ops))
    elif ops is not None and rules is not None:
        rules = {name: rules[name] for name in map(str, ops)}
    generator = torch.Generator().manual_seed(seed)
    findings: list[Finding] = []
    for name, rule in (builtin() if rules is None else rules).items():
        findings += _check_rule(name, rule, tuple(blocks), generator)
    return Report(tuple(findings))


def _rule_of(op: Any) -> tuple[str, Rule]:
    """Return the name and the rule of an op, given as an op or by name."""
    name = op if isinstance(op, str) else str(overload_of(op))
    found = {**builtin(), **user_rules()}.get(op) if isinstance(op, str) else find(overload_of(op))
    if found is None:
        raise RuleError(f"{name} has no rule.")
    return name, found


def _check_rule(name: str, rule: Rule, blocks: tuple[Blocks, ...], generator: torch.Generator) -> list[Finding]:
    findings: list[Finding] = []
    try:
        op = _op_of(name, rule)
    except AttributeError:
        return [Finding(name, "", "", "", "not tried", "the library that defines this op is not imported")]
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
            reason = f"the example does not run: {short(error)}"
            findings.append(Finding(name, form.signature, "", "", "not tried", reason))
            continue
        case = Case(op, form.signature, binding, trial, generator)
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


def _finding(case: Case, factor: str, verdict: str, detail: str = "") -> Finding:
    return Finding(case.binding.rule, case.signature, factor, kind_of(case.binding, factor), verdict, detail, case.call)


def _check_factor(case: Case, factor: str, blocks: tuple[Blocks, ...]) -> Finding:
    size = case.binding.sizes[factor]
    tried = [each for each in blocks if size % prod(axes_of(each)) == 0 and size > 1]
    if case.binding.random:
        return _finding(case, factor, "not tried", "random")
    if not tried:
        return _finding(case, factor, "not tried", f"size {size} has no such blocks")
    if "empty" in case.op._schema.name:
        return _finding(case, factor, "not tried", "the values are undefined")
    kind = kind_of(case.binding, factor)
    try:
        if kind == "whole":
            return _finding(case, factor, *_try_whole(case, factor, tried))
        problem = first_problem(case, factor, kind, tried)
        return _finding(case, factor, "wrong" if problem else "ok", problem or "")
    except NotTried as reason:
        return _finding(case, factor, "not tried", str(reason))


def _try_whole(case: Case, factor: str, tried: list[Blocks]) -> tuple[str, str]:
    """Try whether a factor that the rule keeps whole could be split, or summed, after all."""
    if not any(factor in dim for dims in case.binding.operands for dim in dims):
        return "ok", "made whole on each rank"
    kept = any(factor in dim for dims in case.binding.results for dim in dims)
    for kind, what in (("free", "split"),) if kept else (("free", "split"), ("sum", "summed")):
        if first_problem(case, factor, kind, tried) is None:
            return "missing", f"{factor} could be {what}"
    return "ok", ""


def kind_of(binding: Binding, factor: str) -> str:
    """Say how a binding treats a factor."""
    kinds = {"whole": binding.whole, "split": binding.splits, "sum": binding.sums, "max": binding.maxima}
    return next((kind for kind, factors in kinds.items() if factor in factors), "free")
