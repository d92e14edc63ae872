"""Bad input gets one clear error, and the module stays as it was; each bad case stands beside its good twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partir
from partir.errors import LayoutError, MeshError, PartirError, RuleError, TraceError
from partir.layout import Layout


def mlp(inside: int = 24, hidden: int = 48) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inside, hidden), nn.GELU(), nn.Linear(hidden, inside))


def refused(kind: type[PartirError], model: nn.Module, x: Any, mesh: Any, **options: Any) -> str:
    """Return the message of the refusal, having checked that the model still runs on one device."""
    before = {name: p.clone() for name, p in model.state_dict().items()}
    expected: Tensor | None
    try:
        expected = model(x)
    except Exception:
        expected = None
    with pytest.raises(kind) as caught:
        partir.parallelize(model, mesh=mesh, **options)(x)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert expected is None or isinstance(expected, Tensor)
    return str(caught.value)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ((2, 0, 2), "mesh axis y has size 0; sizes are 1 or more"),
        ((2, -1, 2), "mesh axis y has size -1; sizes are 1 or more"),
        ((2, 1.5, 2), "mesh axis y has size 1.5, a float; sizes are integers"),
        ((True, 2, 2), "mesh axis x has size True, a bool; sizes are integers"),
        ((2, 2), "mesh (2, 2) has 2 sizes; give 3"),
        ({"x": 2, "w": 2}, "mesh axis 'w' is unknown. Axes are data, x, y, z"),
        ("2x2x2", "is not understood: give (x, y, z)"),
        (None, "is not understood: give (x, y, z)"),
    ],
)
def test_meshes(mesh: Any, message: str) -> None:
    assert message in refused(MeshError, mlp(), torch.randn(24, 24), mesh)
    partir.parallelize(mlp(), mesh={"x": 2, "y": 2})(torch.randn(24, 24))


def test_an_op_without_a_rule() -> None:
    class Singular(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.pdist(x)

    text = refused(RuleError, Singular(), torch.randn(8, 8), (2, 1, 1))
    assert "test_bad_input.py:" in text and "op aten._pdist_forward(" in text


def test_a_model_that_cannot_be_traced() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                return x * 2
            return x

    text = refused(TraceError, Branch(), torch.randn(8, 8), (2, 1, 1))
    assert "test_bad_input.py:" in text and "if x.sum() > 0" in text


def test_diagonal_vectors_need_equal_axes() -> None:
    text = refused(MeshError, mlp(), torch.randn(24, 24), (2, 2, 1), vectors="diagonal")
    assert "diagonal y=z" in text and 'vectors="balanced"' in text
    partir.parallelize(mlp(), mesh=(1, 2, 2), vectors="diagonal")(torch.randn(24, 24))


@pytest.mark.parametrize(
    ("option", "value"), [("memory", "medium"), ("vectors", "round"), ("outputs", "none"), ("check_inputs", "sometimes"), ("rng", "slow")]
)
def test_options(option: str, value: str) -> None:
    text = refused(PartirError, mlp(), torch.randn(24, 24), (2, 1, 1), **{option: value})
    assert f"{option}={value!r} is not understood; choose from" in text


@pytest.mark.parametrize(
    ("pin", "kind", "message"),
    [
        ({"0.wait": "f[out@y.x, in@z]"}, LayoutError, "matches no parameter, input or value. Closest: 0.weight"),
        ({"0.weight": "f[out@y.x"}, LayoutError, "is not understood"),
        ({"0.weight": "f[out@q, in]"}, LayoutError, "unknown axis 'q'"),
        ({"0.weight": "f[out@y, in@y]"}, LayoutError, "uses axis y twice"),
        ({"0.weight": "f[out@y]"}, LayoutError, "has 1 dims, the tensor has 2"),
    ],
)
def test_pins(pin: dict[str, str], kind: type[PartirError], message: str) -> None:
    assert message in refused(kind, mlp(), torch.randn(24, 24), (2, 2, 2), pin=pin)


def test_layout_text() -> None:
    with pytest.raises(LayoutError, match=r"unknown axis 'w'; axes are data, x, y, z"):
        Layout.parse("f32[8@w]")
    assert str(Layout.parse("f32[8@x]")) == "f32[8@x]"


def test_parallelizing_twice() -> None:
    model = partir.parallelize(mlp(), mesh=(2, 1, 1))
    with pytest.raises(PartirError, match="already parallelized"):
        partir.parallelize(model, mesh=(2, 1, 1))


def test_token_ids_beyond_the_vocabulary() -> None:
    model = partir.parallelize(nn.Sequential(nn.Embedding(24, 24), nn.Linear(24, 24)), mesh=(2, 2, 2))
    model(torch.zeros(8, 4, dtype=torch.int64))
    with pytest.raises(IndexError, match="out of range"):
        model(torch.full((8, 4), 24))


LOOKUPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding": lambda w, i: F.embedding(i, w),
    "cross entropy": lambda w, i: F.cross_entropy(w.T, i),
    "nll": lambda w, i: F.nll_loss(w.T.log_softmax(-1), i),
    "gather": lambda w, i: w.gather(0, i.unsqueeze(1)),
    "index_select": lambda w, i: w.index_select(0, i),
    "index": lambda w, i: w[i],
    "scatter": lambda w, i: w.scatter(0, i.unsqueeze(1), 1.0),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_an_index_beyond_its_dim_is_the_error_of_one_device(name: str) -> None:
    """Whether the dim is split or whole, and where the index lies in a pad."""

    class Lookup(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(size, 8))

        def forward(self, index: Tensor) -> Tensor:
            return LOOKUPS[name](self.weight * 2, index)

    for size, mesh in [(24, (2, 1, 1)), (24, (1, 4, 1)), (37, (1, 4, 1))]:
        model, bad = Lookup(size), torch.tensor([0, 1, 2, size, 4, 5, 6, 7])
        with pytest.raises((IndexError, RuntimeError)) as expected:
            model(bad)
        partir.parallelize(model, mesh)
        with pytest.raises(expected.type, match=r"test_bad_input\.py:\d+.*out of ") as caught:
            model(bad)
        assert isinstance(caught.value, PartirError) and isinstance(caught.value, IndexError)
        model(bad.clamp(max=size - 1)).sum().backward()


def test_a_batch_without_rows() -> None:
    model = partir.parallelize(nn.Sequential(nn.Linear(8, 4)), mesh=(2, 1, 2))
    with pytest.raises(PartirError, match=r"linear reads input_1 \[0, 8\], which has no elements to divide among ranks. Leave"):
        model(torch.empty(0, 8))
    assert model(torch.ones(4, 8)).shape == (4, 4)


def test_inputs_without_values() -> None:
    text = refused(PartirError, mlp(), torch.randn(24, 24, device="meta"), (2, 1, 1))
    assert "Sequential: input 'input' is on meta, the parameters are on cpu" in text
