"""Find a rule by trial for an op that has none: split its dims alone and together, and keep what gives the whole op's numbers.

    my.mix(x f64[4, 6], w f64[6, 8]) -> f64[4, 8]
    op my.mix(x[a b], w[b c]) -> y[a c]
        sum b

What is right on one call may be wrong on another: a proposal is to be read, and to be checked by `check_rules`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from string import ascii_lowercase
from typing import Any, cast

import torch

from partir.errors import RuleError
from partir.rules.binding import Binding
from partir.rules.blocks import as_tuple
from partir.rules.compare import Case, NotTried, first_problem
from partir.rules.ops import qualified_name
from partir.rules.trial import Trial

MOST_ELEMENTS = 1 << 16
MOST_DIMS = 12
COUNTS = (2, 3, 5, 7)

Place = tuple[int, int]  # tensor (operands first, then results), dim


def propose(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the text of a rule that is right for one call, None where none is found.

    Args:
        op: an OpOverload without hidden state; it is run on random numbers.
        args, kwargs: the call's, (fake) tensors for their shapes and dtypes.
    """
    if op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags:
        return None
    generator = torch.Generator().manual_seed(0)
    trial = Trial(tuple(_random(value, generator) for value in args), {name: _random(value, generator) for name, value in kwargs.items()})
    operands = [value for value in (*trial.args, *trial.kwargs.values()) if isinstance(value, torch.Tensor)]
    listed = any(isinstance(value, list) for value in (*trial.args, *trial.kwargs.values()) if _holds_tensors(value))
    if not operands or listed or sum(operand.numel() for operand in operands) > MOST_ELEMENTS:
        return None
    try:
        results = as_tuple(op(*trial.args, **trial.kwargs))
    except Exception:  # an op that does not take random numbers proposes nothing
        return None
    if not all(isinstance(result, torch.Tensor) for result in results):
        return None
    return _Search(op, trial, operands, list(results), generator).text()


@dataclass
class _Search:
    """Factors found so far: the places of each, and how it may be split."""

    op: Any
    trial: Trial
    operands: list[torch.Tensor]
    results: list[torch.Tensor]
    generator: torch.Generator
    factors: list[tuple[str, tuple[Place, ...]]] = field(default_factory=list[tuple[str, tuple[Place, ...]]])

    def text(self) -> str | None:
        """Try every dim of every operand once; write what was found."""
        shapes = [tuple(tensor.shape) for tensor in (*self.operands, *self.results)]
        taken: set[Place] = set()
        if sum(len(shape) for shape in shapes) > MOST_DIMS:
            return None
        for tensor in range(len(self.operands)):
            for dim in range(len(shapes[tensor])):
                if (tensor, dim) in taken:
                    continue
                kind, places = self._try((tensor, dim), shapes, taken)
                taken.update(places)
                self.factors.append((kind, places))
        rest = [(tensor, dim) for tensor, shape in enumerate(shapes) for dim in range(len(shape)) if (tensor, dim) not in taken]
        self.factors += [("whole", (place,)) for place in rest]
        return self._write(shapes) if any(kind != "whole" for kind, _ in self.factors) else None

    def _try(self, first: Place, shapes: Sequence[tuple[int, ...]], taken: set[Place]) -> tuple[str, tuple[Place, ...]]:
        size = shapes[first[0]][first[1]]
        count = next((count for count in COUNTS if size > 1 and size % count == 0), None)
        for places in _groups(first, shapes, taken) if count is not None else ():
            kept = any(tensor >= len(self.operands) for tensor, _ in places)
            for kind in ("free",) if kept else ("sum", "free"):
                if self._is_right(kind, places, shapes, cast(int, count)):
                    return kind, places
        return "whole", (first,)

    def _is_right(self, kind: str, places: tuple[Place, ...], shapes: Sequence[tuple[int, ...]], count: int) -> bool:
        binding = _binding(self.op, self.trial, places, shapes, len(self.operands))
        case = Case(self.op, "", binding, self.trial, self.generator)
        try:
            return first_problem(case, "f", kind, [count]) is None
        except (NotTried, RuleError, RuntimeError):
            return False

    def _write(self, shapes: Sequence[tuple[int, ...]]) -> str:
        names = {place: ascii_lowercase[number] for number, (_, places) in enumerate(self.factors) for place in places}
        schema, tensors = self.op._schema, iter(range(len(shapes)))
        given = {**dict(zip((argument.name for argument in schema.arguments), self.trial.args, strict=False)), **self.trial.kwargs}
        arguments = [name + (_dims(next(tensors), shapes, names) if isinstance(value, torch.Tensor) else "") for name, value in given.items()]
        results = [f"y{number or ''}" + _dims(next(tensors), shapes, names) for number in range(len(self.results))]
        lines = [f"op {_spelled(schema)}({', '.join(arguments)}) -> {', '.join(results)}"]
        for kind in ("sum", "whole"):
            listed = [names[places[0]] for found, places in self.factors if found == kind]
            lines += [f"    {kind} {' '.join(listed)}"] if listed else []
        lost = [names[places[0]] for kind, places in self.factors if kind == "free" and max(places)[0] < len(self.operands)]
        return "\n".join(lines + ([f"    free {' '.join(lost)}"] if lost else []))


