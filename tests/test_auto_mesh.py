"""mesh="auto": the mesh of this world's ranks that receives the fewest bytes."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import partir
from partir.errors import MeshError
from partir.options import Options
from partir.suggest import automatic_mesh


@pytest.fixture
def world() -> Generator[int]:
    """A world of four ranks of which only this one exists: nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        yield dist.get_world_size()
    finally:
        dist.destroy_process_group()


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def test_the_mesh_with_the_fewest_bytes_of_this_world(world: int) -> None:
    rows = torch.zeros(8, 64)
    mesh = automatic_mesh(layers(), rows, None, Options())
    found = partir.suggest_mesh(layers(), world, rows, by="bytes", modes=("low",), sure=None)
    plans = {one.mesh: partir.plan(layers(), one.mesh, rows).bytes() for one in found}
    assert mesh.size == world
    assert partir.plan(layers(), mesh, rows).bytes() == min(plans.values()) == found[0].bytes


def test_without_an_example_nothing_can_be_chosen(world: int) -> None:
    with pytest.raises(MeshError, match='mesh="auto" needs example_inputs: what moves depends on their sizes'):
        partir.parallelize(layers(), "auto")


def test_without_a_world_the_error_says_what_to_call() -> None:
    model = layers()
    with pytest.raises(MeshError, match="not initialised. For another number of ranks: partir.suggest_mesh"):
        partir.parallelize(model, "auto", torch.zeros(8, 64))
    assert type(model) is nn.Sequential
