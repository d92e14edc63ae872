"""The ops that draw random numbers: for each, its result as a function of the numbers of its elements.

Lowered graphs call these functions on one rank's block, `partir.same_randomness` on whole tensors: both get the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from partir.errors import PartirError
from partir.layout import Layout
from partir.local_ops import PadNumbers
from partir.random_numbers import BITS, Numbers, numbers_of

aten = torch.ops.aten
DRAWN: dict[Any, Callable[..., Any]] = {}
"""Op -> how to draw it: `function(*positional(op, args, kwargs), seed=, site=, layout=, device=, rng=, pads=)`."""

_LEFT_OUT = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format", "generator"})


def _draws(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function of the ops' arguments and numbers in the table; there it makes the numbers itself."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def draw(*args: Any, seed: Tensor, site: int, layout: str, device: torch.device, rng: str = "exact", pads: PadNumbers = ()) -> Any:
            return function(*args, numbers=numbers_of(rng, seed, site, Layout.parse(layout), device, pads))

        DRAWN.update(dict.fromkeys(ops, draw))
        return draw

    return enter


@_draws(aten.rand.default, aten.rand_like.default)
def random_uniform(like: Any, *, numbers: Numbers) -> Tensor:
    """Draw uniform numbers in [0, 1)."""
    return numbers.uniform(numbers.dtype)


@_draws(aten.randn.default, aten.randn_like.default)
def random_normal(like: Any, *, numbers: Numbers) -> Tensor:
    """Draw standard normal numbers."""
    return numbers.normal(numbers.dtype)


@_draws(aten.uniform.default)
def uniform(x: Any, low: float = 0.0, high: float = 1.0, *, numbers: Numbers) -> Tensor:
    """Draw uniform numbers in [low, high)."""
    return numbers.uniform(numbers.dtype) * (high - low) + low


@_draws(aten.normal_functional.default)
def normal_functional(x: Any, mean: float = 0.0, deviation: float = 1.0, *, numbers: Numbers) -> Tensor:
    """Draw normal numbers."""
    return numbers.normal(numbers.dtype) * deviation + mean


@_draws(aten.normal.float_float)
def normal_sized(mean: float, deviation: float, size: Any, *, numbers: Numbers) -> Tensor:
    """Draw normal numbers."""
    return numbers.normal(numbers.dtype) * deviation + mean


@_draws(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def normal(mean: Tensor | float = 0.0, deviation: Tensor | float = 1.0, *, numbers: Numbers) -> Tensor:
    """Draw normal numbers, each of its own mean or deviation; torch gives both a gradient of zero."""
    drawn = numbers.normal(numbers.dtype)
    return drawn * _detached(deviation) + _detached(mean)


@_draws(aten.exponential.default)
def exponential(x: Any, rate: float = 1.0, *, numbers: Numbers) -> Tensor:
    """Draw exponential numbers; never 0, as torch's are, so that a logarithm of them is finite."""
    u = numbers.uniform(torch.float64).clamp(min=2.0 ** -(BITS + 1))
    return (-torch.log1p(-u) / rate).to(numbers.dtype)


@_draws(aten.bernoulli.default)
def bernoulli(probability: Tensor, *, numbers: Numbers) -> Tensor:
    """Draw 1 with each element's own probability, else 0."""
    return (numbers.uniform(torch.float64) < probability.detach()).to(numbers.dtype)


@_draws(aten.bernoulli.Tensor)
def bernoulli_tensor(x: Any, probability: Tensor, *, numbers: Numbers) -> Tensor:
    """Draw 1 with each element's own probability, else 0."""
    return (numbers.uniform(torch.float64) < probability.detach()).to(numbers.dtype)


@_draws(aten.bernoulli.p)
def bernoulli_p(x: Any, probability: float = 0.5, *, numbers: Numbers) -> Tensor:
    """Draw 1 with one probability, else 0."""
    return numbers.chosen(probability).to(numbers.dtype)


@_draws(aten.randint.default, aten.randint_like.default, aten.random.to)
def random_integers(first: Any, second: Any, *, numbers: Numbers) -> Tensor:
    """Draw integers in [0, high); of the two arguments one is `high` and the other is a size or a tensor."""
    return _integers(0, first if isinstance(first, int) else second, numbers)


@_draws(aten.randint.low)
def random_integers_between(low: int, high: int, size: Any, *, numbers: Numbers) -> Tensor:
    """Draw integers in [low, high)."""
    return _integers(low, high, numbers)


@_draws(aten.randint_like.low_dtype, getattr(aten.random, "from"))
def random_integers_like(x: Any, low: int, high: int | None, *, numbers: Numbers) -> Tensor:
    """Draw integers in [low, high)."""
    if high is None:
        raise PartirError(f"x.random_({low}, None) draws from every integer; give it an upper bound.")
    return _integers(low, high, numbers)


@_draws(aten.dropout.default)
def dropout(x: Tensor, p: float, train: bool, *, numbers: Numbers) -> Tensor:
    """Drop elements of `x` with probability `p` and scale the rest by 1 / (1 - p); saves a bool mask only."""
    return x * numbers.chosen(1 - p) * _scale(p)


@_draws(aten.native_dropout.default)
def native_dropout(x: Tensor, p: float, train: bool | None, *, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Return `dropout(x)` and the mask of what was kept."""
    mask = numbers.chosen(1 - p)
    return x * mask * _scale(p), mask


def draw_with(op: Any, args: Sequence[Any], numbers: Numbers) -> Any:
    """Return the results of an op of the table, drawn with given numbers."""
    return cast(Any, DRAWN[op]).__wrapped__(*args, numbers=numbers)


def draws(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws from torch's own generator: torch says that the op may, and no argument turns it off."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    given = _named(op, args, kwargs)
    if given.get("train") is False or given.get("training") is False or given.get("generator") is not None:
        return False
    if op is aten.native_dropout.default:
        return True
    probability = given.get("dropout_p", given.get("dropout", given.get("p") if "dropout" in str(op) else None))
    return probability is None or 0 < probability < 1


def refusal(op: Any) -> str | None:
    """Return why the random numbers of an op cannot be the same on every mesh; None where they can."""
    if op in DRAWN:
        return None
    known = ", ".join(sorted({str(known).split(".")[1] for known in DRAWN}))
    return (
        f"{op} draws random numbers, and partir cannot draw them element by element, so that every mesh gets the same. "
        f"Draw them outside of forward and pass them in, or use one of: {known}."
    )


def positional(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a call in order, defaults included, less those that say what the result is made of."""
    return tuple(value for name, value in _named(op, args, kwargs).items() if name not in _LEFT_OUT)


def _named(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    schema = cast("list[Any]", op._schema.arguments)
    defaults = {argument.name: argument.default_value for argument in schema}
    return defaults | dict(zip(defaults, args)) | dict(kwargs)


def _integers(low: int, high: int, numbers: Numbers) -> Tensor:
    if not 0 < high - low <= 2**BITS:
        raise ValueError(f"random integers lie in [low, high) with 0 < high - low <= 2**{BITS}, got low={low}, high={high}.")
    return (numbers.bits() % (high - low) + low).to(numbers.dtype)


def _scale(p: float) -> float:
    return 0.0 if p == 1 else 1 / (1 - p)


def _detached(value: Tensor | float) -> Tensor | float:
    return value.detach() if isinstance(value, Tensor) else value
