"""Models built on meta: what is made from other tensors, and what counts as set by an init function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import partir
from partir.errors import PartirError
from tests.test_initialization import on_meta


class Tracked(nn.Module):
    """Tensors made from other tensors: a copy that follows a network, the norms of drawn rows."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(8, 6), nn.Linear(8, 6)
        self.gain = nn.Parameter(torch.empty(6, 1))

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.online.weight[:2], std=0.02)
        self.target.load_state_dict(self.online.state_dict())
        with torch.no_grad():
            self.gain.copy_(self.online.weight.norm(dim=1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        return (self.online(x) - self.target(x)) * self.gain.T


@pytest.mark.filterwarnings("ignore:.*not elementwise")
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 3)])
def test_what_is_made_from_drawn_tensors_is_made_from_those_draws(mesh: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = partir.parallelize(on_meta(Tracked), mesh)
    assert model.online.weight[:2].abs().max() < 0.1 < model.online.weight[2:].abs().max()
    assert torch.equal(model.target.weight, model.online.weight) and torch.equal(model.target.bias, model.online.bias)
    assert torch.equal(model.gain, model.online.weight.norm(dim=1, keepdim=True))
    assert model(torch.randn(4, 8)).abs().max() == 0


class Partly(nn.Module):
    """`scale` is ones in `__init__`, which meta forgets; `reset_parameters` looks at it, changes it, or sets a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.empty(8, 6)), nn.Parameter(torch.ones(6))

    def looks(self) -> None:
        self.weight.div_(self.scale.view(1, 6) + 1)

    def changes(self) -> None:
        self.scale.mul_(2)

    def sets_a_part(self) -> None:
        self.scale[:2].fill_(5)
        self.scale[3:].fill_(6)

    def sets_every_second(self) -> None:
        self.scale[::2].fill_(5)

    def sets_all(self) -> None:
        self.scale[::2].fill_(5)
        self.scale[1:4].zero_()
        self.scale.view(2, 3)[1].normal_().mul_(2)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.scale


@pytest.mark.parametrize("how", ["looks", "changes", "sets_a_part", "sets_every_second"])
def test_what_is_looked_at_or_set_in_part_is_not_set(how: str) -> None:
    class Lost(Partly):
        @torch.no_grad()
        def reset_parameters(self) -> None:
            self.weight.normal_()
            getattr(self, how)()

    with pytest.raises(PartirError, match=r"its init functions do not set all of scale: what __init__"):
        partir.parallelize(on_meta(Lost), (2, 1, 1))


def test_what_is_set_in_parts_is_set() -> None:
    class Kept(Partly):
        @torch.no_grad()
        def reset_parameters(self) -> None:
            self.weight.t()[:, ::2].fill_(1)
            self.weight[1::2].uniform_()
            self.sets_all()

    values = partir.parallelize(on_meta(Kept), (2, 1, 1)).scale
    assert values[:3].tolist() == [5, 0, 0] and (values[3:] != 0).all()


def test_a_parametrization_whose_original_nobody_sets() -> None:
    with pytest.raises(PartirError, match=r"do not set all of 0.parametrizations.weight.original"):
        partir.parallelize(on_meta(lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 6)))), (2, 1, 1))
