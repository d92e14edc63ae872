"""Measure a hardware profile on the machine at hand: every rank of a world at once, as a program runs.

    compute       products of square matrices, by dtype
    memory        a copy, read and written
    launch        an op on one element
    collectives   each kind as the runtime sends it, in groups of every size, fitted to start + steps * latency + bytes / bandwidth
    overlap       products while a message is under way, against both alone

All ranks measure at the same time, so that cores, memory and links that they share are shared in the figures as well.
"""

from __future__ import annotations

import itertools
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import multiprocessing
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from partir.errors import PartirError, RankError, first_line
from partir.hardware import Efficiency, Hardware, Link, hardware_text, parse_hardware
from partir.mesh import Mesh
from partir.runtime.fit_pace import Sample, fit_pace
from partir.runtime.groups import Group
from partir.runtime.session import Session
from partir.runtime.torch_dtensor import dist
from partir.runtime.transport import Call, Pending, Transport

FAMILIES = {
    "all_gather": ("all_gather", "all_gather_same", "all_gather_bucket"),
    "reduce_scatter": ("reduce_scatter", "reduce_scatter_bucket"),
    "all_reduce": ("all_reduce",),
    "all_to_all": ("all_to_all",),
    "broadcast": ("broadcast",),
    "reduce_to": ("reduce_to",),
}
BLOCK_BYTES = (1 << 10, 1 << 14, 1 << 17, 1 << 20)
DTYPES = {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32, torch.float64, torch.bfloat16, torch.float16)}
PRODUCT_SIDE = {"cpu": 512, "cuda": 8192}
COPY_BYTES = {"cpu": 1 << 24, "cuda": 1 << 30}


def calibrate(ranks: int, backend: str = "gloo", name: str = "measured", seconds: float = 0.2, timeout: float = 600) -> Hardware:
    """Start processes on this machine, measure with all of them, and return the profile.

    Args:
        ranks: processes, one a device.
        backend: "gloo" or "nccl".
        name: of the profile.
        seconds: about how long each figure is measured.
        timeout: seconds for all of it.

    Raises:
        PartirError: one rank has no links to measure.
        RankError: a process failed, or had not finished in time; the message says which.
    """
    _refuse_one(ranks)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "profile.toml"
        given = (ranks, backend, name, seconds, timeout, _free_port(), str(path))
        with _deaf_to_interrupts():
            context: Any = cast(Any, multiprocessing).spawn(_run_rank, given, ranks, join=False)
        deadline = time.monotonic() + timeout
        try:
            while not context.join(timeout=0.5):
                if time.monotonic() > deadline:
                    alive = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
                    raise RankError(f"calibrate: ranks {alive} of {ranks} had not finished after {timeout:g} s.")
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise RankError(f"calibrate: rank {error.error_index} of {ranks} failed: {str(error).strip()}") from None
        finally:
            for process in context.processes:
                process.kill()
        return parse_hardware(path.read_text(), str(path))


@contextmanager
def _deaf_to_interrupts() -> Generator[None]:
    """Start processes that ignore Ctrl-C, which the terminal sends to all: this process alone reports it, and ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def calibrate_world(name: str = "measured", seconds: float = 0.2) -> Hardware:
    """Measure as one rank of torch.distributed; every rank calls it at the same time, and each gets the same profile."""
    ranks, node = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())
    device = _device()
    stopwatch = Stopwatch(device, seconds)
    flops = {str(dtype).removeprefix("torch."): _flops(stopwatch, dtype) for dtype in DTYPES[device.type]}
    links = [_level("node", node, [(n, 1) for n in _divisors(node)], stopwatch)] if node > 1 or ranks == 1 else []
    if ranks > node:
        links.append(_level("network", None, [(n, node) for n in _divisors(ranks // node)], stopwatch))
    return Hardware(
        name=name,
        sources=(f"measured by partir calibrate: {_machine(ranks, node, device)}",),
        ranks_per_node=node,
        memory=_memory(device, node),
        memory_bandwidth=_memory_bandwidth(stopwatch),
        launch=_launch(stopwatch),
        flops=flops,
        links=(*links[:-1], Link(links[-1].name, None, links[-1].pace, links[-1].collectives)),
        efficiency=Efficiency(overlap=_overlap(stopwatch)),
    )


def join_world(backend: str, name: str, seconds: float, timeout: float) -> Hardware:
    """Join the world that torchrun has described in the environment, and measure as one of its ranks."""
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except ValueError as error:
        raise PartirError(f"calibrate: the environment is not what torchrun sets: {first_line(error)}") from None
    try:
        _refuse_one(dist.get_world_size())
        return calibrate_world(name, seconds)
    finally:
        dist.destroy_process_group()


def _refuse_one(ranks: int) -> None:
    if ranks < 2:
        raise PartirError(f"calibrate: {ranks} rank has no links to others, which are what is measured: give 2 or more.")


class Stopwatch:
    """Times work on all ranks at once.

    Args:
        device: of this rank.
        seconds: about how long one figure is measured.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.seconds = device, seconds

    def time(self, work: Callable[[], object]) -> float:
        """Return the mean seconds of one `work`, of the slowest rank; every rank does it equally often."""
        work()
        once = self._times(work, 2)
        return self._times(work, max(3, int(self.seconds / max(once, 1e-9))))

    def _times(self, work: Callable[[], object], count: int) -> float:
        dist.barrier()
        self._finish()
        start = time.perf_counter()
        for _ in range(count):
            work()
        self._finish()
        return self.slowest((time.perf_counter() - start) / count)

    def slowest(self, seconds: float) -> float:
        """Return the most that any rank took."""
        found = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found.item())

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _flops(stopwatch: Stopwatch, dtype: torch.dtype) -> float:
    side = PRODUCT_SIDE[stopwatch.device.type]
    a, b = (torch.randn(side, side, device=stopwatch.device).to(dtype) for _ in range(2))
    return 2.0 * side**3 / stopwatch.time(lambda: a @ b)


