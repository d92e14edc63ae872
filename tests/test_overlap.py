"""The order in which messages start: gradients leave as they are made, and do not keep the places of what is gathered next."""

from __future__ import annotations

import pytest
import torch

import partir
from partir.graph import collective_name
from partir.overlap import AHEAD, as_run
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
