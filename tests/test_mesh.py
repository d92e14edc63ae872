"""Meshes: what a user may write, what is refused and in which words, and where ranks are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partir.errors import MeshError, PartirError
from partir.mesh import Mesh, current_mesh, use_mesh

SIZES = st.tuples(*[st.integers(1, 4)] * 3)


@pytest.mark.parametrize(
    "spec, text",
    [
        ((4, 4, 4), "(x=4, y=4, z=4)"),
        ([1, 2, 3], "(x=1, y=2, z=3)"),
        ((2, 4, 4, 4), "(data=2, x=4, y=4, z=4)"),
        ({"x": 8, "y": 2, "z": 1}, "(x=8, y=2, z=1)"),
        ({"z": 2}, "(x=1, y=1, z=2)"),
        ({"data": 2, "y": 3}, "(data=2, x=1, y=3, z=1)"),
    ],
)
def test_what_a_user_may_write(spec: Any, text: str) -> None:
    mesh = Mesh.parse(spec)
    assert str(mesh) == text
    assert Mesh.parse(mesh) is mesh


@pytest.mark.parametrize(
    "spec, good, message",
    [
        ((0, 2, 2), (1, 2, 2), "mesh axis x has size 0; sizes are 1 or more."),
        ((2, -2, 2), (2, 2, 2), "mesh axis y has size -2; sizes are 1 or more."),
        ((2, 2, 2.0), (2, 2, 2), "mesh axis z has size 2.0, a float; sizes are integers."),
        ((2, "2", 2), (2, 2, 2), "mesh axis y has size '2', a str; sizes are integers."),
        ((10**20, 1, 1), (2**31 - 1, 1, 1), f"mesh (x={10**20}, y=1, z=1) has {10**20:,} ranks; torch."),
        ((True, 2, 2), (1, 2, 2), "mesh axis x has size True, a bool; sizes are integers."),
        ((None, 2, 2), (1, 2, 2), "mesh axis x has size None, a NoneType; sizes are integers."),
        ({"x": 0}, {"x": 1}, "mesh axis x has size 0; sizes are 1 or more."),
        ({"w": 2}, {"x": 2}, "mesh axis 'w' is unknown. Axes are data, x, y, z."),
        ({"X": 2}, {"x": 2}, "mesh axis 'X' is unknown. Axes are data, x, y, z."),
        ((2, 2), (2, 2, 1), "mesh (2, 2) has 2 sizes; give 3 (x, y, z) or 4 (data, x, y, z)."),
        ((), (1, 1, 1), "mesh () has 0 sizes; give 3 (x, y, z) or 4 (data, x, y, z)."),
        ((1, 2, 2, 2, 2), (1, 2, 2, 2), "mesh (1, 2, 2, 2, 2) has 5 sizes; give 3 (x, y, z) or 4 (data, x, y, z)."),
        (8, (8, 1, 1), "mesh 8 is not understood: give (x, y, z), (data, x, y, z), a dict by axis name or a DeviceMesh."),
        ("2,2,2", (2, 2, 2), "mesh '2,2,2' is not understood: give"),
        (None, (1, 1, 1), "mesh None is not understood: give"),
    ],
)
def test_bad_mesh_beside_its_good_twin(spec: Any, good: Any, message: str) -> None:
    with pytest.raises(MeshError) as caught:
        Mesh.parse(spec)
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, PartirError)
    Mesh.parse(good)


@pytest.mark.parametrize(
    "names, sizes, message",
    [
        (("x", "w"), (1, 1), "mesh axis 'w' is unknown. Axes are data, x, y, z."),
        (("x", "x"), (1, 1), "mesh axes ('x', 'x') name an axis twice."),
        (("x", "y"), (1,), "mesh has 2 axes and 1 sizes; give one size an axis."),
    ],
)
def test_bad_names(names: tuple[str, ...], sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(MeshError) as caught:
        Mesh(names, sizes)
    assert str(caught.value) == message


class FakeDeviceMesh:
    """What Mesh reads of torch's DeviceMesh, which needs a process group."""

    def __init__(self, shape: tuple[int, ...], names: tuple[str, ...] | None) -> None:
        self.shape = shape
        self.mesh_dim_names = names


def test_device_mesh() -> None:
    assert str(Mesh.parse(FakeDeviceMesh((2, 4), ("y", "z")))) == "(x=1, y=2, z=4)"
    assert str(Mesh.parse(FakeDeviceMesh((1, 2, 4), None))) == "(x=1, y=2, z=4)"
    with pytest.raises(MeshError, match=r"dims \('z', 'y'\) are not in the order data, x, y, z"):
        Mesh.parse(FakeDeviceMesh((2, 4), ("z", "y")))
    with pytest.raises(MeshError, match="mesh axis 'dp' is unknown"):
        Mesh.parse(FakeDeviceMesh((2, 4), ("dp", "x")))


def test_ranks_are_row_major_with_z_nearest() -> None:
    mesh = Mesh.parse((2, 3, 4))
    assert mesh.size == 24
    assert [mesh[axis] for axis in ("data", "x", "y", "z")] == [1, 2, 3, 4]
    assert mesh.group(0, ("z",)) == (0, 1, 2, 3)
    assert mesh.group(5, ("y",)) == (1, 5, 9)
    assert mesh.group(5, ("x",)) == (5, 17)
    assert mesh.group(0, ("z", "x")) == (0, 12, 1, 13, 2, 14, 3, 15)
    assert mesh.split_axes() == ("x", "y", "z")
    assert Mesh.parse((1, 4, 1)).split_axes() == ("y",)


@given(SIZES)
def test_coordinate_and_rank_are_inverse(sizes: tuple[int, ...]) -> None:
    mesh = Mesh.parse(sizes)
    assert [mesh.rank(mesh.coordinate(rank)) for rank in range(mesh.size)] == list(range(mesh.size))


@given(SIZES, st.lists(st.sampled_from(["x", "y", "z"]), unique=True, min_size=1))
def test_groups_partition_the_ranks(sizes: tuple[int, ...], axes: list[str]) -> None:
    mesh = Mesh.parse(sizes)
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert len(group) == mesh.extent(axes)
        assert [mesh.index(rank, axes) for rank in group] == list(range(len(group)))
        assert all(mesh.group(rank, axes) == group for rank in group)


def test_current_mesh_is_the_innermost_in_use() -> None:
    with pytest.raises(MeshError, match="called outside a mesh"):
        current_mesh()
    outer, inner = Mesh.parse((2, 1, 1)), Mesh.parse((1, 2, 1))
    with use_mesh(outer):
        with use_mesh(inner):
            assert current_mesh() is inner
        assert current_mesh() is outer
