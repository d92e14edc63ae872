"""Fit start, latency and bandwidth to measured messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from partir.hardware import Pace

# torch's own types are partly unknown here.
linalg: Any = cast(Any, torch.linalg)


@dataclass(frozen=True)
class Sample:
    """One measured message: steps of its ring, bytes that a rank received, seconds."""

    steps: int
    bytes: int
    seconds: float


def fit_pace(samples: Sequence[Sample]) -> Pace:
    """Fit start + steps * latency + bytes / bandwidth to samples, by relative least squares with nothing negative.

    >>> pace = fit_pace([Sample(s, b, 1e-5 + 2e-6 * s + b / 1e9) for s in (1, 3) for b in (1000, 10**6)])
    >>> round(pace.start, 9), round(pace.latency, 9), round(pace.bandwidth)
    (1e-05, 2e-06, 1000000000)
    """
    seconds = torch.tensor([sample.seconds for sample in samples], dtype=torch.float64)
    columns = torch.tensor([[1.0, s.steps, s.bytes] for s in samples], dtype=torch.float64) / seconds[:, None]
    found = min(_fits(columns), key=lambda fit: fit[0], default=None)
    if found is None:  # larger messages were no slower: all of it is bandwidth
        return Pace(0.0, max(sample.bytes / sample.seconds for sample in samples))
    start, latency, per_byte = found[1]
    return Pace(latency, 1 / per_byte, start)


def _fits(columns: Tensor) -> Iterator[tuple[float, list[float]]]:
    """Yield error and coefficients of each set of columns that fits ones with nothing negative; bytes are in all of them."""
    ones = torch.ones(len(columns), dtype=torch.float64)
    for used in ([0, 1, 2], [1, 2], [0, 2], [2]):
        scale = columns[:, used].square().sum(dim=0).sqrt()  # so that seconds a byte and seconds count alike
        part = columns[:, used] / scale
        if linalg.matrix_rank(part) < len(used):
            continue
        solved: Tensor = linalg.lstsq(part, ones).solution / scale
        values = [float(value) for value in solved]
        if min(values) > 0:
            whole = [values[used.index(place)] if place in used else 0.0 for place in range(3)]
            yield float((columns[:, used] @ solved - ones).square().sum()), whole
