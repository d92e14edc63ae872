"""Predicted time: the model against hand-computed values, brute force, and the order in which the runtime runs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import partir
from partir.errors import HardwareError
from partir.hardware import Efficiency, Hardware, Link, Pace, load_hardware
from partir.link_routes import link_level, ranks_together
from partir.mesh import Mesh
from partir.overlap import as_run
from partir.timing import COMPUTE, NodeTime, collective_seconds, compute_seconds, node_times, step_seconds
from tests.planned import gpt_plan, mlp_plan

NODE, NETWORK = Pace(1e-6, 1e10, 2e-6), Pace(1e-5, 1e9, 2e-6)
TOY = Hardware(
    name="toy",
    sources=("a test",),
    ranks_per_node=4,
    memory=1e9,
    memory_bandwidth=1e11,
    launch=1e-6,
    flops={"float32": 1e12, "float64": 5e11},
    links=(Link("node", 4, NODE), Link("network", None, NETWORK, {"all_to_all": Pace(1e-5, 5e8, 0.0)})),
)


def test_a_ring_in_a_node_and_one_across() -> None:
    mesh = Mesh.parse((2, 2, 4))  # z is a node, x and y cross
    assert collective_seconds(TOY, mesh, ("z",), "all_gather", 3e6) == pytest.approx(2e-6 + 3 * 1e-6 + 3e6 / 1e10)
    assert collective_seconds(TOY, mesh, ("y",), "all_gather", 3e6) == pytest.approx(2e-6 + 1 * 1e-5 + 3e6 / 1e9)
    assert collective_seconds(TOY, mesh, ("z",), "all_reduce", 3e6) == pytest.approx(2e-6 + 6 * 1e-6 + 3e6 / 1e10)
    assert collective_seconds(TOY, mesh, ("y",), "all_to_all", 3e6) == pytest.approx(1e-5 + 3e6 / 5e8)
    assert collective_seconds(TOY, Mesh.parse((1, 16, 1)), ("x",), "all_gather", 3e6) == 0


def test_rings_that_share_the_links_of_a_node() -> None:
    """A ring with 2 of a node's 4 ranks is one of 2 through it, one with all 4 has the links for itself."""
    two, four = Mesh.parse((2, 4, 2)), Mesh.parse((2, 2, 4))
    assert collective_seconds(TOY, two, ("y", "z"), "all_gather", 8e6) == pytest.approx(2e-6 + 7e-5 + 8e6 / 4e9)  # (y, z) are 8 in a row
    assert collective_seconds(TOY, two, ("x", "z"), "all_gather", 8e6) == pytest.approx(2e-6 + 3e-5 + 8e6 / 2e9)
    assert collective_seconds(TOY, four, ("x", "y", "z"), "all_gather", 8e6) == pytest.approx(2e-6 + 15e-5 + 8e6 / 4e9)
    slow_node = dataclasses.replace(TOY, links=(Link("node", 4, Pace(1e-6, 3e9)), TOY.links[1]))
    assert collective_seconds(slow_node, four, ("x", "y", "z"), "all_gather", 3e6) == pytest.approx(2e-6 + 15e-5 + 3e6 / 3e9)


