"""Time: seconds of every node of a program on given hardware, by an alpha-beta model with a hierarchy of links and overlap.

    seconds of a collective   start + steps * latency + received bytes / bandwidth
    seconds of an op          launch + max(FLOPs / FLOP/s, bytes / memory bandwidth)

The collectives are rings: n - 1 steps among n ranks, twice as many for an all_reduce (Thakur, Rabenseifner, Gropp, "Optimization of
Collective Communication Operations in MPICH", 2005). Ranks are row-major with z nearest, so the ranks of a group may lie in one node
or in many; the slowest level that a ring crosses sets its latency and bandwidth. A node's links to the outside are shared by the rings
that pass through it: a ring with m of a node's R ranks is one of R/m, so it gets m times the bandwidth that each rank has when all
R send at once (Singh et al., "A 4D Hybrid Algorithm to Scale Parallel Training to Thousands of GPUs", arXiv 2305.13525, whose model
divides the bandwidth by the number of such rings), and no more than the links inside the node give.

A program runs as the runtime runs it (`overlap`): one stream computes, in order; a message starts once its operands exist and the
messages before it over the same level of links are through, and the stream waits at its first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from partir.collectives import split_axes
from partir.graph import collective_name, operands, tensor_of, tensors_of
from partir.hardware import Hardware, load_hardware
from partir.link_routes import link_level, route_of
from partir.mesh import Mesh
from partir.overlap import Turn, as_run
from partir.program import Program
from partir.records import Stage, message_of
from partir.work import is_work, node_bytes, node_flops

COMPUTE = "compute"


@dataclass(frozen=True)
class NodeTime:
    """When one node runs, and what it does.

    Args:
        name: in the graph of its stage.
        stage: ``"forward"`` or ``"backward"``.
        row: ``"compute"``, or the axes of the message, ``"z.x"``.
        start: seconds from the start of the step.
        seconds: that it takes.
        flops: floating-point operations.
        bytes: read and written, or received by a message.
    """

    name: str
    stage: Stage
    row: str
    start: float
    seconds: float
    flops: int
    bytes: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on every rank: ``forward + backward == compute + exposed``, but for rounding.

    Args:
        hardware: name of the profile.
        forward, backward: of each stage, from its first node to its last.
        compute: of all ops.
        communication: of all messages, by the axes of their groups; most of it may pass while the rank computes.
        exposed: that the rank waits for messages, or spends on sending instead of computing.
    """

    hardware: str
    forward: float
    backward: float
    compute: float
    communication: Mapping[str, float]
    exposed: float

    @property
    def seconds(self) -> float:
        """Of the step: forward and backward, without the optimizer."""
        return self.forward + self.backward

    def __str__(self) -> str:
        axes = ", ".join(f"{axis} {_text(seconds)}" for axis, seconds in self.communication.items())
        return (
            f"step on {self.hardware}: {_text(self.seconds)}, forward {_text(self.forward)}, backward {_text(self.backward)}\n"
            f"compute {_text(self.compute)}, waiting for messages {_text(self.exposed)}\n"
            f"messages by axis: {axes or 'none'}"
        )


def _text(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3f} ms"


def collective_seconds(hardware: Hardware, mesh: Mesh, axes: tuple[str, ...], op: str, received_bytes: Any) -> Any:
    """Return the seconds of a collective over a group of ranks, all its sister groups doing the same.

    Args:
        hardware: whose links.
        mesh: the ranks.
        axes: of the group, ``("z", "x")``.
        op: ``"all_gather"``, ...
        received_bytes: by one rank, in one message: a number, or an array, or a symbolic expression.

    >>> from partir.hardware import load_hardware
    >>> longhorn, mesh = load_hardware("longhorn-v100"), Mesh.parse((4, 4, 4))
    >>> [round(1e3 * collective_seconds(longhorn, mesh, (axis,), "all_gather", 1e6), 3) for axis in "xyz"]
    [0.37, 0.37, 0.034]
    """
    if mesh.extent(axes) == 1:
        return 0.0 * received_bytes
    route = route_of(hardware, mesh, axes, op)
    return route.seconds + received_bytes / route.bandwidth


def compute_seconds(hardware: Hardware, flops: Any, dtype: torch.dtype, memory_bytes: Any) -> Any:
    """Return the seconds of an op: the longer of arithmetic and memory traffic, besides its launch.

    Args:
        hardware: whose device.
        flops: floating-point operations: a number, or an array, or a symbolic expression.
        dtype: that they are done in.
        memory_bytes: read and written.

    Raises:
        HardwareError: the profile has no FLOP/s for the dtype.

    >>> from partir.hardware import load_hardware
    >>> compute_seconds(load_hardware("dgx-a100"), 2 * 4096**3, torch.bfloat16, 3 * 2 * 4096**2) < 0.00045
    True
    """
    memory = memory_bytes / (hardware.memory_bandwidth * hardware.efficiency.memory)
    if isinstance(flops, int) and flops == 0:
        return hardware.launch + memory
    arithmetic = flops / (hardware.flops_of(dtype) * hardware.efficiency.compute)
    longer = (arithmetic + memory + abs(arithmetic - memory)) / 2  # the maximum, of arrays and of symbols as well
    return hardware.launch + longer


