"""check_rules accepts the built-in rules and finds every kind of wrong rule."""

from __future__ import annotations

import pytest
import torch

from partir import rules
from partir.errors import RuleError
from partir.rules.check import Report, check_rules


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.filterwarnings("ignore")
def test_every_built_in_rule_is_right() -> None:
    report = check_rules(blocks=(2, 3))
    report.raise_on_error()
    assert len(report.of("ok")) > 800
    assert not report.of("missing")
    reasons = {finding.op for finding in report.of("not tried")}
    assert not reasons & {"aten.linear", "aten.layer_norm", "aten.embedding", "aten.scaled_dot_product_attention"}


def check(text: str) -> Report:
    return check_rules(rules.parse_rules(text))


WRONG = {
    "free but not": (
        "op aten.cumsum(x[... d@dim ...], dim) -> y[... d@dim ...]\n    example dim = 1",
        "op aten.cumsum(x[... d@dim ...], dim) -> y[... d@dim ...]\n    whole d\n    example dim = 1",
        "d",
    ),
    "bias added in every block": (
        "op aten.linear(x[* k], w[n k], b?[n]) -> y[* n]\n    sum k",
        "op aten.linear(x[* k], w[n k], b?[n]) -> y[* n]\n    sum k\n    once b over k",
        "k",
    ),
    "wrong reduction": (
        "op aten.mm(a[m k], b[k n]) -> c[m n]\n    max k",
        "op aten.mm(a[m k], b[k n]) -> c[m n]\n    sum k",
        "k",
    ),
    "recipe": (
        "op aten.mean.dim(x[... d@dim ...], dim) -> y[...]\n    split d:\n        y = sum[d](x)\n    example dim = [1]",
        "op aten.mean.dim(x[... d@dim ...], dim) -> y[...]\n"
        "    split d:\n        y = sum[d](x) / size[d]\n    example dim = [1]",
        "d",
    ),
    "gradient of a recipe": (
        "op aten.amax(x[... d@dim ...], dim) -> y[...]\n    split d:\n        y = max[d](x)\n    example dim = [1]",
        "op aten.amax(x[... d@dim ...], dim) -> y[...]\n    split d:\n        hit = eq(x, max[d](x))\n"
        "        y = sum[d](where(hit, x, 0)) / sum[d](where(hit, 1, 0))\n    example dim = [1]",
        "d",
    ),
    "no index": (
        "op aten.embedding(w[v h], ids[*]) -> y[* h]\n    sum v",
        "op aten.embedding(w[v h], ids[*]) -> y[* h]\n    sum v\n    index ids into v",
        "v",
    ),
    "global size": (
        "op aten.expand(x[*], size) -> y[*]\n    example x[12 1], size = [12, 12]",
        "op aten.expand(x[*], size) -> y[*]\n    local size = shape[y]\n    example x[12 1], size = [12, 12]",
        "*0",
    ),
    "minor and major": (
        "op aten.repeat_interleave.self_int(x[* d], repeats, dim) -> y[* (r*d)]\n    whole r\n"
        "    example repeats = 2, dim = 1, x[12 12]",
        "op aten.repeat_interleave.self_int(x[* d], repeats, dim) -> y[* (d*r)]\n    whole r\n"
        "    example repeats = 2, dim = 1, x[12 12]",
        "d",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_found(name: str) -> None:
    bad, good, factor = WRONG[name]
    report = check(bad)
    assert factor in {finding.factor for finding in report.of("wrong")}, str(report)
    with pytest.raises(RuleError, match="rules that are wrong:"):
        report.raise_on_error()
    check(good).raise_on_error()


def test_a_wrong_gradient_alone_is_found() -> None:
    report = check(WRONG["gradient of a recipe"][0])
    assert "the gradient of operand 0 differs" in str(report.of("wrong")[0])


def test_a_missing_split_is_reported() -> None:
    report = check("op aten.mm(a[m k], b[k n]) -> c[m n]\n    whole m k")
    assert {(finding.factor, finding.detail) for finding in report.of("missing")} == {
        ("m", "m could be split"),
        ("k", "k could be summed"),
    }
    report.raise_on_error()


def test_the_report_is_a_table_and_says_what_was_not_tried() -> None:
    text = str(
        check("op aten.dropout(x[*], p, train) -> y[*]\n    random\n\nop aten.mv(a[m k], v[k]) -> y[m]\n    sum k")
    )
    assert text.splitlines()[0].split() == ["op", "factor", "kind", "verdict", "detail"]
    assert "not tried  random" in text
    assert text.splitlines()[-1] == "2 ok, 0 wrong, 0 missing, 2 not tried"


def test_ops_can_be_chosen() -> None:
    report = check_rules(ops=[torch.ops.aten.mm.default, "aten.mv"], blocks=(2,))
    assert {finding.op for finding in report.findings} == {"aten.mm.default", "aten.mv"}


def test_pointwise_tag() -> None:
    check_rules(ops=[torch.ops.aten.gelu.default, torch.ops.aten.tanh.default], blocks=(2,)).raise_on_error()
