"""What a hardware profile holds: frozen values in SI units (seconds, bytes, FLOP/s)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from partir.errors import HardwareError


@dataclass(frozen=True)
class Pace:
    """How fast messages of one kind are.

    Args:
        latency: seconds of one step of a ring.
        bandwidth: bytes a second that one rank receives while all ranks of its unit do the same.
        start: seconds of one collective before its first step.
    """

    latency: float
    bandwidth: float
    start: float = 0.0


@dataclass(frozen=True)
class Link:
    """One level of links.

    Args:
        name: of the level, ``"node"``.
        ranks: consecutive ranks that it joins; None: all of them.
        pace: of every collective that has no pace of its own.
        collectives: paces by the name of a collective, ``"all_gather"``.
    """

    name: str
    ranks: int | None
    pace: Pace
    collectives: Mapping[str, Pace] = field(default_factory=dict[str, Pace])

    @property
    def latency(self) -> float:
        """Seconds of one step."""
        return self.pace.latency

    @property
    def bandwidth(self) -> float:
        """Bytes a second that one rank receives while all ranks of its unit do the same."""
        return self.pace.bandwidth

    def pace_of(self, op: str) -> Pace:
        """Return the pace of a collective."""
        return self.collectives.get(op, self.pace)


@dataclass(frozen=True)
class Efficiency:
    """What part of the rates is reached: 1 takes a datasheet at its word, and a time is then a lower bound.

    Args:
        compute: of the FLOP/s.
        memory: of the memory bandwidth.
        links: of the bandwidth of links.
        overlap: part of a message that passes while its rank computes; 0 where sending takes the processor that computes.
    """

    compute: float = 1.0
    memory: float = 1.0
    links: float = 1.0
    overlap: float = 1.0


@dataclass(frozen=True)
class Hardware:
    """A device and its links.

    Args:
        name: of the profile.
        sources: documents that its numbers are from.
        ranks_per_node: devices of a node.
        memory: bytes of a device.
        memory_bandwidth: bytes a second that a device reads and writes.
        launch: seconds of one op besides its work.
        flops: FLOP a second of matrix products, by dtype (``"bfloat16"``).
        links: levels, the nearest first; the last joins all ranks.
        efficiency: part of the rates that is reached.
    """

    name: str
    sources: tuple[str, ...]
    ranks_per_node: int
    memory: float
    memory_bandwidth: float
    launch: float
    flops: Mapping[str, float]
    links: tuple[Link, ...]
    efficiency: Efficiency = Efficiency()

    def flops_of(self, dtype: torch.dtype) -> float:
        """Return the FLOP/s of matrix products of a dtype.

        Raises:
            HardwareError: the profile does not say.
        """
        name = str(dtype).removeprefix("torch.")
        if name not in self.flops:
            known = ", ".join(self.flops)
            raise HardwareError(f"hardware {self.name}: flops.{name} is missing; it has {known}. Add it to a copy of the profile.")
        return self.flops[name]
