"""Seconds of a template's steps on many meshes at once: what `partir.timing.Clock` plays for one, on arrays with a number for each mesh.

A layer that stands for others is played once. Each of those takes as long as the stream needs from where it enters that layer to where
it enters the next, its messages and those of its neighbours under way meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from partir.cost.prices import Prices
from partir.layer_span import Span
from partir.records import Stage

Step = tuple[str, str, int]
"""``("start" | "wait" | "compute", node, number of the cost's Received or Work)``."""


class Steps:
    """What a rank does in one stage: its messages one by one, and all computation between two of them at once.

    Args:
        steps: in order.
        layers: of each of the cost's works.
    """

    def __init__(self, steps: Sequence[Step], layers: Sequence[str]) -> None:
        self.works: list[int] = []
        self.events: list[tuple[str, str, int, int]] = []
        entered: set[str] = set()
        for kind, name, number in steps:
            if kind != "compute":
                self.events.append((kind, name, number, len(self.works)))
                continue
            if layers[number] not in entered:
                entered.add(layers[number])
                self.events.append(("enter", layers[number], number, len(self.works)))
            self.works.append(number)
        self.events.append(("enter", "end", 0, len(self.works)))


def step_seconds(steps: Mapping[Stage, Steps], spans: Sequence[Span], prices: Prices) -> Any:
    """Return the seconds of a step, an array with one number for each mesh.

    Args:
        steps: by stage.
        spans: of layers that stand for others.
        prices: of messages and works on each mesh. A mesh may lack axes of the template: their messages do not happen.
    """
    total: Any = 0.0
    for stage, played in steps.items():
        entered = _play(played, prices)
        total = total + entered["end"]
        for span in spans:
            total = total + (span.times - 1) * _passage(stage, span, entered)
    return total


def _passage(stage: Stage, span: Span, entered: Mapping[str, Any]) -> Any:
    """Return the seconds from where the stream enters the middle of a span to where it leaves it: the backward runs from the last on."""
    before, after = (span.middle, span.end) if stage == "forward" else (span.end - 1, span.middle - 1)
    layers = span.layer(before), span.layer(after)
    return entered[layers[1]] - entered[layers[0]] if all(layer in entered for layer in layers) else 0.0


def _play(steps: Steps, prices: Prices) -> dict[str, Any]:
    """Return the seconds at which the stream enters each layer, and ``"end"``."""
    every = np.arange(prices.columns)
    computed = np.vstack([np.zeros(prices.columns), np.cumsum(prices.works[steps.works], axis=0)])
    now, done = computed[0], 0
    free: Any = np.zeros((prices.levels, prices.columns))
    arrivals: dict[str, Any] = {}
    entered: dict[str, Any] = {}
    for kind, name, number, place in steps.events:
        if place != done:
            now, done = now + (computed[place] - computed[done]), place
        if kind == "enter":
            entered[name] = now
        elif kind == "wait":
            now = np.maximum(now, arrivals[name])
        else:
            seconds, level, there = prices.messages[number]
            arrival = np.maximum(now, free[level, every]) + seconds
            if there is None:
                free[level, every] = arrival
            else:
                free[level, every] = np.where(there, arrival, free[level, every])
                arrival = np.where(there, arrival, 0.0)
            arrivals[name] = arrival
            now = now + seconds * prices.held_up
    return entered
