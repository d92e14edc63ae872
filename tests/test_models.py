"""Models that other people wrote have the loss, outputs, gradients and buffers of one device, or are refused with one clear error."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

import partir
from partir.errors import PartirError
from tests.real_models.all import CASES
from tests.real_models.case import Case, Run, runs, worst_difference

pytestmark = pytest.mark.filterwarnings("ignore")
WORKS = {name: case for name, case in CASES.items() if not case.refused}
REFUSED = {name: case for name, case in CASES.items() if case.refused}
EVERY = [(name, run) for name, case in WORKS.items() for run in runs(case)]
QUICK_MESHES = ((2, 1, 2), (1, 2, 1))
QUICK = (  # one of each kind, the quick ones to trace; the slow runs have every model
    "transformers GPT-2", "transformers Llama", "transformers BLOOM", "transformers OPT",
    "transformers BERT (masked)", "transformers T5", "transformers ViT",
    "transformers Mixtral (batched)", "transformers Mamba", "timm MLP-Mixer", "torch nn.TransformerEncoder (norm first, padding)",
    "torch nn.MultiheadAttention (weights, padding)", "torch complex rotary attention", "torch einsum attention",
)  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_a_model_is_that_of_one_device(name: str) -> None:
    case = WORKS[name]
    mesh = QUICK_MESHES[QUICK.index(name) % len(QUICK_MESHES)]
    assert worst_difference(case, Run(case.attentions[0], "odd", mesh)) <= case.tolerance


@pytest.mark.slow
@pytest.mark.parametrize(("name", "run"), EVERY, ids=[f"{name} {run}" for name, run in EVERY])
def test_every_run(name: str, run: Run) -> None:
    assert worst_difference(CASES[name], run) <= CASES[name].tolerance


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_is_refused_with_the_users_line(name: str) -> None:
    case: Case = REFUSED[name]
    with pytest.raises(PartirError, match=r"^\S*\.py:\d+") as caught:
        worst_difference(case, Run(case.attentions[0], "odd", (2, 2, 2)))
    assert case.refused in str(caught.value)


AT_THE_END, ANYWHERE, NONE = [[0, 0, 0, 1], [0, 0, 1, 1]], [[0, 0, 0, 1], [1, 0, 0, 0]], [[0, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(("padding", "check"), [(AT_THE_END, True), (AT_THE_END, False), (ANYWHERE, True), (NONE, True), (NONE, False)])
def test_an_encoder_leaves_padding_as_it_does_on_nested_tensors(padding: list[list[int]], check: bool) -> None:
    """Zeros before the last norm where every row is padded at its end, which torch finds out from the data."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(12, 2, 24, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, torch.nn.LayerNorm(12), mask_check=check).double().eval()
    mask = torch.tensor(padding, dtype=torch.bool)
    torch.nn.init.normal_(cast(Tensor, cast(torch.nn.LayerNorm, model.norm).bias))
    x = torch.randn(2, 4, 12, dtype=torch.float64)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=mask)
        found = partir.parallelize(model, mesh=(2, 1, 2))(x, src_key_padding_mask=mask)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


class _Grouped(torch.nn.Module):
    """Rows sorted by expert, each group times its expert's matrix, by torch's own op."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 48, 96))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(rows * 2, self.weight, offs=ends)


@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 4, 1), (3, 1, 2)])
def test_grouped_products_by_torchs_own_op(mesh: tuple[int, int, int]) -> None:
    """In bfloat16: traced, the op takes no other."""
    torch.manual_seed(0)
    rows, ends = torch.randn(40, 48), torch.tensor([8, 8, 30, 40], dtype=torch.int32)
    partir.verify(_Grouped(), mesh, (rows, ends), dtype=torch.bfloat16, tolerance=3e-2)


def test_the_table_of_models_has_every_model() -> None:
    table = (Path(__file__).parent.parent / "docs" / "models.md").read_text()
    for name, case in CASES.items():
        for attention in case.attentions:
            assert f"| {name} | {attention} |" in table, f"{name} {attention}: run python -m tests.real_models.table > docs/models.md"
