"""Chains of collectives between layouts: right on blocks, right transposed, and the cheapest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from partir.blocks import gather, shard
from partir.collectives import apply, cotangent, lockstep
from partir.collectives.traffic import received_bytes
from partir.dims import Dim, Part
from partir.errors import LayoutError
from partir.layout import Layout
from partir.mesh import Mesh
from partir.relayout import Chain, relayout

CUBE = Mesh.parse((2, 2, 2))


@st.composite
def two_layouts(draw: st.DrawFn) -> tuple[Mesh, Layout, Layout]:
    """Draw a mesh and two layouts of one tensor `[6*12, 12]`, each axis of any type in either."""
    mesh = Mesh.parse(tuple(draw(st.sampled_from([1, 2, 3])) for _ in range(3)))
    return mesh, draw(layouts(mesh)), draw(layouts(mesh))


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh) -> Layout:
    places: dict[str, list[str]] = {place: [] for place in ("a", "b", "c", "flat", "P", "R", "I")}
    for axis in draw(st.permutations(["x", "y", "z"])):
        places[draw(st.sampled_from(list(places)))].append(axis)
    dims = (
        Dim((Part(6, tuple(places["a"])), Part(12, tuple(places["b"]))), tuple(places["flat"])),
        Dim((Part(12, tuple(places["c"])),)),
    )
    layout = Layout("f64", dims, tuple((axis, "sum") for axis in places["P"]), tuple(places["R"]))
    try:
        layout.local_shape(mesh)
    except LayoutError:
        assume(False)
    # Where the first sub-dim divides, a flat split is a split of that sub-dim, and is written so.
    assume(not places["flat"] or dims[0].parts[0].size // mesh.extent(places["a"]) % mesh.extent(places["flat"][:1]) > 0)
    return layout.strip(mesh)


def draw_blocks(layout: Layout, mesh: Mesh) -> list[Tensor]:
    """Blocks of a layout: the addends of a pending sum differ along its axes."""
    axes = tuple(axis for axis, _ in layout.pending)
    generator = torch.Generator().manual_seed(0)
    addends = [torch.randn(layout.shape, dtype=torch.float64, generator=generator) for _ in range(mesh.extent(axes))]
    settled = replace(layout, pending=())
    return [shard(addends[mesh.index(rank, axes)], settled, mesh, rank).clone() for rank in range(mesh.size)]


def transposed(op: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The backward of each collective, from the table of the design."""
    if op == "slice":
        varied = arguments.get("varied", False)
        where = {name: value for name, value in arguments.items() if name != "varied"}
        return ("zero_pad" if varied else "all_gather_same"), where
    if op == "once":
        return ("once", arguments) if arguments.get("varied", True) else ("settle", {"axis": arguments["axis"]})
    if op == "all_to_all":
        ends = {"src": arguments["dst"], "dst": arguments["src"], "axis": arguments["axis"]}
        return op, ends | {"src_blocks": arguments.get("dst_blocks", 1), "dst_blocks": arguments.get("src_blocks", 1)}
    extra = {"all_gather_same": {}, "zero_pad": {"varied": True}, "settle": {"varied": False}}.get(op, {})
    partner = {
        "all_gather": "reduce_scatter",
        "reduce_scatter": "all_gather",
        "all_gather_same": "slice",
        "zero_pad": "slice",
        "all_reduce": "spread",
        "spread": "all_reduce",
        "settle": "once",
    }[op]
    return partner, arguments | extra


def hold_the_same(one: Layout, other: Layout, mesh: Mesh) -> bool:
    """Equal, or two names of the same blocks: a sub-dim split to single elements makes `(6@x.z*12@y)` the blocks of `72@x.z.y`."""
    index = torch.arange(72 * 12).view(72, 12)
    types = replace(one, dims=other.dims) == other
    ranks = range(mesh.size)
    same = types and all(torch.equal(shard(index, split(one), mesh, r), shard(index, split(other), mesh, r)) for r in ranks)
    assert same == (one.canonical(mesh) == other.canonical(mesh)), f"{one} and {other} on {mesh}"
    return same


def split(layout: Layout) -> Layout:
    """The dims of a layout alone."""
    return Layout("i64", layout.dims)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(two_layouts())
def test_chain_keeps_the_tensor_and_its_transpose_the_gradient(case: tuple[Mesh, Layout, Layout]) -> None:
    mesh, source, target = case
    chain = relayout(source, target, mesh)
    blocks, held = draw_blocks(source, mesh), source
    whole = gather(blocks, source, mesh)
    for step in chain.steps:
        assert hold_the_same(apply(step.op, held, mesh, **step.kwargs).strip(mesh), step.result, mesh), f"{source} -> {target}: {step}"
        blocks, held = lockstep.run(step.op, blocks, mesh, **step.kwargs), step.result
    assert hold_the_same(held, target, mesh)
    torch.testing.assert_close(gather(blocks, target, mesh), whole, rtol=1e-12, atol=1e-12)
    if not target.pending:
        for rank, block in enumerate(blocks):
            torch.testing.assert_close(block, shard(whole, target, mesh, rank), rtol=1e-12, atol=1e-12)

    gradients, held = draw_blocks(cotangent(target), mesh), cotangent(target)
    pull = gather(gradients, held, mesh)
    layouts_before = [source, *(step.result for step in chain.steps[:-1])]
    for step, before in zip(reversed(chain.steps), reversed(layouts_before)):
        op, arguments = transposed(step.op, dict(step.kwargs))
        after, held = apply(op, held, mesh, **arguments).strip(mesh), cotangent(before)
        assert hold_the_same(after, held, mesh), f"{source} -> {target}: transposed {step}"
        gradients = lockstep.run(op, gradients, mesh, **arguments)
    torch.testing.assert_close(gather(gradients, held, mesh), pull, rtol=1e-12, atol=1e-12)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(two_layouts())
