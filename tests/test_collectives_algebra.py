"""What collectives do to layouts: the table, what they refuse, and that layouts tell the truth about blocks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from partir.blocks import gather, is_owner, shard
from partir.collectives import apply, cotangent, lockstep
from partir.dims import Dim, Part
from partir.errors import LayoutError, PartirError, TypeRuleError
from partir.layout import Layout
from partir.mesh import Mesh

MESH = Mesh.parse((2, 2, 3))

TABLE = [
    ("all_gather", "f32[12@x.y, 6@z]", {"axis": "y", "dim": 0}, "f32[12@x, 6@z] ~y"),
    ("all_gather", "f32[24@x.y.z, 6]", {"axis": "y.z", "dim": 0}, "f32[24@x, 6] ~y ~z"),
    ("all_gather", "i64[12@x.y, 6@z]", {"axis": "y", "dim": 0}, "i64[12@x, 6@z]"),
    ("all_gather", "f32[12@y] nograd", {"axis": "y", "dim": -1}, "f32[12] nograd"),
    ("all_gather", "f32[(3*8@y)@x]", {"axis": "x", "dim": 0}, "f32[(3*8@y)] ~x"),
    ("all_gather", "f32[(3*8@y)]", {"axis": "y", "dim": 0, "blocks": 3}, "f32[24] ~y"),
    ("all_gather", "f32[(4@x*8@y)]", {"axis": "y", "dim": 0, "blocks": 2}, "f32[32@x] ~y"),
    ("all_gather", "f32[(4@x*8@y)]", {"axis": "x", "dim": 0}, "f32[(4*8@y)] ~x"),
    ("all_gather_same", "f32[12@x.y] ~z", {"axis": "y", "dim": 0}, "f32[12@x] ~z"),
    ("reduce_scatter", "f32[12@x, 4@y] +z", {"axis": "z", "dim": 0}, "f32[12@x.z, 4@y]"),
    ("reduce_scatter", "f32[24] +y", {"axis": "y", "dim": 0, "blocks": 3}, "f32[(3*8@y)]"),
    ("reduce_scatter", "f32[(8*12@z)] +y", {"axis": "y", "dim": 0}, "f32[(8@y*12@z)]"),
    ("reduce_scatter", "f32[(3*8@y)] +x", {"axis": "x", "dim": 0}, "f32[(3*8@y)@x]"),
    ("all_reduce", "f32[12@x] +z ~y", {"axis": "z"}, "f32[12@x] ~y"),
    ("all_reduce", "f32[12@x] +y +z", {"axis": "y.z", "op": "sum"}, "f32[12@x]"),
    ("all_reduce", "f32[12@x] max z ~y", {"axis": "z", "op": "max"}, "f32[12@x] nograd"),
    ("slice", "f32[12@x]", {"axis": "y", "dim": 0}, "f32[12@x.y]"),
    ("slice", "i64[12@x, 4]", {"axis": "y", "dim": 1}, "i64[12@x, 4@y]"),
    ("slice", "f32[12@x] ~y", {"axis": "y", "dim": 0, "varied": True}, "f32[12@x.y]"),
    ("zero_pad", "f32[12@x.y]", {"axis": "y", "dim": 0}, "f32[12@x] +y"),
    ("spread", "f32[12@x]", {"axis": "y.z"}, "f32[12@x] ~y ~z"),
    ("settle", "f32[12@x] ~y ~z", {"axis": "y"}, "f32[12@x] ~z"),
    ("once", "f32[12@x] ~z", {"axis": "z"}, "f32[12@x] +z"),
    ("once", "f32[12@x]", {"axis": "z", "varied": False}, "f32[12@x] +z"),
    ("once", "f32[12@x] nograd", {"axis": "z", "varied": False}, "f32[12@x] +z nograd"),
    ("all_to_all", "f32[12@x.y, 6]", {"axis": "y", "src": 0, "dst": 1}, "f32[12@x, 6@y]"),
    ("all_to_all", "f32[(4@y*6)]", {"axis": "y", "src": 0, "dst": 0, "dst_blocks": 4}, "f32[(4*6@y)]"),
    ("broadcast", "f32[12@y.x] on y=z", {"axis": "y", "root": "z"}, "f32[12@z.x] ~y"),
    ("broadcast", "f32[12@y.x] on y=z", {"axis": "z", "root": "y"}, "f32[12@y.x] ~z"),
]

REFUSED = [
    (
        "all_gather",
        "f32[12@x.y, 6@z]",
        {"axis": "x", "dim": 0},
        "all_gather along x needs a dim split over x innermost",
    ),
    ("all_gather", "f32[12@x.y]", {"axis": "z", "dim": 0}, r"got f32\[12@x.y\]: z has type I, expected S"),
    ("all_gather", "f32[12@x.y]", {"axis": "y.x", "dim": 0}, "blocks=1 addresses does not have y.x innermost"),
    ("all_gather", "f32[(3*8@y)]", {"axis": "y", "dim": 0}, "blocks=1 addresses does not have y innermost"),
    ("all_gather", "f32[(3*8@y)@x]", {"axis": "y", "dim": 0, "blocks": 3}, "blocks=3 addresses does not have y"),
    ("all_gather", "f32[12@y]", {"axis": "y", "dim": 1}, "there is no dim 1"),
    ("all_gather_same", "f32[12] ~y", {"axis": "y", "dim": 0}, "y has type R, expected S"),
    ("reduce_scatter", "f32[12@x] ~y", {"axis": "y", "dim": 0}, "needs a pending sum over y"),
    ("reduce_scatter", "f32[12] max y", {"axis": "y", "dim": 0}, "y has type M, expected P"),
    ("reduce_scatter", "f32[8] +z", {"axis": "z", "dim": 0}, "local size 8 is not divisible by z=3"),
    ("all_reduce", "f32[12@x]", {"axis": "x"}, "all_reduce along x needs a pending sum over x"),
    ("all_reduce", "f32[12] max x", {"axis": "x"}, "x has type M, expected P"),
    ("all_reduce", "f32[12] +x", {"axis": "x", "op": "max"}, "x has type P, expected M"),
    ("all_reduce", "f32[12] +x", {"axis": "x", "op": "prod"}, 'needs op "sum" or "max", got \'prod\''),
    ("slice", "f32[12] ~y", {"axis": "y", "dim": 0}, "y has type R, expected I or N"),
    ("slice", "f32[12]", {"axis": "y", "dim": 0, "varied": True}, "y has type I, expected R"),
    ("zero_pad", "f32[12] ~y", {"axis": "y", "dim": 0}, "zero_pad along y needs a dim split over y"),
    ("spread", "f32[12] ~y", {"axis": "y"}, "spread along y needs a value that is the same"),
    ("spread", "i64[12]", {"axis": "y"}, "y has type N, expected I"),
    ("settle", "f32[12]", {"axis": "y"}, "settle along y needs a value of type R along y"),
    ("once", "f32[12]", {"axis": "y"}, "y has type I, expected R"),
    ("once", "f32[12] +y", {"axis": "y", "varied": False}, "y has type P, expected I or N"),
    ("all_to_all", "f32[12@y, 5]", {"axis": "y", "src": 0, "dst": 1}, "y=2 does not divide dim 1"),
    ("all_to_all", "f32[12, 5] +y", {"axis": "y", "src": 0, "dst": 1}, "y has type P, expected S"),
    ("all_to_all", "f32[12@y]", {"axis": "y", "src": 0, "dst": 0}, "src_blocks=1 and dst_blocks=1 overlap in dim 0"),
    ("broadcast", "f32[12@y]", {"axis": "y", "root": "z"}, "needs a value owned on y=z"),
    ("all_gather", "f32[12@y] on y=z", {"axis": "y", "dim": 0}, "only broadcast reads a value that the diagonal owns"),
    ("reduce_to", "f32[12] +y", {"axis": "y", "root": "z"}, "y=2 and z=3 differ, a diagonal needs them equal"),
    ("coordinate", "i64[]", {"axis": "y"}, "It differs by rank"),
    ("gather", "f32[12]", {"axis": "y"}, "gather has no layout rule"),
]


@pytest.mark.parametrize("op, operand, args, result", TABLE)
def test_table(op: str, operand: str, args: dict[str, Any], result: str) -> None:
    assert str(apply(op, Layout.parse(operand), MESH, **args)) == result


@pytest.mark.parametrize("op, operand, args, message", REFUSED)
def test_refused(op: str, operand: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeRuleError, match=message):
        apply(op, Layout.parse(operand), MESH, **args)


def test_error_says_law_expected_and_actual() -> None:
    with pytest.raises(TypeRuleError) as caught:
        apply("reduce_scatter", Layout.parse("f32[12@x, 4@y] ~z"), MESH, axis="z", dim=0)
    assert str(caught.value) == (
        "reduce_scatter along z needs a pending sum over z and a dim 0 that z divides, "
        "got f32[12@x, 4@y] ~z: z has type R, expected P."
    )


def test_buckets_take_and_give_one_layout_a_tensor() -> None:
    shards = [Layout.parse("f32[12@y.x]"), Layout.parse("f32[6@x, 4]")]
    wholes = apply("all_gather_bucket", shards, MESH, axis="x")
    assert [str(layout) for layout in wholes] == ["f32[12@y] ~x", "f32[6, 4] ~x"]
    back = apply("reduce_scatter_bucket", [cotangent(layout) for layout in wholes], MESH, axis="x")
    assert list(back) == shards
    with pytest.raises(TypeRuleError, match="needs a list of operands"):
        apply("all_gather_bucket", shards[0], MESH, axis="x")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("f32[12@x] +y ~z", "f32[12@x] +z ~y"),
        ("f32[12]", "f32[12]"),
        ("f32[12@y.x] on y=z", "f32[12@y.x] on y=z"),
    ],
)
def test_cotangent(text: str, expected: str) -> None:
    layout = Layout.parse(text)
    assert str(cotangent(layout)) == expected
    assert cotangent(cotangent(layout)) == layout


@pytest.mark.parametrize("text", ["i64[12@x]", "f32[12] nograd", "f32[12] max z"])
def test_no_cotangent(text: str) -> None:
    with pytest.raises(TypeRuleError, match="cotangent needs a value with"):
        cotangent(Layout.parse(text))


@st.composite
def placed(draw: st.DrawFn) -> tuple[Mesh, Layout]:
    """Draw a mesh and a layout of shape `[6*12, 12]` with each axis of any type."""
    mesh = Mesh.parse(tuple(draw(st.sampled_from([1, 2, 3])) for _ in range(3)))
    parts = {"a": (6, []), "b": (12, []), "c": (12, [])}
    flat: list[str] = []
    types: dict[str, list[str]] = {kind: [] for kind in "PMRI"}
    for axis in draw(st.permutations(["x", "y", "z"])):
        place = draw(st.sampled_from(["a", "b", "c", "flat", "P", "R", "I"]))
        where = parts[place][1] if place in parts else flat if place == "flat" else types[place]
        where.append(axis)
    a, b, c = (Part(size, tuple(axes)) for size, axes in parts.values())
    pending = tuple((axis, "sum") for axis in types["P"])
    layout = Layout("f64", (Dim((a, b), tuple(flat)), Dim((c,))), pending, tuple(types["R"]))
    try:
        layout.local_shape(mesh)
    except LayoutError:
        assume(False)
    return mesh, layout


def make_blocks(layout: Layout, mesh: Mesh) -> list[Tensor]:
    """Draw blocks of a layout: addends of pending sums differ along their axes."""
    axes = tuple(axis for axis, _ in layout.pending)
    settled = replace(layout, pending=())
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(layout.shape, dtype=torch.float64, generator=generator) for _ in range(mesh.extent(axes))]
    return [shard(wholes[mesh.index(rank, axes)], settled, mesh, rank).clone() for rank in range(mesh.size)]


def candidates(layout: Layout, mesh: Mesh) -> list[tuple[str, dict[str, Any]]]:
    """List calls of every collective with every dim and every block count that a part may have."""
    counts = sorted({1, 2, 3, 6, layout.local_shape(mesh)[0]})
    calls: list[tuple[str, dict[str, Any]]] = []
    for axis in ("x", "y", "z", "x.y", "z.x"):
        calls += [("all_reduce", {"axis": axis}), ("spread", {"axis": axis}), ("settle", {"axis": axis})]
        calls += [("once", {"axis": axis, "varied": varied}) for varied in (True, False)]
        for dim, blocks in itertools.product((0, 1), counts):
            where = {"axis": axis, "dim": dim, "blocks": blocks}
            calls += [(op, where) for op in ("all_gather", "all_gather_same", "reduce_scatter", "slice", "zero_pad")]
            calls.append(("slice", {**where, "varied": True}))
        for src, dst, first, second in itertools.product((0, 1), (0, 1), counts, counts):
            ends = {"axis": axis, "src": src, "dst": dst, "src_blocks": first, "dst_blocks": second}
            calls.append(("all_to_all", ends))
    return calls


@settings(max_examples=40, deadline=None)
@given(placed())
def test_result_layout_describes_the_result_blocks(case: tuple[Mesh, Layout]) -> None:
    mesh, layout = case
    blocks = make_blocks(layout, mesh)
    whole = gather(blocks, layout, mesh)
    for op, args in candidates(layout, mesh):
        try:
            result = apply(op, layout, mesh, **args)
        except TypeRuleError:
            continue
        moved = lockstep.run(op, blocks, mesh, **args)
        message = f"{op} {args}: {layout} -> {result}"
        assert all(tuple(block.shape) == result.local_shape(mesh) for block in moved), message
        torch.testing.assert_close(gather(moved, result, mesh), whole, rtol=1e-12, atol=1e-12, msg=message)
        if not result.pending:
            for rank, block in enumerate(moved):
                torch.testing.assert_close(block, shard(whole, result, mesh, rank), rtol=1e-12, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(placed())
def test_gather_of_shard_is_the_whole(case: tuple[Mesh, Layout]) -> None:
    mesh, layout = case
    whole = torch.arange(72.0 * 12).view(72, 12)
    assert torch.equal(gather([shard(whole, layout, mesh, rank) for rank in range(mesh.size)], layout, mesh), whole)


def test_maximum_describes_the_result_blocks() -> None:
    layout = Layout.parse("f64[6@x] max z")
    blocks = [torch.randn(3, dtype=torch.float64) for _ in range(6)]
    mesh = Mesh.parse((2, 1, 3))
    result = apply("all_reduce", layout, mesh, axis="z", op="max")
    moved = lockstep.run("all_reduce", blocks, mesh, axis="z", op="max")
    assert torch.equal(gather(moved, result, mesh), gather(blocks, layout, mesh))


@pytest.mark.parametrize("axis, root", [("y", "z"), ("z", "y")])
@pytest.mark.parametrize("text", ["f64[12@y.x] on y=z", "f64[12@x] on y=z", "f64[12, 6@y] on y=z"])
def test_diagonal_describes_the_result_blocks(axis: str, root: str, text: str) -> None:
    mesh, owned = Mesh.parse((2, 3, 3)), Layout.parse(text)
    whole = torch.randn(owned.shape, dtype=torch.float64)
    blocks = [shard(whole, owned, mesh, rank) for rank in range(mesh.size)]
    result = apply("broadcast", owned, mesh, axis=axis, root=root)
    moved = lockstep.run("broadcast", blocks, mesh, axis=axis, root=root)
    assert all(torch.equal(block, shard(whole, result, mesh, rank)) for rank, block in enumerate(moved))

    addends = make_blocks(cotangent(result), mesh)
    returned = lockstep.run("reduce_to", addends, mesh, axis=axis, root=root)
    back = apply("reduce_to", cotangent(result), mesh, axis=axis, root=root)
    assert back == owned
    torch.testing.assert_close(gather(returned, back, mesh), gather(addends, cotangent(result), mesh))
    for rank, block in enumerate(returned):
        if not is_owner(back, mesh, rank):
            assert block.untyped_storage().nbytes() == block.element_size()


def test_every_refusal_is_a_partir_error() -> None:
    assert issubclass(TypeRuleError, PartirError)
