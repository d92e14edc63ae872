"""Seconds of a template's steps on many meshes at once: what `partir.timing.Clock` plays for one, on arrays with a number for each mesh.

A layer that stands for others is played once. Each of those takes as long as the stream needs from where it enters that layer to where
it enters the next, its messages and those of its neighbours under way meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from partir.cost.cost import Cost
from partir.cost.received import Received
from partir.cost.work import Work
from partir.hardware import Hardware
from partir.layer_span import Span
from partir.link_routes import Route, route_of
from partir.mesh import Mesh
from partir.records import Stage
from partir.timing import compute_seconds

Step = tuple[str, str, int]
"""``("start" | "wait" | "compute", node, number of the cost's Received or Work)``."""


@dataclass(frozen=True, eq=False)
class Fleet:
    """Meshes on one hardware, and the routes of their messages, found once.

    Args:
        hardware: that all of them run on.
    """

    hardware: Hardware
    _routes: dict[tuple[Mesh, tuple[str, ...], str], Route | None] = field(default_factory=dict[Any, "Route | None"])

    def route(self, mesh: Mesh, axes: tuple[str, ...], op: str) -> Route | None:
        """Return how messages of a collective go; None where the group is one rank."""
        key = (mesh, axes, op)
        if key not in self._routes:
            present = tuple(axis for axis in axes if mesh[axis] > 1)
            self._routes[key] = route_of(self.hardware, mesh, present, op) if present else None
        return self._routes[key]


def step_seconds(
    cost: Cost,
    steps: Mapping[Stage, Sequence[Step]],
    spans: Sequence[Span],
    meshes: Sequence[Mesh],
    sizes: Mapping[str, Any],
    fleet: Fleet,
    free: Collection[str] = (),
) -> Any:
    """Return the seconds of a step, an array with one number for each mesh.

    Args:
        cost: that the steps' numbers refer to.
        steps: by stage, what a rank does in order.
        spans: of layers that stand for others.
        meshes: which may lack axes of the template: their messages do not happen.
        sizes: the value of each symbol, an array with one number for each mesh.
        fleet: of the hardware.
        free: origins of works that take no time.
    """
    prices = _Prices(cost, meshes, sizes, fleet, frozenset(free))
    total: Any = np.zeros(len(meshes))
    for stage, played in steps.items():
        seconds, entered = _play(played, prices)
        total = total + seconds
        for span in spans:
            total = total + (span.times - 1) * _passage(stage, span, entered)
    return total


def _passage(stage: Stage, span: Span, entered: Mapping[str, Any]) -> Any:
    """Return the seconds from where the stream enters the middle of a span to where it leaves it: the backward runs from the last on."""
    before, after = (span.middle, span.end) if stage == "forward" else (span.end - 1, span.middle - 1)
    layers = span.layer(before), span.layer(after)
    return entered[layers[1]] - entered[layers[0]] if all(layer in entered for layer in layers) else 0.0


def _play(steps: Sequence[Step], prices: _Prices) -> tuple[Any, dict[str, Any]]:
    """Return the seconds of a stage, and those at which the stream enters each layer."""
    now: Any = np.zeros(len(prices.meshes))
    free: Any = np.zeros((len(prices.fleet.hardware.links), len(prices.meshes)))
    every = np.arange(len(prices.meshes))
    arrivals: dict[str, Any] = {}
    entered: dict[str, Any] = {}
    for kind, name, number in steps:
        if kind == "compute":
            entered.setdefault(prices.cost.work[number].layer, now)
            now = now + prices.compute(number)
        elif kind == "wait":
            now = np.maximum(now, arrivals[name])
        else:
            seconds, level = prices.message(number)
            arrival = np.maximum(now, free[level, every]) + seconds
            there = seconds > 0
            free[level, every] = np.where(there, arrival, free[level, every])
            arrivals[name] = np.where(there, arrival, 0.0)
            now = now + seconds * (1 - prices.fleet.hardware.efficiency.overlap)
    return now, entered


class _Prices:
    """Seconds of the messages and the works of a cost, each kind computed once."""

    def __init__(self, cost: Cost, meshes: Sequence[Mesh], sizes: Mapping[str, Any], fleet: Fleet, free: frozenset[str]) -> None:
        self.cost, self.meshes, self.sizes, self.fleet, self.free = cost, meshes, sizes, fleet, free
        self._messages: dict[Any, tuple[Any, Any]] = {}
        self._works: dict[Any, Any] = {}

    def message(self, number: int) -> tuple[Any, Any]:
        """Return the seconds of a message, 0 where there is none, and the level of its links."""
        one = self.cost.received[number]
        key = (one.record.op, one.axes, one.parts, one.itemsize)
        if key not in self._messages:
            self._messages[key] = self._message(one)
        return self._messages[key]

    def _message(self, one: Received) -> tuple[Any, Any]:
        routes = [self.fleet.route(mesh, one.axes, one.record.op) for mesh in self.meshes]
        waits = np.array([route.seconds if route else 0.0 for route in routes])
        rates = np.array([route.bandwidth if route else np.inf for route in routes])
        levels = np.array([route.level if route else 0 for route in routes])
        received = np.floor(one.value(self.sizes) + np.zeros(len(routes)))
        return waits + received / rates, levels

    def compute(self, number: int) -> Any:
        """Return the seconds of a work."""
        one = self.cost.work[number]
        if one.origin in self.free:
            return 0.0
        key = (one.flops, one.memory, one.dtype, one.axes)
        if key not in self._works:
            self._works[key] = self._compute(one)
        return self._works[key]

    def _compute(self, one: Work) -> Any:
        flops, moved = np.floor(one.flops.value(self.sizes)), np.floor(one.memory_value(self.sizes))
        arithmetic = flops if one.flops.coefficient else 0
        seconds = compute_seconds(self.fleet.hardware, arithmetic, one.dtype, moved)
        idle = [bool(one.axes) and mesh.extent(one.axes) == 1 for mesh in self.meshes]
        return np.where(idle, 0.0, seconds)
