"""What a plan says of one tensor, and its one-screen summary."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import nn

import partir
from partir.block_places import dim_formula, slices
from partir.blocks import is_owner, shard
from partir.dims import Dim
from partir.errors import PartirError, UnknownNameError
from partir.layout import Layout
from partir.mesh import Mesh
from tests.planned import MLP, gpt_plan, mlp_plan

planned = functools.cache(mlp_plan)

FC1 = """\
fc1.weight: parameter f64[64@y.x, 16@z] on mesh (x=2, y=2, z=2)
whole [64, 16], 8,192 bytes; on each rank [16, 8], 1,024 bytes (1/8)
block jil, direction x, state -
first used at planned.py:LINE
why: its first use, linear, reads it as f64[64@y, 16@z] ~x; split further along x
read by
  linear  as f64[64@y, 16@z] ~x
moves 2,048 bytes to each rank
  forward   all_gather      x  1,024  fc1.weight for linear
  backward  reduce_scatter  x  1,024  gradient of fc1.weight
gradient: f64[64@y.x, 16@z]
blocks, by rank
  (i,j,l)  dim 0  dim 1
  (0,0,0)  0:16   0:8
  (0,0,1)  0:16   8:16
  (0,1,0)  32:48  0:8
  (0,1,1)  32:48  8:16
  (1,0,0)  16:32  0:8
  (1,0,1)  16:32  8:16
  (1,1,0)  48:64  0:8
  (1,1,1)  48:64  8:16
