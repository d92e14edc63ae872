"""Defects found by trying to break partir, one test each."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import partir
from partir import rules
from partir.errors import PartirError, RuleError


class SharedLayer(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def test_a_module_under_two_names_keeps_its_parameters() -> None:
    """Tracing left fakes in it, for the fake of one name was put back under the other."""
    torch.manual_seed(0)
    model = SharedLayer()
    parameters = list(model.parameters())
    partir.verify(model, (2, 2, 2), torch.randn(8, 8))
    x = torch.randn(8, 8)
    expected = copy.deepcopy(model)(x)
    parallel = partir.parallelize(model, (2, 2, 2))
    torch.testing.assert_close(parallel(x), expected)
    assert all(now is before for now, before in zip(parallel.parameters(), parameters, strict=True))


class Unreached(nn.Module):
    """Some layers are only used without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8)
        self.used = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate = self.frozen(x)
        return (self.used(x) * gate).mean()


def test_a_parameter_without_a_gradient_keeps_none() -> None:
    """The bucket that gathers all vectors gave zeros to its bias, which AdamW would then decay."""
    model = partir.parallelize(Unreached(), (2, 2, 2))
    model(torch.randn(8, 8)).backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["used.weight", "used.bias"]


def test_dropout_changed_after_the_first_call() -> None:
    """The program of the first call ran on, with the old probability."""
    linear, dropout = nn.Linear(8, 8), nn.Dropout(0.5)
    model = partir.parallelize(nn.Sequential(linear, dropout), (1, 2, 2))
    x = torch.randn(8, 8)
    assert bool((model(x) == 0).any())
    dropout.p = 0.0
    torch.testing.assert_close(model(x), linear(x))


def test_dtype_changed_after_the_first_call() -> None:
    """A valid `model.double()` was an error about what the program had been compiled for."""
    model = partir.parallelize(nn.Linear(8, 8), (2, 2, 2))
    x = torch.randn(8, 8)
    model(x)
    model.double()
    torch.testing.assert_close(model(x.double()), nn.functional.linear(x.double(), model.weight, model.bias))


class Scaled(nn.Module):
    """A linear scaled by a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def test_a_plain_attribute_changed_after_the_first_call() -> None:
    """The program of the first call ran on, with the old scale."""
    model = partir.parallelize(Scaled(), (2, 1, 2))
    x = torch.randn(8, 8)
    before = model(x)
    model.scale = 3.0
    torch.testing.assert_close(model(x), before * 3)


class Weighted(nn.Module):
    """A cross entropy with class weights."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.register_buffer("weights", torch.arange(1.0, 9.0))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(x), labels, weight=self.get_buffer("weights"), ignore_index=3)


def test_cross_entropy_with_class_weights() -> None:
    """The weights were looked up in a table of width 1, which no axis divides."""
    partir.verify(Weighted(), (2, 2, 2), (torch.randn(16, 8), torch.arange(16) % 8))


def test_a_singular_matrix_is_an_error_as_on_one_device() -> None:
    """Nothing reads the check of a factorisation, so that it was dropped, and what cannot be factorised came back as numbers."""

    class Factorised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.eye(6))

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.cholesky(x @ self.w)

    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            model = partir.parallelize(Factorised(), (3, 2, 1))
            with pytest.raises(PartirError, match=r"test_regressions\.py:\d+.*not positive-definite"):
                model(-torch.ones(6, 6))
            assert torch.equal(model(4 * torch.eye(6)), 2 * torch.eye(6))


def test_a_factorisation_beside_complex_numbers() -> None:
    """Torch's second way to derive a backward gave the check of the factorisation a token: one result more, and all others shifted."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.linear(x)
            return torch.linalg.cholesky(y @ y.mT + 6 * torch.eye(6)), torch.fft.rfft(y, dim=1).abs()

    assert partir.verify(Both(), (3, 2, 1), torch.randn(6, 6)).worst < 1e-10


class TakenFlat(nn.Module):
    """Numbers taken from a matrix as if it were one row."""

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return torch.take_along_dim(x.sin(), at)


@pytest.mark.parametrize("split", ["f[m@x, n]", "f[m, n@x]"])
def test_taking_from_a_flattened_matrix(split: str) -> None:
    """Ids that number two dims at once were looked up in one rank's part of the second."""
    x, at = torch.randn(6, 6, dtype=torch.float64), torch.randint(36, (6, 2))
    model = partir.parallelize(TakenFlat(), (3, 1, 1), pin={"x": split})
    assert torch.equal(model(x, at), torch.take_along_dim(x.sin(), at))


def test_a_rule_whose_ids_number_several_dims_does_not_serve() -> None:
    """`c` is one dim where `dim` says which, and every dim where it is None."""
    text = "op aten.take_along_dim(x[... c@dim ...], at[... e@dim ...], dim) -> y[... e@dim ...]\n    index at into c\n    sum c\n"
    rule = rules.parse_rules(text)["aten.take_along_dim"]
    x, at = torch.randn(6, 6), torch.zeros(6, 6, dtype=torch.int64)
    assert rule.bind((x, at, 1), {}, x).index == ((1, 0, "c"),)
    with pytest.raises(RuleError, match="`index at into c`: ids number one dim, and c stands for 2 here"):
        rule.bind((x, at, None), {}, x.flatten())


class RowsFromTheEnd(nn.Module):
    """A table read by `[...]`, some rows counted from the end, and used as a head."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(rows, 8, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids].sum(0) @ self.table.T


@pytest.mark.parametrize("rows", [8, 37])
def test_negative_rows_of_a_split_or_padded_table(rows: int) -> None:
    """Rows counted from the end of a padded table were an error about an index out of range."""
    ids = torch.tensor([[0, -1, 3, -6, 5, 2], [1, 1, -2, 4, 0, -rows]])
    for mesh in ((1, 4, 1), (2, 1, 3)):
        assert partir.verify(RowsFromTheEnd(rows), mesh, ids).worst < 1e-10
    model = partir.parallelize(RowsFromTheEnd(rows), (1, 4, 1))
    for bad in (rows, -rows - 1):
        with pytest.raises(IndexError, match=f"index {bad} is out of (range|bounds)"):
            model(ids.masked_fill(ids == 0, bad))


class Projected(nn.Module):
    """Columns mixed by random numbers of a size that nothing divides."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.randn(3, 2, dtype=x.dtype)


def test_random_numbers_of_a_padded_size() -> None:
    """They were drawn without the pad of the product that reads them: a crash inside the product."""
    x = torch.randn(4, 3, dtype=torch.float64)
    with partir.same_randomness(torch.initial_seed()):
        expected = Projected()(x)
    for mesh in ((2, 1, 1), (1, 2, 2), (2, 4, 1)):
        with partir.same_randomness(torch.initial_seed()):
            torch.testing.assert_close(partir.parallelize(Projected(), mesh)(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dropout", [nn.AlphaDropout(1.0), nn.FeatureAlphaDropout(1.0), nn.Dropout(1.0), nn.Dropout1d(1.0)])
def test_dropout_that_drops_everything(dropout: nn.Module) -> None:
    """What it kept was divided by its part, 0."""
    x = torch.randn(4, 6, 2)
    assert torch.equal(partir.parallelize(dropout, (2, 2, 1))(x), torch.zeros_like(x))
