"""Which rule belongs to which op: the built-in files, the user's own rules, and pointwise ops by their tag."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import resources
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch

from partir.errors import RuleError
from partir.rules import syntax as sx
from partir.rules.functions import as_op
from partir.rules.ops import is_overload, is_packet, overloads, qualified_name
from partir.rules.parser import parse
from partir.rules.rule import Rule
from partir.rules.source import Source
from partir.rules.transform import Entry

Op = TypeVar("Op")
RuleTable = dict[str, Rule]
Files = tuple[Source, ...]

_user_rules: RuleTable = {}
_files: ContextVar[Files] = ContextVar("rule files of this compilation", default=())


def load(path: str | Path) -> RuleTable:
    """Return the rules of one file by op name, each checked against the schema of its op.

    Raises:
        RuleError: no text, syntax (with file, line, column and a caret), unknown names, an op that does not exist or differs.
    """
    file = Source.read(path)
    return _rules(file.text, file.path)


def add(path: str | Path) -> RuleTable:
    """Load a file of the user's own rules and use them from now on; they come before the built-in ones."""
    rules = load(path)
    _user_rules.update(rules)
    find_in.cache_clear()
    return rules


def read(paths: str | Path | Iterable[str | Path] | None) -> Files:
    """Return the text of rule files, which `using` puts before all other rules; a file named twice counts once.

    Raises:
        RuleError: as `load`, or two files have a rule for one op.
    """
    several = () if paths is None else (paths,) if isinstance(paths, (str, Path)) else paths
    files = {Path(path).resolve(): Source.read(path) for path in several}
    table(found := tuple(files.values()))
    return found


@cache
def table(files: Files) -> RuleTable:
    """Return the rules of some files by op name."""
    rules: RuleTable = {}
    for file in files:
        _add_apart(rules, _rules(file.text, file.path))
    return rules


@contextmanager
def using(files: Files) -> Generator[None]:
    """Let the rules of files come before all others inside a `with`: while one model is compiled."""
    token = _files.set(files)
    try:
        yield
    finally:
        _files.reset(token)


def user_rules() -> RuleTable:
    """Return the user's own rules by op name: those of `add` and of `rule`."""
    return dict(_user_rules)


def parse_rules(text: str, path: str = "<rule>") -> RuleTable:
    """Return the rules in text, as `load` does for a file."""
    return _rules(text, path)


@cache
def builtin() -> RuleTable:
    """Return all rules that partir brings, by op name."""
    rules: RuleTable = {}
    for file in sorted(resources.files("partir.rules").iterdir(), key=lambda item: item.name):
        if not file.name.endswith(".rules") or file.name.startswith("placement"):
            continue
        _add_apart(rules, _rules(file.read_text(encoding="utf-8"), file.name, missing_ok=True))
    return rules


def _add_apart(rules: RuleTable, found: RuleTable) -> None:
    for name in sorted(found.keys() & rules.keys()):
        raise RuleError(f"{found[name].where}: {name} already has a rule at {rules[name].where}")
    rules |= found


def find(target: Any) -> Rule | None:
    """Return the rule of an op (`torch.ops.aten.linear.default`), or None.

    The rules of the files in use come first, then the user's, then the built-in ones: this overload's, then those of all its overloads;
    then the pointwise tag.
    """
    return find_in(target, _files.get())


@cache
def find_in(target: Any, files: Files) -> Rule | None:
    """Return the rule of an op where the rules of some files come first; see `find`."""
    if not is_overload(target):
        return None
    schema = target._schema
    exact = qualified_name(schema)
    base = exact.rpartition(".")[0]
    for rules in (table(files), _user_rules, builtin()):
        for name in (exact, base):
            rule_found = rules.get(name)
            if rule_found is not None and (name != base or any(misfit(form, schema) is None for form in rule_found.forms)):
                return Rule(exact, rule_found.forms, rule_found.where, schema)
    return pointwise(target) if torch.Tag.pointwise in target.tags else None


def pointwise(target: Any) -> Rule:
    """Return the rule of an elementwise op, made from its schema: every dim is free, and operands broadcast."""
    schema = target._schema
    star = (sx.Item((sx.STAR,)),)
    parameters = tuple(
        sx.Pattern(argument.name, star if "Tensor" in str(argument.type) else None, optional=True) for argument in schema.arguments
    )
    taken = {pattern.name for pattern in parameters}
    names = ("result" if "y" in taken else "y",) if len(schema.returns) == 1 else tuple(f"y{i}" for i in range(len(schema.returns)))
    random = (sx.Random(),) if torch.Tag.nondeterministic_seeded in target.tags else ()
    form = sx.Form(parameters, tuple(sx.Pattern(name, star) for name in names), random)
    return Rule(qualified_name(schema), (form,), "pointwise tag", schema)