"""


def test_a_parameter_is_explained() -> None:
    plan = planned()
    assert re.sub(r"planned\.py:\d+", "planned.py:LINE", plan.explain("fc1.weight")) == FC1
    assert [c.bytes for c in plan.collectives if "fc1.weight" in c.reason] == [1024, 1024]


def test_a_value_is_explained_by_its_own_name_and_by_its_module() -> None:
    plan = planned()
    text, by_module = plan.explain("linear"), plan.explain("fc1")
    assert by_module.replace("asked for as fc1\n", "") == text
    assert "linear: value f64[8@x.z, 64@y] on mesh (x=2, y=2, z=2)\n" in text
    assert "block ilj, direction z, state y\n" in text and "\nwhy: the law in state y\n" in text
    assert re.search(r"^computed by aten\.linear at planned\.py:\d+ \(fc1\)$", text, re.MULTILINE)
    assert "\nread by\n  gelu  as f64[8@x.z, 64@y]\n" in text
    moved = re.findall(r"^  (forward|backward) +(\w+) +z +([\d,]+)  (?:result|gradient) of linear$", text, re.MULTILINE)
    assert moved == [("forward", "reduce_scatter", "512"), ("backward", "all_gather", "512")]
    assert "\nwhy: blocks stay where linear has them\n" in plan.explain("gelu")


def test_inputs_outputs_and_what_has_no_gradient() -> None:
    plan = planned()
    assert "\nwhy: every rank is given it whole\n" in plan.explain("x") and "\ngradient: none\n" in plan.explain("x")
    assert "(1/1), held 8 times\n" in plan.explain("x")
    output = plan.explain("output[0]")
    assert "\nthe value linear_1\nwhy: it leaves whole on every rank: outputs='auto'\n" in output
    cost = sum(c.bytes for c in plan.collectives if c.reason == "output of linear_1")
    assert cost and f"\nmoves {cost:,} bytes to each rank\n" in output


def test_pins_pads_and_copies_are_reasons() -> None:
    pinned = mlp_plan(pin={"fc1.w*": "f[out, in@x.y.z]", "linear": "f[m@x.y, n@z]"})
    assert "\nwhy: pinned by 'fc1.w*'\n" in pinned.explain("fc1.weight") and "\nwhy: pinned by 'linear'\n" in pinned.explain("linear")
    head = nn.Sequential(nn.Linear(64, 37), nn.Linear(37, 2))
    odd = partir.plan(head, (2, 4, 1), torch.empty(6, 64))
    assert "\nnote: 1.weight: no dim of f32[2@z.x, 37] is divisible by y: held 4 times\n" in odd.explain("1.weight")
    assert "a dim of 37 is padded to 40: 8.1% more work along it" in odd.explain("linear")


def test_a_name_that_is_no_text_is_told() -> None:
    with pytest.raises(PartirError, match=r"explain\(3\): a tensor is called by a text, not by int: plan.layouts lists the names"):
        planned().explain(3)  # pyright: ignore[reportArgumentType]


def test_a_fused_bias_a_bucket_a_tied_weight_and_a_result_of_several() -> None:
    plan = gpt_plan((2, 2, 2))
    bias = plan.explain("blocks.0.attn.qkv.bias")
    members = [name for name in plan.document.origin.parameters if name.startswith("blocks.0.") and plan.layouts[name].shape[1:] == ()]
    assert f"vectors of blocks.0, with {len(members) - 1} others\n" in bias
    assert "  (0,0,1)  60:72, 96:102\n" in bias
    assert plan.explain("head.weight").count("token_embedding.weight") >= 2 and "asked for as head.weight" in plan.explain("head.weight")
    assert "\nwhy: result 0 of chunk\n" in plan.explain("getitem")
    assert "sum over h in layer_norm\n" in plan.explain("layer_norm")


def test_every_collective_is_explained_by_a_tensor() -> None:
    document = gpt_plan((2, 2, 2)).document
    names = {tensor.name for tensor in document}
    for collective in document.collectives:
        assert collective.tensors and set(collective.tensors) <= names, collective


@pytest.mark.parametrize("text", ["(3*8@y)@x", "24@x.y", "(2@x*12@y)", "(4*6@z)@y.x", "24"])
def test_slices_are_the_blocks_that_ranks_hold(text: str) -> None:
    mesh, dim = Mesh.parse((2, 2, 3)), Dim.parse(text)
    for rank in range(mesh.size):
        held = shard(torch.arange(24), Layout("i64", (dim,)), mesh, rank).tolist()
        assert [index for start, stop in slices(dim, mesh, rank) for index in range(start, stop)] == held
        place = dict(zip("ijl", mesh.coordinate(rank).values()))
        (formula,) = dim_formula(dim, mesh)
        if ":" in formula and "as" not in formula and formula != "0:24":
            start, size = _value(formula[1 : formula.index(" : +")], place), int(formula.rpartition("+")[2].rstrip("]"))
            assert held == list(range(start, start + size))


def _value(formula: str, place: dict[str, int]) -> int:
    """Return ``(i*2 + j)*6`` at a place."""
    inner, _, size = formula.rpartition("*")
    number = 0
    for term in inner.strip("()").split(" + "):
        letter, _, times = term.partition("*")
        number += place[letter] * int(times or 1)
    return number * int(size)


def test_a_large_mesh_shows_the_first_ranks_and_the_formula() -> None:
    x = torch.empty(64, 64)
    plan = partir.plan(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), (4, 4, 4), x)
    text = plan.explain("0.weight")
    assert text.count("\n  (0,") == 16 and "\n  (1," not in text
    assert "\n  ... and 48 more; rank (i,j,l) holds\n  dim 0: [(j*4 + i)*4 : +4]\n  dim 1: [l*16 : +16]\n" in text


def test_a_diagonal_says_which_ranks_hold_nothing() -> None:
    plan = mlp_plan(vectors="diagonal")
    text, layout = plan.explain("fc1.bias"), plan.layouts["fc1.bias"]
    for rank in range(8):
        place = ",".join(map(str, plan.mesh.coordinate(rank).values()))
        assert (f"({place})  nothing\n" in text) == (not is_owner(layout, plan.mesh, rank))


def test_an_unknown_name_has_the_closest() -> None:
    for each in (planned(), planned().document):
        with pytest.raises(UnknownNameError) as error:
            each.explain("fc1.wait")
        assert str(error.value).startswith("no parameter, input, value or output is called 'fc1.wait'. Closest: fc1.weight, ")
        assert isinstance(error.value, PartirError)


def test_the_summary_has_parameters_totals_and_the_costliest() -> None:
    plan = gpt_plan((2, 2, 2))
    text = str(plan)
    lines = text.splitlines()
    assert text.startswith("GPT on mesh (x=2, y=2, z=2), 8 ranks\nmemory=low  vectors=balanced  outputs=auto\nparameters: ")
    assert len(lines) <= 50 and max(map(len, lines)) <= 120 and text.isascii()
    assert re.search(r"^  blocks\.0\.mlp\.fc1\.weight +f64\[192@y\.x, 48@z\] +jil +x +9,216$", text, re.MULTILINE)
    axes = next(line for line in lines if line.startswith("bytes received by each rank")).split()[5:]
    for op in {c.op for c in plan.collectives}:
        row = re.findall(rf"^  {op} +(.*)$", text, re.MULTILINE)[0].split()
        moved = [plan.bytes(op=op, axis=None if axis == "all" else axis) for axis in axes]
        assert row == [f"{number:,}" if number else "-" for number in moved]
    assert re.search(rf"^  all \({len(plan.collectives)} collectives\) .* {plan.bytes():,}$", text, re.MULTILINE)
    worst = max(c.bytes for c in plan.collectives)
    shown = text.partition("\ncostliest")[2]
    assert f"{worst:,}" in shown and "gpt.py:" in shown
    assert lines[-1].startswith("plan.report() has every value and collective")


def test_the_summary_shows_some_notes_and_the_number_of_the_rest() -> None:
    plan = partir.plan(nn.Sequential(*(nn.Linear(37, 37) for _ in range(3))), (2, 4, 1), torch.empty(6, 37))
    notes = str(plan).partition("\nnotes\n")[2].splitlines()
    assert len(plan.notes) > 3
    assert [note.strip()[:100] for note in notes[:3]] == [note[:100] for note in sorted(plan.notes, key=lambda n: "padded to" not in n)[:3]]
    assert notes[3] == f"  ... and {len(plan.notes) - 3} more: plan.notes"


def test_a_model_without_layers_or_traffic_prints_too() -> None:
    text = str(partir.plan(MLP(), (1, 1, 1), torch.empty(8, 16)))
    assert "nothing moves" in text and "costliest" not in text and "notes" not in text.splitlines()
