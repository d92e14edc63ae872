"""`rules=` of parallelize, plan and verify: rule files by path, for one model."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partir
from partir import rules
from partir.errors import RuleError
from partir.rules.registry import user_rules

WHOLE = "op aten.gelu(x[... k], approximate) -> y[... k]\n    whole k\n"
X = torch.randn(8, 8)


def block() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "whole.rules"
    path.write_text(WHOLE)
    return path


def layout(**options: Any) -> str:
    """Return the GELU's layout: its hidden dim is whole where the file says so, and split over y by the built-in rule."""
    return str(partir.plan(block(), (1, 4, 1), X, **options).layouts["gelu"])


def test_a_file_holds_for_the_model_that_it_is_given_to(whole: Path) -> None:
    assert layout(rules=whole) == "f32[8@x.z, 16]"
    assert layout() == "f32[8@x.z, 16@y]"
    assert user_rules().keys().isdisjoint({"aten.gelu"})


def test_later_compilations_and_copies_keep_the_file(whole: Path) -> None:
    model = partir.parallelize(block(), (1, 4, 1), rules=[whole, str(whole)])  # named twice, it counts once
    twin = copy.deepcopy(model)
    whole.unlink()  # read once, by parallelize
    again = pickle.loads(pickle.dumps(model))
    for each in (model, twin, again):
        for rows in (8, 4):
            assert torch.allclose(each(X[:rows]), block()(X[:rows]), atol=1e-6)
        texts = [program.texts["annotated"] for program in each.__dict__["_partir"].programs()]
        assert len(texts) == 2 and all(", 16] " in text.partition("= aten.gelu")[0].splitlines()[-1] for text in texts)


def test_verify_takes_files(whole: Path) -> None:
    assert partir.verify(block(), (2, 2, 2), X, rules=whole).worst < 1e-10


def test_a_files_rule_comes_before_the_users_own(whole: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.rules"
    other.write_text(WHOLE)
    rules.add(other)
    try:
        with rules.using(rules.read(whole)):
            found = rules.find(torch.ops.aten.gelu.default)
            assert found is not None and found.where == f"{whole}:1"
        found = rules.find(torch.ops.aten.gelu.default)
        assert found is not None and found.where == f"{other}:1"
    finally:
        rules.forget("aten.gelu")


REFUSED = {
    "no text": (b"\xff\xfe\x00op", "not text: byte 0 is no UTF-8; a rule file is plain text"),
    "syntax": (b"op aten.gelu(x[k]) -> y[k]\n    hole k\n", "bad.rules:2:5: unknown clause `hole`"),
    "schema": (b"op aten.relu(x[k], w[k]) -> y[k]\n", "bad.rules:1: aten.relu: the rule names 2 parameters (x, w), the op has 1"),
    "no op": (b"op aten.gelo(x[k]) -> y[k]\n", "bad.rules:1: torch has no op aten.gelo"),
    "two files": (WHOLE.encode(), "bad.rules:1: aten.gelu already has a rule at"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_leaves_the_module_as_it_was(name: str, whole: Path, tmp_path: Path) -> None:
    content, message = REFUSED[name]
    bad, model = tmp_path / "bad.rules", block()
    bad.write_bytes(content)
    for refuse in (partir.parallelize, partir.plan):
        with pytest.raises(RuleError) as caught:
            refuse(model, (2, 1, 1), X, rules=[whole, bad])
        assert message in str(caught.value)
    assert type(model) is nn.Sequential and model.__dict__.keys() == block().__dict__.keys()
    assert torch.equal(model(X), block()(X))
    partir.parallelize(model, (2, 1, 1), rules=whole)(X).sum().backward()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=r"none\.rules: No such file or directory; a rule file is given by its path"):
        partir.parallelize(block(), (2, 1, 1), rules=tmp_path / "none.rules")


def test_a_refused_example_leaves_the_module_as_it_was(whole: Path) -> None:
    class Singular(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return torch.pdist(super().forward(input))

    model = Singular(8, 8)
    expected = model(X)
    with pytest.raises(RuleError, match="_pdist_forward"):
        partir.parallelize(model, (2, 1, 1), X)
    assert type(model) is Singular and torch.equal(model(X), expected)
    with pytest.raises(RuleError, match="_pdist_forward"):  # and not that it is parallelized already
        partir.parallelize(model, (2, 1, 1), X)