def rule(text: str) -> Callable[[Op], Op]:
    """Give an op a rule, in the language of rule files.

    Args:
        text: ``"x[* k], w[n k] -> y[* n]; sum k"``.

    What is decorated is a torch.library custom op, with a backward of its own or none, an op of torch, whose built-in rule this one
    replaces, or a plain Python function of tensors with type hints: that becomes a custom op, one node in every graph, whose backward
    is the function's own, derived by autograd.

    Example:
        >>> @rule("x[* k] -> y[* k]; whole k")
        ... @torch.library.custom_op("partir_docs::reverse", mutates_args=())
        ... def reverse(x: torch.Tensor) -> torch.Tensor:
        ...     return x.flip(-1)
        >>> str(find(torch.ops.partir_docs.reverse.default))
        'op partir_docs.reverse.default(x[* k]) -> y[* k]\\n    whole k'
    """
    form: sx.Form = parse(text, start="inline")

    def register(op: Op) -> Op:
        made: Any = as_op(op) if isinstance(op, FunctionType) else op
        target = overload_of(made)
        schema = target._schema
        name = qualified_name(schema)
        reason = misfit(form, schema)
        if reason is not None:
            raise RuleError(f"{name}: {reason}")
        _user_rules[name] = Rule(name, (form,), "<partir.rule>", schema)
        find_in.cache_clear()
        return made

    return register


def forget(name: str) -> None:
    """Take a user's rule out again."""
    _user_rules.pop(name, None)
    find_in.cache_clear()


def overload_of(op: Any) -> Any:
    """Return the OpOverload behind what `torch.library.custom_op` returns, or the overload itself."""
    if is_overload(op):
        return op
    if is_packet(op):
        return op.default
    target = getattr(op, "_opoverload", None)
    if target is None:
        name = getattr(op, "__name__", repr(op))
        raise RuleError(f"{name} is no torch op and no function: put @partir.rule(...) on one of these")
    return target


def _rules(text: str, path: str, missing_ok: bool = False) -> RuleTable:
    rules: RuleTable = {}
    for entry in parse(text, path):
        if not isinstance(entry, Entry):
            raise RuleError(f"{path}: `place` belongs in a placement file; read it with rules.placement")
        for name in entry.names:
            if name in rules:
                raise RuleError(f"{entry.where}: {name} already has a rule at {rules[name].where}")
            schemas = _schemas(name)
            if not schemas and missing_ok:
                if not name.startswith("aten."):  # an op of a library that may be imported later; `find` compares it with its schema
                    rules[name] = Rule(name, entry.forms, entry.where, None)
                continue
            if not schemas:
                hint = "" if name.startswith("aten.") else ": import the module that defines it before the rules are read"
                raise RuleError(f"{entry.where}: torch has no op {name}{hint}")
            _check_arity(name, entry, schemas)
            rules[name] = Rule(name, entry.forms, entry.where, schemas[0] if len(schemas) == 1 else None)
    return rules


def _schemas(name: str) -> list[Any]:
    """Return the schemas that `namespace.op` or `namespace.op.overload` names."""
    namespace, op, *overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), op, None)
    if not is_packet(packet):
        return []
    schemas = [each._schema for each in overloads(packet)]
    schemas = [schema for schema in schemas if not overload or qualified_name(schema) == name]
    return [schema for schema in schemas if overload or not any(argument.is_out for argument in schema.arguments)]


def _check_arity(name: str, entry: Entry, schemas: Sequence[Any]) -> None:
    """Every form must fit the op's schema (one of them, for a rule of all overloads)."""
    for form in entry.forms:
        reasons = [misfit(form, schema) for schema in schemas]
        if reasons and None not in reasons:
            raise RuleError(f"{entry.where}: {name}: {reasons[0]}")


def misfit(form: sx.Form, schema: Any) -> str | None:
    """Say why a form's parameters and results cannot be those of a schema; None when they can."""
    arguments = list(schema.arguments)
    mine = ", ".join(pattern.name for pattern in form.parameters)
    its = ", ".join(argument.name for argument in arguments)
    if len(form.parameters) > len(arguments):
        return f"the rule names {len(form.parameters)} parameters ({mine}), the op has {len(arguments)} ({its})"
    left = [argument.name for argument in arguments[len(form.parameters) :] if not argument.has_default_value()]
    if left:
        count = f"the rule names {len(form.parameters)} parameters ({mine}), the op has {len(arguments)} ({its})"
        return f"{count} and needs {', '.join(left)}"
    for pattern, argument in zip(form.parameters, arguments, strict=False):
        kind = str(argument.type)
        if pattern.dims is None and "Tensor" in kind and "Optional" not in kind:
            return f"`{pattern.name}` has no dims, but the op's {argument.name} is a {kind}"
        if pattern.dims is not None and "Tensor" not in kind and kind != "number":
            return f"`{pattern.name}` has dims, but the op's {argument.name} is a {kind}"
        if pattern.dims is not None and pattern.listed != ("List" in kind):
            mine = "a list" if pattern.listed else "one tensor"
            return f"`{pattern.name}` is {mine}, but the op's {argument.name} is a {kind}"
    listed = len(form.results) == 1 and form.results[0].listed
    if listed != (len(schema.returns) == 1 and "List" in str(schema.returns[0].type)):
        return f"the rule's result {'is' if listed else 'is not'} a list, the op's {'is not' if listed else 'is'}"
    if not listed and len(form.results) != len(schema.returns):
        return f"the rule has {len(form.results)} results, the op has {len(schema.returns)}"
    return None
