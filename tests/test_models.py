"""Models that other people wrote have the loss, outputs, gradients and buffers of one device, or are refused with one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import partir
from partir.errors import PartirError
from tests.real_models.all import CASES
from tests.real_models.case import Case, Run, runs, worst_difference

pytestmark = pytest.mark.filterwarnings("ignore")
WORKS = {name: case for name, case in CASES.items() if not case.refused}
REFUSED = {name: case for name, case in CASES.items() if case.refused or case.refused_in_evaluation}
EVERY = [(name, run) for name, case in WORKS.items() for run in runs(case) if run.training or not case.refused_in_evaluation]
QUICK_MESHES = ((2, 1, 2), (1, 2, 1))
QUICK = (  # one of each kind, the quick ones to trace; the slow runs have every model
    "transformers GPT-2", "transformers Llama", "transformers Gemma2", "transformers BLOOM", "transformers OPT",
    "transformers BERT (masked)", "transformers ALBERT", "transformers T5", "transformers Whisper", "transformers ViT",
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
        worst_difference(case, Run(case.attentions[0], "odd", (2, 2, 2), training=bool(case.refused)))
    assert (case.refused or case.refused_in_evaluation) in str(caught.value)


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