def node_times(program: Program, hardware: str | Path | Hardware) -> tuple[NodeTime, ...]:
    """Return when every node of the forward and then of the backward graph runs, views and renamings left out.

    Args:
        program: what each rank runs.
        hardware: a profile, its name, or its path.

    Raises:
        HardwareError: there is no such profile, or it has no FLOP/s for a dtype of the program.
    """
    return tuple(time for clock in _stages(program, hardware) for time in clock.times)


def step_seconds(program: Program, hardware: str | Path | Hardware) -> StepTime:
    """Return the seconds of one step and its parts; see `node_times`."""
    profile = load_hardware(hardware)
    forward, *backward = _stages(program, profile)
    clocks = [forward, *backward]
    times = [time for clock in clocks for time in clock.times]
    rows: dict[str, float] = {}
    for time in times:
        rows[time.row] = rows.get(time.row, 0.0) + time.seconds
    compute = rows.pop(COMPUTE, 0.0)
    exposed = sum(clock.exposed for clock in clocks)
    backward_seconds = sum(clock.now - clock.began for clock in backward)
    return StepTime(profile.name, forward.now, backward_seconds, compute, dict(sorted(rows.items())), exposed)


def _stages(program: Program, hardware: str | Path | Hardware) -> list[Clock]:
    profile = load_hardware(hardware)
    stages: list[tuple[Stage, GraphModule | None]] = [("forward", program.forward), ("backward", program.backward)]
    clocks: list[Clock] = []
    for stage, graph_module in stages:
        if graph_module is not None:
            clocks.append(Clock(profile, program.mesh, stage, clocks[-1].now if clocks else 0.0))
            for turn in as_run(graph_module, program.mesh):
                _play(clocks[-1], turn)
    return clocks


class Clock:
    """Plays one stage against its streams: call `start`, `wait` and `compute` in the order in which a rank does them.

    Args:
        hardware: that it runs on.
        mesh: the ranks.
        stage: of the nodes.
        now: seconds of the step that have passed.
    """

    def __init__(self, hardware: Hardware, mesh: Mesh, stage: Stage, now: float) -> None:
        self.hardware, self.mesh = hardware, mesh
        self.stage: Stage = stage
        self.began = self.now = now
        self.exposed = 0.0
        self.times: list[NodeTime] = []
        self._link_free: dict[int, float] = {}
        self._arrival: dict[str, float] = {}

    def start(self, name: str, axis: str, op: str, num_bytes: int) -> None:
        """Start a message."""
        axes = split_axes(axis)
        seconds = float(collective_seconds(self.hardware, self.mesh, axes, op, num_bytes))
        level = link_level(self.hardware, self.mesh, axes)
        start = max(self.now, self._link_free.get(level, 0.0))
        self._link_free[level] = self._arrival[name] = start + seconds
        self.times.append(NodeTime(name, self.stage, axis, start, seconds, 0, num_bytes))
        self._pass(seconds * (1 - self.hardware.efficiency.overlap))

    def wait(self, name: str) -> None:
        """Wait for a message."""
        self._pass(self._arrival[name] - self.now)

    def compute(self, name: str, flops: int, dtype: torch.dtype, num_bytes: int) -> None:
        """Compute a node."""
        seconds = float(compute_seconds(self.hardware, flops, dtype, num_bytes))
        self.times.append(NodeTime(name, self.stage, COMPUTE, self.now, seconds, flops, num_bytes))
        self.now += seconds

    def _pass(self, seconds: float) -> None:
        """Let time go by without computing."""
        self.now += max(0.0, seconds)
        self.exposed += max(0.0, seconds)


def _play(clock: Clock, turn: Turn) -> None:
    """Let one node of a graph run."""
    node = turn.node
    if turn.kind == "start":
        axis, num_bytes = message_of(node, clock.mesh)
        clock.start(node.name, axis, collective_name(node), num_bytes)
    elif turn.kind == "wait":
        clock.wait(node.name)
    elif is_work(node):
        flops = node_flops(node)
        dtype = tensor_of(operands(node)[0]).dtype if flops else tensors_of(node)[0].dtype
        clock.compute(node.name, flops, dtype, node_bytes(node))