def test_bytes_are_those_of_the_collectives(case: tuple[Mesh, Layout, Layout]) -> None:
    """Forward and backward; an all-reduce is counted without the padding of its chunks."""
    mesh, source, target = case
    chain = relayout(source, target, mesh)
    forward = backward = slack = 0.0
    held = source
    for step in chain.steps:
        size, (op, _) = mesh.extent(step.kwargs["axis"].split(".")), transposed(step.op, dict(step.kwargs))
        forward += received_bytes(step.op, held.local_shape(mesh), torch.float64, size)
        backward += received_bytes(op, step.result.local_shape(mesh), torch.float64, size)
        slack += 2 * (size - 1) * 8 * (step.op in ("all_reduce", "spread"))
        held = step.result
    assert chain.forward_bytes - 1e-6 <= forward <= chain.forward_bytes + slack + 1e-6
    assert chain.backward_bytes - 1e-6 <= backward <= chain.backward_bytes + slack + 1e-6


def shown(chain: Chain) -> list[str]:
    return [str(step) for step in chain.steps]


@pytest.mark.parametrize(
    "source, target, steps",
    [
        ("f32[16@x.y, 64@z]", "f32[16@x, 64@z] ~y", ["all_gather(axis=y, dim=0) -> f32[16@x, 64@z] ~y"]),
        ("f32[16@x, 64@y] +z", "f32[16@x.z, 64@y]", ["reduce_scatter(axis=z, dim=0) -> f32[16@x.z, 64@y]"]),
        # state y to state z: gather y, exchange z, slice y
        (
            "f32[16@x.y, 64@z]",
            "f32[16@x.z, 64@y]",
            [
                "all_gather_same(axis=y, dim=0) -> f32[16@x, 64@z]",
                "all_to_all(axis=z, src=1, dst=0) -> f32[16@x.z, 64]",
                "slice(axis=y, dim=1) -> f32[16@x.z, 64@y]",
            ],
        ),
        # a parameter whole along y is spread before use: its gradient is reduced there
        ("f32[16@x]", "f32[16] ~x ~y", ["spread(axis=y) -> f32[16@x] ~y", "all_gather(axis=x, dim=0) -> f32[16] ~x ~y"]),
        # a bias for pending sums: its part padded with zeros, or whole on the first rank alone
        ("f32[16@y.z]", "f32[16@y] +z", ["zero_pad(axis=z, dim=0) -> f32[16@y] +z"]),
        ("f32[16@y]", "f32[16@y] +z", ["once(axis=z, varied=False) -> f32[16@y] +z"]),
        # sub-dims are gathered in place
        ("f32[(3*16@y)@x]", "f32[(3*16@y)] ~x", ["all_gather(axis=x, dim=0) -> f32[(3*16@y)] ~x"]),
        ("f32[(3*16@y)]", "f32[48] ~y", ["all_gather(axis=y, dim=0, blocks=3) -> f32[48] ~y"]),
        # one message where two axes want the same
        ("f32[16@x] +y +z", "f32[16@x]", ["all_reduce(axis=y.z) -> f32[16@x]"]),
        ("f32[16] ~x ~y ~z", "f32[16]", ["settle(axis=x.y.z) -> f32[16]"]),
        ("i64[16]", "i64[16@x]", ["slice(axis=x, dim=0) -> i64[16@x]"]),
        ("f32[16@x] max z nograd", "f32[16@x] nograd", ["all_reduce(axis=z, op=max) -> f32[16@x] nograd"]),
        # the paper's Algorithm 7: from the diagonal, along z, then gathered along x
        (
            "f32[16@y.x] on y=z",
            "f32[16@y] ~x ~z",
            ["broadcast(axis=z, root=y) -> f32[16@y.x] ~z", "all_gather(axis=x, dim=0) -> f32[16@y] ~x ~z"],
        ),
        ("f32[16@x]", "f32[16@x]", []),
    ],
)
def test_chains(source: str, target: str, steps: list[str]) -> None:
    assert shown(relayout(Layout.parse(source), Layout.parse(target), CUBE)) == steps


def test_axes_of_one_rank_move_nothing() -> None:
    mesh = Mesh.parse((1, 4, 1))
    assert relayout(Layout.parse("f32[16@x.y, 64@z]"), Layout.parse("f32[16@y, 64] ~x"), mesh).steps == ()


def test_blocks_without_common_sub_dims_meet_in_the_whole_dim() -> None:
    chain = relayout(Layout.parse("f32[(4*6@y)]"), Layout.parse("f32[(6*4@y)]"), CUBE)
    assert shown(chain) == [
        "all_gather(axis=y, dim=0, blocks=4) -> f32[24] ~y",
        "slice(axis=y, dim=0, blocks=6, varied=True) -> f32[(6*4@y)]",
    ]


@pytest.mark.parametrize(
    "source, target, message",
    [
        ("f32[16@x]", "f32[8@x]", "has another shape than layout"),
        ("f32[16@x]", "f32[16] max x", "no chain of collectives leads from"),
    ],
)
def test_refused(source: str, target: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        relayout(Layout.parse(source), Layout.parse(target), CUBE)