def _memory_bandwidth(stopwatch: Stopwatch) -> float:
    source = torch.ones(COPY_BYTES[stopwatch.device.type] // 4, device=stopwatch.device)
    target = torch.empty_like(source)
    return 2.0 * source.nbytes / stopwatch.time(lambda: target.copy_(source))


def _launch(stopwatch: Stopwatch) -> float:
    one = torch.ones(1, device=stopwatch.device)
    return stopwatch.time(lambda: one + one)


def _level(name: str, ranks: int | None, shapes: Sequence[tuple[int, int]], stopwatch: Stopwatch) -> Link:
    """Measure every kind of collective in groups of each (size, stride)."""
    samples: dict[str, list[Sample]] = {op: [] for op in FAMILIES}
    for size, stride in shapes:
        world = dist.get_world_size()
        session = Session(Mesh.parse((world // (size * stride), size, stride)), stopwatch.device, None)
        group = session.groups.over(("y",))
        for op, block in itertools.product(FAMILIES, BLOCK_BYTES):
            samples[op].append(_sample(op, block, group, session.transport, stopwatch))
    paces = {op: fit_pace(found) for op, found in samples.items()}
    each = {member: paces[op] for op, members in FAMILIES.items() for member in members}
    return Link(name, ranks, paces["all_gather"], each)


def _sample(op: str, block: int, group: Group, transport: Transport, stopwatch: Stopwatch) -> Sample:
    others = group.size - 1
    call = Call(op, "y", "calibration", op, counted=False)
    start = _starter(op, block, group, transport, call)
    seconds = stopwatch.time(lambda: transport.wait(start()))
    received = {"all_reduce": 2 * others * block, "broadcast": block}.get(op, others * block)
    return Sample((2 if op == "all_reduce" else 1) * others, received, seconds)


def _starter(op: str, block: int, group: Group, transport: Transport, call: Call) -> Callable[[], Pending]:
    one = torch.ones(block // 4, device=transport.device)
    rows = one.expand(group.size, -1).contiguous()
    starts: dict[str, Callable[[], Pending]] = {
        "all_gather": lambda: transport.gather_rows(one, group, call),
        "reduce_scatter": lambda: transport.scatter_sum(rows, group, call),
        "all_reduce": lambda: transport.reduce(rows.view(-1), group, "sum", call),
        "all_to_all": lambda: transport.exchange_rows(rows, group, call),
        "broadcast": lambda: transport.broadcast(one, group, 0, call),
        "reduce_to": lambda: transport.reduce_to(one, group, 0, call),
    }
    return starts[op]


def _overlap(stopwatch: Stopwatch) -> float:
    """Return the part of the shorter of message and products that passes at the same time, 0 to 1."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return 1.0
    session = Session(Mesh.parse((1, ranks, 1)), stopwatch.device, None)
    call = Call("all_gather", "y", "calibration", "overlap", counted=False)
    start = _starter("all_gather", BLOCK_BYTES[-1], session.groups.over(("y",)), session.transport, call)
    a = torch.randn(256, 256, device=stopwatch.device)
    message = stopwatch.time(lambda: session.transport.wait(start()))
    count = max(1, round(message / stopwatch.time(lambda: a @ a)))

    def products() -> None:
        for _ in range(count):
            a @ a  # pyright: ignore[reportUnusedExpression]

    def both() -> None:
        pending = start()
        products()
        session.transport.wait(pending)

    alone = stopwatch.time(products)
    saved = alone + message - stopwatch.time(both)
    return min(1.0, max(0.0, saved / min(alone, message)))


def _divisors(number: int) -> list[int]:
    return [n for n in range(2, number + 1) if number % n == 0] or [1]


def _device() -> torch.device:
    if torch.cuda.is_available() and "nccl" in str(dist.get_backend_config()):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK") or dist.get_rank()))
    return torch.device("cpu")


def _memory(device: torch.device, node: int) -> float:
    if device.type == "cuda":
        return float(cast(Any, torch.cuda).get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // node)


def _machine(ranks: int, node: int, device: torch.device) -> str:
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} cores of {platform.machine()}"
    threads = f"{torch.get_num_threads()} threads a rank" if device.type == "cpu" else "one device a rank"
    return f"{ranks} ranks, {node} a node, {dist.get_backend()}, {kind}, {threads}, torch {torch.__version__}"


def _run_rank(
    rank: int, ranks: int, backend: str, name: str, seconds: float, timeout: float, port: int, path: str
) -> None:
    """Be one of the processes of `calibrate`; rank 0 writes the profile."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ.update(environment)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
    hardware = calibrate_world(name, seconds)
    if rank == 0:
        Path(path).write_text(hardware_text(hardware))
    dist.barrier()
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
