"""How the messages of a group of ranks go over the levels of links: seconds before the first byte, and bytes a second after it.

Ranks are row-major with z nearest, so the ranks of a group may lie in one node or in many; the slowest level that a ring crosses sets
its latency and bandwidth (see `partir.timing` for the model and its sources).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from partir.hardware import Hardware, Pace
from partir.mesh import Mesh


@dataclass(frozen=True)
class Route:
    """One collective over one group, all its sister groups doing the same.

    Args:
        seconds: that pass whatever is sent.
        bandwidth: bytes a second that one rank receives.
        level: number of the slowest level of links that it crosses.
    """

    seconds: float
    bandwidth: float
    level: int


def route_of(hardware: Hardware, mesh: Mesh, axes: tuple[str, ...], op: str) -> Route:
    """Return how the messages of a collective go.

    Args:
        hardware: whose links.
        mesh: the ranks.
        axes: of the group, of more than one rank.
        op: ``"all_gather"``, ...
    """
    level = link_level(hardware, mesh, axes)
    pace = _pace(hardware, mesh, axes, op, level)
    steps = (2 if op == "all_reduce" else 1) * (mesh.extent(axes) - 1)
    return Route(pace.start + steps * pace.latency, pace.bandwidth * hardware.efficiency.links, level)


def _pace(hardware: Hardware, mesh: Mesh, axes: tuple[str, ...], op: str, level: int) -> Pace:
    """Return latency and bandwidth of a ring over a group: of the slowest level of links that it crosses."""
    slowest = hardware.links[level].pace_of(op)
    bandwidth = float("inf")
    for number, link in enumerate(hardware.links[: level + 1]):
        if number < level and ranks_together(mesh, axes, link.ranks) == 1:
            continue  # no two of its ranks share a unit of this level
        rings = ranks_together(mesh, axes, hardware.links[number - 1].ranks) if number else 1
        bandwidth = min(bandwidth, link.pace_of(op).bandwidth * rings)
    return Pace(slowest.latency, bandwidth, slowest.start)


def link_level(hardware: Hardware, mesh: Mesh, axes: tuple[str, ...]) -> int:
    """Return the number of the slowest level of links that groups over ``axes`` cross."""
    size = mesh.extent(axes)
    inside = [link.ranks is None or ranks_together(mesh, axes, link.ranks) == size for link in hardware.links]
    return inside.index(True)


@lru_cache(maxsize=2**16)
def ranks_together(mesh: Mesh, axes: tuple[str, ...], unit: int | None) -> int:
    """Return how many ranks of a group over ``axes`` share a unit of consecutive ranks, in the group that is scattered most."""
    strides = {name: mesh.extent(mesh.names[place + 1 :]) for place, name in enumerate(mesh.names)}
    offsets = np.zeros(1, dtype=np.int64)
    for axis in axes:
        offsets = (offsets[:, None] + strides[axis] * np.arange(mesh[axis])).ravel()
    if unit is None:
        return len(offsets)
    firsts = {0}
    for name in mesh.names:
        if name not in axes:
            firsts = {(first + step * strides[name]) % unit for first in firsts for step in range(min(mesh[name], unit))}
    return min(_fewest(offsets, first, unit) for first in firsts)


def _fewest(offsets: Any, first: int, unit: int) -> int:
    return int(np.unique((first + offsets) // unit, return_counts=True)[1].min())
