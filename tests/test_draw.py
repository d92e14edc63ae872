"""The drawing of a plan is graphviz text in which every collective stands once, with its axis's colour and its bytes."""

from __future__ import annotations

import re

import partir
from partir.draw import COLOURS, MIXED
from tests.planned import meta_plan, mlp_plan


def source(plan: partir.Plan) -> str:
    return plan.dot().source


def test_every_collective_is_drawn_once_in_the_colour_of_its_axis() -> None:
    plan = meta_plan()
    text = source(plan)
    for record in plan.collectives:
        (node,) = re.findall(rf'^\s*"{record.stage} {record.node}" \[(.*)\]$', text, re.MULTILINE)
        assert f'fillcolor="{COLOURS.get(record.axis, MIXED)}"' in node
        assert f'label="{record.op} {record.axis}' in node


def test_edges_carry_the_bytes() -> None:
    plan = mlp_plan()
    text = source(plan)
    for record in plan.collectives:
        if record.op.endswith("_bucket"):
            assert rf"{record.op} {record.axis}\n{record.bytes:,} B" in text
            continue
        (edge,) = re.findall(rf'^\s*".*" -> "{record.stage} {record.node}" \[(.*)\]$', text, re.MULTILINE)
        assert f'label="{record.bytes:,} B"' in edge and COLOURS.get(record.axis, MIXED) in edge


def test_clusters_are_modules_and_the_backward_is_dashed() -> None:
    text = source(meta_plan())
    for stage in ("forward", "backward"):
        for name in ("blocks.0", "blocks.1", "token_embedding"):
            assert f'subgraph "cluster {stage} {name}" {{' in text
        assert f'subgraph "cluster {stage} blocks.0 blocks.0.attn" {{' in text
    assert "label=backward labelloc=t style=dashed" in text
    assert text.count("{") == text.count("}")


def test_parameters_values_and_gradients_are_drawn() -> None:
    text = source(mlp_plan())
    assert '"forward fc1.weight" [label="fc1.weight" shape=plaintext]' in text
    assert r'"forward linear" [label="linear\nf64[8@x.z, 64@y]"]' in text
    assert '"backward d_fc1.weight" [label="d_fc1.weight" shape=plaintext]' in text
    assert '"backward saved gelu" [label="gelu (saved)" shape=plaintext]' in text


def test_edges_join_nodes_that_are_drawn_and_two_drawings_are_identical() -> None:
    plan = meta_plan()
    text = source(plan)
    drawn = set(re.findall(r'^\s*"([^"]+)" \[', text, re.MULTILINE))
    ends = re.findall(r'^\s*"([^"]+)" -> "([^"]+)"', text, re.MULTILINE)
    assert len(ends) > len(plan.collectives)
    assert {end for pair in ends for end in pair} <= drawn
    assert text == source(plan) and text.isascii()


def test_a_mesh_of_one_rank_has_nothing_to_colour() -> None:
    text = source(mlp_plan((1, 1, 1)))
    assert "fillcolor" not in text and "0 bytes received" in text