@pytest.mark.parametrize("sizes", [(2, 2, 4), (3, 2, 2), (2, 6, 1), (1, 3, 4), (2, 2, 3, 2)])
@pytest.mark.parametrize("unit", [2, 3, 4, 8])
def test_ranks_that_share_a_unit_by_brute_force(sizes: tuple[int, ...], unit: int) -> None:
    mesh = Mesh.parse(sizes)
    for count in (1, 2, 3):
        for axes in itertools.combinations(mesh.names, count):
            shared = [[sum(other // unit == rank // unit for other in group) for rank in group] for group in mesh.groups(axes)]
            assert ranks_together(mesh, axes, unit) == min(map(min, shared)), axes


def test_arrays_are_taken() -> None:
    sizes = np.array([1e3, 1e6])
    mesh = Mesh.parse((2, 2, 4))
    seconds = collective_seconds(TOY, mesh, ("y",), "all_gather", sizes)
    assert list(seconds) == [collective_seconds(TOY, mesh, ("y",), "all_gather", size) for size in sizes]
    both = compute_seconds(TOY, np.array([1e9, 1e6]), torch.float32, np.array([1e6, 1e9]))
    assert both == pytest.approx([1e-6 + 1e-3, 1e-6 + 1e-2])


def test_roofline_and_efficiency() -> None:
    assert compute_seconds(TOY, 10**9, torch.float64, 8) == pytest.approx(1e-6 + 2e-3)
    assert compute_seconds(TOY, 0, torch.int64, 10**6) == pytest.approx(1e-6 + 1e-5)  # no FLOP/s for int64 needed
    half = dataclasses.replace(TOY, efficiency=Efficiency(compute=0.5, memory=0.25, links=0.5))
    assert compute_seconds(half, 10**9, torch.float64, 8) == pytest.approx(1e-6 + 4e-3)
    assert compute_seconds(half, 0, torch.float32, 10**6) == pytest.approx(1e-6 + 4e-5)
    assert collective_seconds(half, Mesh.parse((2, 2, 4)), ("z",), "all_gather", 3e6) == pytest.approx(2e-6 + 3e-6 + 6e-4)
    with pytest.raises(HardwareError, match="hardware toy: flops.bfloat16 is missing; it has float32, float64."):
        compute_seconds(TOY, 1, torch.bfloat16, 0)


def test_one_linear_by_hand() -> None:
    """x gathers the weight, y the rows, z sums: three messages and one product, with nothing to hide behind."""
    linear = nn.Linear(64, 32, bias=False)
    pin = {"input": "f[n@x.y, k@z]"}
    with torch.no_grad():
        plan = partir.plan(linear, (2, 2, 2), torch.empty(16, 64), outputs="sharded", pin=pin)
    # local: input [4, 32] -> [8, 32], weight [8, 32] -> [16, 32], product [8, 16] -> [4, 16]
    gathers = [512 / 2e9 + 1.2e-5, 1024 / 1e9 + 1.2e-5]  # 2 of y's rings pass a node's links, and 4 of x's
    gathers[0] = 512 / 1e10 + 3e-6  # y and z are one node
    product = 1e-6 + max(2 * 8 * 32 * 16 / 1e12, 4 * (8 * 32 + 16 * 32 + 8 * 16) / 1e11)
    scatter = 256 / 1e10 + 3e-6
    time = plan.time(TOY)
    assert time.seconds == time.forward == pytest.approx(max(gathers) + product + scatter)
    assert time.communication == pytest.approx({"x": gathers[1], "y": gathers[0], "z": scatter})
    assert time.compute == pytest.approx(product) and time.exposed == pytest.approx(max(gathers) + scatter)


def test_messages_of_one_level_queue() -> None:
    times = node_times(gpt_plan((2, 2, 2)).program, TOY)
    for level in (0, 1):
        taken = [t for t in times if t.row != COMPUTE and _level(t) == level]
        assert len(taken) > 10 and not _overlapping(taken)
        assert _overlapping([dataclasses.replace(t, start=0.0) for t in taken])  # what the check would see
    assert not _overlapping([t for t in times if t.row == COMPUTE])


def _level(time: NodeTime) -> int:
    return link_level(TOY, Mesh.parse((2, 2, 2)), tuple(time.row.split(".")))


def _overlapping(times: list[NodeTime]) -> bool:
    ordered = sorted(times, key=lambda time: time.start)
    return any(later.start < earlier.start + earlier.seconds * (1 - 1e-9) for earlier, later in itertools.pairwise(ordered))


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 1, 1), (2, 4, 1), (2, 2, 2, 2)])
def test_parts_add_up(sizes: tuple[int, ...]) -> None:
    program = (gpt_plan if sizes == (2, 2, 2) else mlp_plan)(sizes).program
    hidden, open_ = (dataclasses.replace(TOY, efficiency=Efficiency(overlap=part)) for part in (1.0, 0.0))
    for hardware in (hidden, open_):
        time = step_seconds(program, hardware)
        assert time.seconds == pytest.approx(time.compute + time.exposed)
        assert time.exposed <= sum(time.communication.values()) * (1 + 1e-9)
    none = step_seconds(program, open_)
    assert none.exposed == pytest.approx(sum(none.communication.values()))
    if sizes != (1, 1, 1):
        assert step_seconds(program, hidden).seconds < none.seconds


