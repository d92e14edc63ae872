"""The order in which messages start: gradients leave as they are made, and do not keep the places of what is gathered next."""

from __future__ import annotations

import pytest
import torch

import partir
from partir.graph import collective_name
from partir.overlap import AHEAD, RESULTS_AHEAD, as_run
from partir.work import node_flops
from tests.planned import gpt, ids


@pytest.mark.parametrize("mesh", [(4, 1, 1), (2, 2, 1)])
def test_gradients_are_sent_while_the_backward_computes(mesh: tuple[int, ...]) -> None:
    program = partir.plan(gpt(num_layers=3, device="meta"), mesh, ids(), {"labels": ids()}).program
    assert program.backward is not None
    order = list(as_run(program.backward, program.mesh))
    sent = [i for i, node in enumerate(order) if node.meta.get("message") == "start" and collective_name(node) == "reduce_scatter"]
    last = max(i for i, node in enumerate(order) if "message" not in node.meta and node_flops(node))
    assert len(sent) > 3 * AHEAD
    assert sum(place < last for place in sent) >= 2 * len(sent) // 3


def test_an_order_is_made_of_the_same_nodes() -> None:
    plan = partir.plan(torch.nn.Linear(16, 32), (2, 2, 2), torch.empty(8, 16))
    assert plan.program.backward is not None
    computed = [node.name for node in as_run(plan.program.backward, plan.mesh) if node.meta.get("message") != "wait"]
    calls = [node.name for node in plan.program.backward.graph.nodes if node.op == "call_function"]
    assert sorted(computed) == sorted(calls)


def test_gradients_are_reduced_along_data_while_the_backward_computes() -> None:
    """Once for each parameter, after its reduce-scatter and of its result; most of them start before the last product."""
    plan = partir.plan(gpt(num_layers=2, device="meta"), (2, 2, 2, 1), ids(), {"labels": ids()})
    program, parameters = plan.program, [slot.name for slot in plan.program.inputs if slot.kind == "parameter"]
    assert program.backward is not None
    along_data = [c for c in plan.collectives if c.stage == "backward" and c.op == "all_reduce" and "data" in c.axis.split(".")]
    assert sorted(c.reason for c in along_data) == sorted(f"gradient of {name}" for name in parameters)
    order = list(as_run(program.backward, program.mesh))
    place = {node.name: number for number, node in enumerate(order)}
    matrices = [c for c in along_data if program.input(c.reason.removeprefix("gradient of ")).layout.dims[1:]]
    last = max(i for i, node in enumerate(order) if "message" not in node.meta and node_flops(node))
    assert sum(place[c.node] < last for c in matrices) >= len(matrices) * 2 // 3
    under_way = [sum({"start": 1, "wait": -1}.get(node.meta.get("message"), 0) for node in order[: n + 1]) for n in range(len(order))]
    assert max(under_way) <= AHEAD + RESULTS_AHEAD + 1 and under_way[-1] == 0  # one more may be needed at once
