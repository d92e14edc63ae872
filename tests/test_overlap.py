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
    sent = [i for i, turn in enumerate(order) if turn.kind == "start" and collective_name(turn.node) == "reduce_scatter"]
    last = max(i for i, turn in enumerate(order) if turn.kind == "call" and node_flops(turn.node))
    assert len(sent) > 3 * AHEAD
    assert sum(place < last for place in sent) >= 2 * len(sent) // 3


def test_an_order_is_made_of_the_same_nodes() -> None:
    plan = partir.plan(torch.nn.Linear(16, 32), (2, 2, 2), torch.empty(8, 16))
    assert plan.program.backward is not None
    computed = [turn.node.name for turn in as_run(plan.program.backward, plan.mesh) if turn.kind != "wait"]
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
    place = {turn.node.name: number for number, turn in enumerate(order) if turn.kind != "wait"}
    matrices = [c for c in along_data if program.input(c.reason.removeprefix("gradient of ")).layout.dims[1:]]
    last = max(i for i, turn in enumerate(order) if turn.kind == "call" and node_flops(turn.node))
    assert sum(place[c.node] < last for c in matrices) >= len(matrices) * 2 // 3
    steps = [{"start": 1, "wait": -1}.get(turn.kind, 0) for turn in order]
    under_way = [sum(steps[: n + 1]) for n in range(len(steps))]
    assert max(under_way) <= AHEAD + RESULTS_AHEAD + 1 and under_way[-1] == 0  # one more may be needed at once
