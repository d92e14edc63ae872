"""Layouts: notation, which block a rank holds, types, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partir.blocks import gather, is_owner, shard
from partir.dims import Dim, Part
from partir.errors import LayoutError
from partir.layout import DTYPES, Layout
from partir.mesh import Mesh

MESH = Mesh.parse((2, 3, 4))
AXES = ("data", "x", "y", "z")


@st.composite
def any_layout(draw: st.DrawFn, mesh: Mesh | None = None, kinds: tuple[str, ...] = ("split", "sum", "max", "varied", "same")) -> Layout:
    """Draw a layout of up to 3 dims of up to 3 sub-dims, every axis anywhere or of any type; with a mesh, one that divides."""
    sizes = draw(st.lists(st.lists(st.sampled_from([1, 3, 4, 6]), min_size=1, max_size=2 if mesh else 3), max_size=2 if mesh else 3))
    splits: list[list[list[str]]] = [[[] for _ in inner] + [[]] for inner in sizes]
    types: dict[str, list[str]] = {"sum": [], "max": [], "varied": [], "same": []}

    def dims() -> tuple[Dim, ...]:
        pairs = zip(sizes, splits)
        return tuple(Dim(tuple(Part(n, tuple(axes)) for n, axes in zip(inner, split)), tuple(split[-1])) for inner, split in pairs)

    grad = draw(st.booleans())
    for axis in draw(st.permutations(AXES)):
        kind = draw(st.sampled_from(kinds))
        if kind == "split" and sizes:
            place = draw(st.sampled_from(draw(st.sampled_from(splits))))
            place.append(axis)
            if mesh and not divides(dims(), mesh):
                place.pop()
        elif kind in ("sum", "max") or (kind == "varied" and grad):
            types[kind].append(axis)
    floats = ["f32", "f64", "bf16"]
    dtype = draw(st.sampled_from(floats if types["varied"] else list(DTYPES)))
    pending = tuple((axis, kind) for kind in ("sum", "max") for axis in types[kind])
    owner = draw(st.sampled_from([None, ("y", "z"), ("z", "y")])) if mesh is None else None
    return Layout(dtype, dims(), pending, tuple(types["varied"]), grad, owner)


def divides(dims: tuple[Dim, ...], mesh: Mesh) -> bool:
    try:
        return all(dim.local_size(mesh) > 0 for dim in dims)
    except LayoutError:
        return False


@st.composite
def placed(draw: st.DrawFn) -> tuple[Mesh, Layout]:
    mesh = Mesh.parse(tuple(draw(st.sampled_from([1, 2, 3])) for _ in AXES))
    return mesh, draw(any_layout(mesh, ("split", "split", "sum", "varied", "same")))


@settings(max_examples=150, deadline=None)
@given(any_layout())
def test_text_and_parse_are_inverse(layout: Layout) -> None:
    text = str(layout)
    assert text.isascii()
    assert Layout.parse(text) == layout
    assert str(Layout.parse(text)) == text


@settings(max_examples=50, deadline=None)
@given(placed())
def test_blocks_cover_the_tensor(case: tuple[Mesh, Layout]) -> None:
    """shard and gather are inverse, and every rank's block has the local shape."""
    mesh, layout = case
    whole = torch.arange(torch.Size(layout.shape).numel()).view(layout.shape)
    blocks = [shard(whole, layout, mesh, rank) for rank in range(mesh.size)]
    assert all(tuple(block.shape) == layout.local_shape(mesh) for block in blocks)
    assert torch.equal(gather(blocks, layout, mesh), whole)
    assert torch.equal(gather(blocks, layout.strip(mesh), mesh), whole)
    assert layout.strip(mesh).local_shape(mesh) == layout.local_shape(mesh)


