"""What each message and each op of a program takes on many meshes at once, as arrays with a number for each mesh."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from partir.cost.cost import Cost
from partir.cost.monomial import Monomial
from partir.cost.received import Received
from partir.cost.work import Work
from partir.hardware import Hardware
from partir.link_routes import Route, route_of
from partir.mesh import Mesh
from partir.timing import compute_seconds

LARGEST = 2**62
"""Numbers from here on are floats."""


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


@dataclass(frozen=True, eq=False)
class Prices:
    """Seconds of the messages and works of a cost on some meshes.

    Args:
        columns: how many meshes.
        levels: of links of the hardware.
        held_up: the part of a message's seconds for which it keeps the rank from computing.
        messages: of each `Received`: seconds, level of its links, and on which meshes there is one (None: on all).
        works: of each `Work` a row of seconds.
        received: bytes that one rank receives in a step.
        bytes_of: the value of a monomial on each mesh.
    """

    columns: int
    levels: int
    held_up: float
    messages: Sequence[tuple[Any, Any, Any]]
    works: Any
    received: Any
    bytes_of: Values

    def of(self, columns: Sequence[int]) -> Prices:
        """Return those of some of the meshes."""
        messages = {id(one): _columns(one, columns) for one in self.messages}
        return replace(
            self,
            columns=len(columns),
            messages=[messages[id(one)] for one in self.messages],
            works=self.works[:, columns],
            received=self.received[columns],
            bytes_of=self.bytes_of.of(columns),
        )

    def without(self, cost: Cost, origins: Collection[str]) -> Prices:
        """Return those of a program in which the works of some calls take no time."""
        taken = np.array([one.origin not in origins for one in cost.work])
        return replace(self, works=self.works * taken[:, None])


class Values:
    """The values of monomials, each computed once.

    Args:
        sizes: of each symbol, an array with one number for each mesh.
        columns: how many meshes.
    """

    def __init__(self, sizes: Mapping[str, Any], columns: int) -> None:
        self.sizes, self.columns = sizes, columns
        self._found: dict[Monomial, Any] = {}

    def __call__(self, size: Monomial) -> Any:
        """Return the value of a monomial."""
        if size not in self._found:
            self._found[size] = size.value(self.sizes) + np.zeros(self.columns)
        return self._found[size]

    def of(self, columns: Sequence[int]) -> Values:
        """Return those on some of the meshes."""
        some = Values({name: size[columns] for name, size in self.sizes.items()}, len(columns))
        some._found = {size: value[columns] for size, value in self._found.items()}
        return some


def sizes_at(cost: Cost, sizes: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """Return the value of each symbol, an array with one number for each of ``sizes``: integers, unless a product would not fit 64 bits."""
    at: dict[str, Any] = {name: np.array([one.get(name, usual) for one in sizes]) for name, usual in cost.values.items()}
    most = {name: int(array.max()) for name, array in at.items()}
    monomials = [*(part for one in cost.received for part in one.parts), *(one.bytes for one in cost.blocks)]
    monomials += [part for one in cost.work for part in (one.flops, *one.memory)]
    fits = all(monomial.numerator_at(most) < LARGEST for monomial in dict.fromkeys(monomials))
    return at if fits else {name: array.astype(np.float64) for name, array in at.items()}


def prices_of(cost: Cost, meshes: Sequence[Mesh], sizes: Mapping[str, Any], fleet: Fleet) -> Prices:
    """Return what the messages and works of a cost take.

    Args:
        cost: in symbols.
        meshes: which may lack axes of the template.
        sizes: the value of each symbol, an array with one number for each mesh.
        fleet: of the hardware.
    """
    values = Values(sizes, len(meshes))
    messages: dict[Any, tuple[Any, tuple[Any, Any, Any]]] = {}
    works: dict[Any, Any] = {}
    for one in cost.received:
        key = _message_key(one)
        if key not in messages:
            messages[key] = _message(one, meshes, sizes, fleet)
    for one in cost.work:
        key = _work_key(one)
        if key not in works:
            works[key] = _work(one, meshes, values, fleet.hardware)
    rows: Any = np.array([works[_work_key(one)] for one in cost.work])
    received: Any = sum((messages[_message_key(one)][0] * one.count for one in cost.received), np.zeros(len(meshes)))
    return Prices(
        len(meshes),
        len(fleet.hardware.links),
        1 - fleet.hardware.efficiency.overlap,
        [messages[_message_key(one)][1] for one in cost.received],
        rows.reshape(-1, len(meshes)),
        received,
        values,
    )


def _columns(message: tuple[Any, Any, Any], columns: Sequence[int]) -> tuple[Any, Any, Any]:
    seconds, level, there = message
    there = None if there is None or there[columns].all() else there[columns]
    return seconds[columns], level[columns], there


def _message_key(one: Received) -> Any:
    return one.record.op, one.axes, one.parts, one.itemsize


def _message(one: Received, meshes: Sequence[Mesh], sizes: Mapping[str, Any], fleet: Fleet) -> tuple[Any, tuple[Any, Any, Any]]:
    """Return the bytes of a message, and its seconds, 0 where there is none, the level of its links, and where there is one."""
    routes = [fleet.route(mesh, one.axes, one.record.op) for mesh in meshes]
    waits = np.array([route.seconds if route else 0.0 for route in routes])
    rates = np.array([route.bandwidth if route else np.inf for route in routes])
    levels = np.array([route.level if route else 0 for route in routes])
    received = one.value(sizes) + np.zeros(len(routes))
    seconds = waits + np.floor(received) / rates
    there = seconds > 0
    return received, (seconds, levels, None if there.all() else there)


def _work_key(one: Work) -> Any:
    return one.flops, one.memory, one.dtype, one.axes


def _work(one: Work, meshes: Sequence[Mesh], values: Values, hardware: Hardware) -> Any:
    flops, moved = np.floor(values(one.flops)), np.floor(sum((values(part) for part in one.memory), np.zeros(len(meshes))))
    seconds = compute_seconds(hardware, flops if one.flops.coefficient else 0, one.dtype, moved)
    idle = [bool(one.axes) and mesh.extent(one.axes) == 1 for mesh in meshes]
    return np.where(idle, 0.0, seconds)