def _spelled(schema: Any) -> str:
    return qualified_name(schema).removesuffix(".default")


def _dims(tensor: int, shapes: Sequence[tuple[int, ...]], names: Mapping[Place, str]) -> str:
    return "[" + " ".join(names[(tensor, dim)] for dim in range(len(shapes[tensor]))) + "]"


def _groups(first: Place, shapes: Sequence[tuple[int, ...]], taken: set[Place]) -> Iterator[tuple[Place, ...]]:
    """Yield sets of dims of one size that may be one factor, at most one a tensor, the largest sets first."""
    size = shapes[first[0]][first[1]]
    choices: list[list[Place | None]] = []
    for tensor, shape in enumerate(shapes):
        if tensor != first[0]:
            fitting = [(tensor, dim) for dim, other in enumerate(shape) if other == size and (tensor, dim) not in taken]
            choices.append([*fitting, None])
    found = [(first, *(place for place in chosen if place is not None)) for chosen in product(*choices)]
    yield from sorted(found, key=lambda places: -len(places))


def _binding(op: Any, trial: Trial, places: Sequence[Place], shapes: Sequence[tuple[int, ...]], num_operands: int) -> Binding:
    """Return a rule's binding in which one factor, f, has these places and every other dim is a factor of its own."""
    sizes: dict[str, int] = {}
    dims: list[tuple[tuple[str, ...], ...]] = []
    for tensor, shape in enumerate(shapes):
        names = ["f" if (tensor, dim) in places else f"t{tensor}.{dim}" for dim in range(len(shape))]
        sizes |= dict(zip(names, shape, strict=True))
        dims.append(tuple((name,) for name in names))
    given = {**dict(zip((argument.name for argument in op._schema.arguments), trial.args, strict=False)), **trial.kwargs}
    positions = tuple((name, None) for name, value in given.items() if isinstance(value, torch.Tensor))
    operands, results = tuple(dims[:num_operands]), tuple(dims[num_operands:])
    names = tuple((f"y{number}", None) for number in range(len(results)))
    return Binding(str(op), operands, positions, tuple(name for name, _ in positions), results, names, sizes)


def _random(value: Any, generator: torch.Generator) -> Any:
    """Return a random tensor for a (fake) tensor: float64 for floats, small numbers for integers."""
    if isinstance(value, list | tuple):
        return [_random(item, generator) for item in cast("Sequence[Any]", value)]
    if not isinstance(value, torch.Tensor):
        return value
    shape = tuple(int(size) for size in value.shape)
    if value.is_floating_point():
        return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1
    return torch.randint(0, 2, shape, generator=generator).to(value.dtype)


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, torch.Tensor) for item in cast("list[Any]", value))