def test_bytes_and_flops_are_those_of_the_program() -> None:
    plan = mlp_plan((2, 2, 2))
    times = node_times(plan.program, TOY)
    assert sum(t.bytes for t in times if t.row != COMPUTE) == plan.bytes()
    whole, x = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).double(), torch.randn(8, 16).double()
    with FlopCounterMode(display=False) as counter:
        whole(x).sum().backward()
    # x needs no gradient; each of the 8 ranks does an eighth
    assert 8 * sum(t.flops for t in times) == counter.get_total_flops() > 0


def test_attention_on_the_cpu_is_counted_as_on_the_gpu() -> None:
    """Torch's table is not public by name: this says when it moves, or when it learns the CPU's attention."""
    aten = torch.ops.aten
    assert aten.mm in flop_registry and aten._scaled_dot_product_flash_attention in flop_registry
    assert aten._scaled_dot_product_flash_attention_for_cpu not in flop_registry
    products = [t for t in node_times(gpt_plan((2, 2, 2)).program, TOY) if "attention" in t.name and t.flops]
    batch, heads, tokens, size = 6, 6, 4, 4  # of one rank: rows over x and z, heads over y
    assert [t.flops for t in products] == [4 * batch * heads * tokens**2 * size, 10 * batch * heads * tokens**2 * size]


def test_more_of_anything_is_no_slower() -> None:
    program = gpt_plan((2, 2, 2)).program
    base = step_seconds(program, TOY)
    faster = [
        dataclasses.replace(TOY, launch=0.0),
        dataclasses.replace(TOY, memory_bandwidth=2e11),
        dataclasses.replace(TOY, links=(TOY.links[0], Link("network", None, Pace(1e-5, 2e9, 2e-6)))),
        dataclasses.replace(TOY, links=(Link("node", None, NODE),)),
    ]
    assert all(step_seconds(program, hardware).seconds < base.seconds for hardware in faster)


def test_the_record_prints() -> None:
    text = str(gpt_plan((2, 2, 2)).time("dgx-h100"))
    assert text.splitlines()[0].startswith("step on dgx-h100: ") and "messages by axis: x " in text
    assert "none" in str(mlp_plan((1, 1, 1)).time())
    with pytest.raises(HardwareError, match="neither a shipped profile"):
        gpt_plan((2, 2, 2)).time("abacus")


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """This process is rank 0 of 8; the others do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("eight_ranks")
def test_the_order_is_the_runtime_s() -> None:
    from partir.runtime.bind_collectives import bind_collectives
    from partir.runtime.groups import Groups
    from partir.runtime.transport import Transport

    program = gpt_plan((2, 2, 2)).program
    no_failures: Any = None
    transport = Transport(0, torch.device("cpu"), no_failures)
    for stage, graph in (("forward", program.forward), ("backward", program.backward)):
        assert graph is not None
        bound = bind_collectives(graph, stage, Groups(program.mesh, torch.device("cpu")), transport)
        ran = [_step(node) for node in bound.graph.nodes if node.op == "call_function"]
        timed = [({"call": ""}.get(turn.kind, turn.kind), turn.node.name) for turn in as_run(graph, program.mesh)]
        assert [s for s in timed if s] == [s for s in ran if s]
        assert any(now[0] == "start" and then != ("wait", now[1]) for now, then in itertools.pairwise(timed))


def _step(node: torch.fx.Node) -> tuple[str, str]:
    """A start and a wait by the name of their collective, another call by its own."""
    message = str(node.meta.get("message", ""))
    name = node.name.removesuffix("_start")
    if message == "wait" and node.all_input_nodes[0].meta.get("message") == "start":
        name = node.all_input_nodes[0].name.removesuffix("_start")
    return message, name


def test_shipped_profiles_time_a_model() -> None:
    plan = gpt_plan((2, 2, 2))
    seconds = {name: plan.time(load_hardware(name)).compute for name in ("longhorn-v100", "dgx-a100", "dgx-h100", "mi250x-node")}
    assert seconds["longhorn-v100"] > seconds["dgx-h100"]
