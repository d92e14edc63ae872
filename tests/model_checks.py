"""What each of 8 gloo ranks checks of the models: loss, gradients and trained parameters of one device, the loss the same bit for bit."""

from __future__ import annotations

import copy
from fnmatch import fnmatch
from typing import cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from partir.api import parallelize
from partir.equivalence import relative_difference
from partir.runtime.parameters import full_gradient, full_tensor
from tests.compiled_ahead import compiled_ahead
from tests.distributed_checks import everyone_has
from tests.real_models.all import CASES
from tests.real_models.case import SIZES, Case
from tests.test_equivalence import MODELS, loss_of, reference

GLOO_MESHES = ((2, 2, 2), (8, 1, 1), (1, 8, 1), (1, 1, 8), (4, 2, 1))
OF_OTHERS = ("GPT-2", "Llama", "BERT (masked)", "T5", "ViT")
OTHERS = tuple(name for name in MODELS if name != "gpt")  # gpt is checked on all of them in module_checks


def train_beside(name: str, sizes: tuple[int, ...]) -> None:
    """Train for five AdamW steps; compare with what one device makes of it."""
    model, inputs, (loss, gradients, parameters) = reference(name)
    _, one_step, five_steps = MODELS[name]
    model = parallelize(model, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    for step in range(5):
        found = loss_of(model(**inputs))
        assert everyone_has(found.detach())
        optimizer.zero_grad()
        found.backward()
        if step == 0:
            assert relative_difference(found.detach(), loss) <= one_step
            _compare({n: cast(Tensor, full_gradient(p)) for n, p in model.named_parameters()}, gradients, one_step)
        optimizer.step()
    _compare({n: full_tensor(p) for n, p in model.named_parameters()}, parameters, five_steps)


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    scale = 1e-6 * max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        assert relative_difference(found[name].detach(), value, scale) <= tolerance, name


def _check_ahead(name: str) -> None:
    with compiled_ahead():
        train_beside(name, (2, 2, 2))


def check_bert(rank: int) -> None:
    """BERT on (2, 2, 2)."""
    _check_ahead("bert")


def check_llama(rank: int) -> None:
    """Llama on (2, 2, 2)."""
    _check_ahead("llama")


def check_hf_gpt2(rank: int) -> None:
    """Hugging Face's GPT-2 on (2, 2, 2)."""
    _check_ahead("hf_gpt2")


def everywhere(rank: int) -> None:
    """Every model but GPT on every mesh of 8 ranks that the project promises; minutes."""
    for name in OTHERS:
        for sizes in GLOO_MESHES:
            train_beside(name, sizes)


def models_of_others(rank: int) -> None:
    """Models that nobody here wrote, of odd sizes, one step on (2, 2, 2)."""
    for name in OF_OTHERS:
        _check_step(CASES[f"transformers {name}"], name)


def _check_step(case: Case, name: str) -> None:
    torch.manual_seed(0)
    built, args, kwargs = case.build(SIZES["odd"], case.attentions[0])
    model, twin = parallelize(copy.deepcopy(built).double(), (2, 2, 2)), built.double()
    args, kwargs = tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, (args, kwargs))
    found, expected = loss_of(model(*args, **kwargs)), loss_of(twin(*args, **kwargs))
    assert everyone_has(found.detach())
    assert relative_difference(found.detach(), expected.detach()) <= case.tolerance, name
    found.backward()
    expected.backward()
    known = {n: cast(Tensor, p.grad) for n, p in twin.named_parameters() if p.grad is not None}
    gradients = {n: full_gradient(p) for n, p in model.named_parameters()}
    assert {n for n, g in gradients.items() if g is not None} == set(known), name
    checked = [n for n in known if not fnmatch(n, case.rounding)]
    _compare({n: cast(Tensor, gradients[n]) for n in checked}, {n: known[n] for n in checked}, case.tolerance)