@pytest.mark.parametrize(
    "text, canonical",
    [
        ("f32[16@x, (12@y*64)] +z", "f32[16@x, 768@y] +z"),
        ("f32[(3*768@y)@x, 768@z]", "f32[(3*768@y)@x, 768@z]"),
        ("f32[(768)@x]", "f32[768@x]"),
        ("f32[(1*24@y)]", "f32[24@y]"),
        ("f32[(24@x*1)@y]", "f32[24@x.y]"),
        ("f32[16] ~z ~x", "f32[16] ~x ~z"),
        ("f32[16] +z +x max y", "f32[16] +x max y +z"),
        ("i64[16] nograd", "i64[16]"),
        ("f32[]", "f32[]"),
        (" f32[16@x.y,64@z] ", "f32[16@x.y, 64@z]"),
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    assert str(Layout.parse(text)) == canonical
    assert Layout.parse(text) == Layout.parse(canonical)


def test_names_stand_for_sizes_of_a_tensor() -> None:
    layout = Layout.parse("f[out@y.x, in@z]", shape=(48, 24), dtype="f64")
    assert str(layout) == "f64[48@y.x, 24@z]"
    assert layout == Layout.parse("f64[48@y.x, 24@z]", shape=(48, 24))


@pytest.mark.parametrize(
    "text, block, direction",
    [
        ("f32[48@x.y, 24@z]", "ijl", "y"),
        ("f32[48@y.x, 24@z]", "jil", "x"),
        ("f32[48@x.z, 24@y]", "ilj", "z"),
        ("f32[8@x.y, 6, 24@z]", "ijl", "y"),
        ("f32[(3*24@y)@x, 24@z]", "jil", "x"),
        ("f32[8@data.x.z, 24@y]", "ilj", "z"),
        ("f32[24@y.z.x]", "jli", "x"),
        ("f32[24@y.x] on y=z", "ji", "x"),
        ("f32[16@x, 24@z]", "il", None),
        ("f32[16]", "", None),
    ],
)
def test_block_and_direction(text: str, block: str, direction: str | None) -> None:
    layout = Layout.parse(text)
    assert (layout.block, layout.direction) == (block, direction)


def test_local_shape_and_the_slice_that_a_rank_holds() -> None:
    whole = torch.arange(24.0 * 48).view(24, 48)
    layout = Layout.parse("f32[24@x.y, 48@z]")
    assert layout.local_shape(MESH) == (4, 12)
    for rank in range(MESH.size):
        place = MESH.coordinate(rank)
        row, column = (place["x"] * 3 + place["y"]) * 4, place["z"] * 12
        assert torch.equal(shard(whole, layout, MESH, rank), whole[row : row + 4, column : column + 12])


def test_a_fused_dim_splits_every_part() -> None:
    """q, k and v are each split over y; x then splits the flat local dim."""
    mesh = Mesh.parse((2, 3, 1))
    whole = torch.arange(36)
    layout = Layout.parse("i64[(3*12@y)@x]")
    assert layout.local_shape(mesh) == (6,)
    rank = mesh.rank({"x": 1, "y": 2})
    of_y = torch.cat([whole[part * 12 + 8 : part * 12 + 12] for part in range(3)])
    assert torch.equal(shard(whole, layout, mesh, rank), of_y[6:])


def test_the_diagonal_holds_the_block_and_the_others_nothing() -> None:
    mesh, layout = Mesh.parse((2, 2, 2)), Layout.parse("f32[8@y.x] on y=z")
    whole = torch.arange(8.0)
    for rank in range(mesh.size):
        place = mesh.coordinate(rank)
        block = shard(whole, layout, mesh, rank)
        if place["y"] == place["z"]:
            start = (place["y"] * 2 + place["x"]) * 2
            assert torch.equal(block, whole[start : start + 2])
        else:
            assert block.numel() == 0 and not is_owner(layout, mesh, rank)
    assert torch.equal(gather([shard(whole, layout, mesh, rank) for rank in range(mesh.size)], layout, mesh), whole)


def test_types() -> None:
    layout = Layout.parse("f32[16@x] +z ~y")
    assert [layout.type(axis) for axis in AXES] == ["I", "S", "R", "P"]
    assert Layout.parse("i64[16@x] max y").type("y") == "M"
    assert Layout.parse("i64[16@x]").type("y") == "N"
    assert Layout.parse("f32[16@x] nograd").type("y") == "N"


def test_axes_of_one_rank_say_nothing() -> None:
    mesh = Mesh.parse((1, 2, 1))
    assert str(Layout.parse("f32[(3*16@y.x)@z, 8] +data").strip(mesh)) == "f32[(3*16@y), 8]"
    assert Layout.parse("f32[16@y.x] on y=z").strip(Mesh.parse((2, 1, 1))) == Layout.parse("f32[16@x]")


@pytest.mark.parametrize(
    "text, message",
    [
        ("f32[16@x, 8@x]", "uses axis x twice; an axis has one type in a layout"),
        ("f32[16@x] +x", "uses axis x twice"),
        ("f32[16] +y ~y", "uses axis y twice"),
        ("f32[16@w]", "has unknown axis 'w'; axes are data, x, y, z"),
        ("f32[16] +w", "has unknown axis 'w'"),
        ("q7[16]", "has unknown dtype 'q7'; known: f64"),
        ("f32 16", "is not understood; write it as"),
        ("f32[16] grad", "is not understood; write it as"),
        ("f32[16@@x]", "dim '16@@x' is not understood; write 16@x.y or"),
        ("f32[n@x]", "size 'n' is a name; sizes are numbers here"),
        ("f32[16] ~y nograd", "has type R without a gradient; such a value is N"),
    ],
)
def test_refused_texts(text: str, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text, shape, message",
    [
        ("f[n@x]", (4, 4), r"has 1 dims, the tensor has 2: \(4, 4\)"),
        ("f[8@x]", (4,), "size 8 differs from the tensor's 4"),
        ("f[(3*4@y)]", (16,), r"dim '\(3\*4@y\)' has size 12, the tensor's is 16"),
    ],
)
def test_texts_that_do_not_fit_the_tensor(text: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.parse(text, shape=shape, dtype="f32")


def test_sizes_that_do_not_divide_name_the_legal_ones() -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse("f32[30@x.z]").local_shape(MESH)
    assert str(caught.value) == "dim 30@x.z: size 30 is not divisible by x.z=8. Legal extents: 1, 2, 3, 5, 6, 10, 15, 30."
    assert Layout.parse("f32[32@x.z]").local_shape(MESH) == (4,)


@pytest.mark.parametrize("value", [torch.zeros(3, 4), torch.zeros(()), torch.zeros(2, dtype=torch.bool)])
def test_whole(value: Any) -> None:
    layout = Layout.whole(value)
    assert layout.shape == tuple(value.shape) and not layout.split_axes
    assert layout.grad == value.is_floating_point()


def test_a_tensor_of_another_shape_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"a tensor of shape \(3,\) does not fit layout f32\[4@x\]"):
        shard(torch.zeros(3), Layout.parse("f32[4@x]"), MESH, 0)
