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
    "a sum left out": (
        "op aten.mv(a[m k], v[k]) -> y[m]\n    free k",
        "op aten.mv(a[m k], v[k]) -> y[m]\n    sum k",
        "k",
    ),
    "a maximum that is a sum": (
        "op aten.logsumexp(x[... d@dim ...], dim, keepdim) -> y[... 1@dim?keepdim ...]\n    sum d\n    example dim = [1]",
        "op aten.logsumexp(x[... d@dim ...], dim, keepdim) -> y[... 1@dim?keepdim ...]\n    whole d\n    example dim = [1]",
        "d",
    ),
    "free, but the op mixes its rows": (
        "op aten.flip(x[... d@dims ...], dims) -> y[... d@dims ...]\n    example dims = [1]",
        "op aten.flip(x[... d@dims ...], dims) -> y[... d@dims ...]\n    whole d\n    example dims = [1]",
        "d",
    ),
    "softmax in parts": (
        "op aten.softmax.int(x[... d@dim ...], dim) -> y[... d@dim ...]\n    example dim = 1",
        "op aten.softmax.int(x[... d@dim ...], dim) -> y[... d@dim ...]\n    whole d\n    example dim = 1",
        "d",
    ),
    "dims in the wrong order": (
        "op aten.t(x[a b]) -> y[a b]\n    example x[12 12]",
        "op aten.t(x[a b]) -> y[b a]\n    example x[12 12]",
        "a",
    ),
    "batch and row taken for each other": (
        "op aten.bmm(a[b m k], c[b k n]) -> y[m b n]\n    sum k",
        "op aten.bmm(a[b m k], c[b k n]) -> y[b m n]\n    sum k",
        "b",
    ),
    "a denominator of one block": (
        "op aten.var.correction(x[... d@dim ...], dim?, correction?) -> y[...]\n    split d:\n        c = x - sum[d](x) / size[d]\n"
        "        y = sum[d](c * c) / size[d]\n    example dim = [1]",
        "op aten.var.correction(x[... d@dim ...], dim?, correction?) -> y[...]\n    split d:\n        c = x - sum[d](x) / size[d]\n"
        "        y = sum[d](c * c) / (size[d] - default(correction, 1))\n    example dim = [1]",
        "d",
    ),
    "a gradient cut off": (
        "op aten.mean.dim(x[... d@dim ...], dim) -> y[...]\n    split d:\n        y = detach(sum[d](x)) / size[d]\n    example dim = [1]",
        "op aten.mean.dim(x[... d@dim ...], dim) -> y[...]\n    split d:\n        y = sum[d](x) / size[d]\n    example dim = [1]",
        "d",
    ),
    "the size of another dim": (
        "op aten.new_zeros(x[...], size) -> y[* k]\n    free ...\n    local size = shape[x]\n    example size = [12, 24]",
        "op aten.new_zeros(x[...], size) -> y[* k]\n    free ...\n    local size = shape[y]\n    example size = [12, 24]",
        "k",
    ),
    "an index into the wrong dim": (
        "op aten.index_select(x[a c], dim, at[e]) -> y[a e]\n    index at into a\n    sum c\n    example dim = 1",
        "op aten.index_select(x[a c], dim, at[e]) -> y[a e]\n    index at into c\n    sum c\n    example dim = 1",
        "c",
    ),
    "added in every block": (
        "op aten.index_add(x[c k], dim, at[e], source[e k]) -> y[c k]\n    sum e\n    whole c\n    example dim = 0",
        "op aten.index_add(x[c k], dim, at[e], source[e k]) -> y[c k]\n    sum e\n    once x over e\n    whole c\n    example dim = 0",
        "e",
    ),
    "groups of a convolution": (
        "op aten.conv1d.default(x[b (g*c) l], w[(g*o) c t], bias?[(g*o)], stride, padding, dilation, groups) -> y[b (g*o) m]\n"
        "    sum c\n    once bias over c\n    whole l t m\n    example x[2 24 14], w[24 4 3], bias[24], groups = 6",
        "op aten.conv1d.default(x[b (g*c) l], w[(g*o) c t], bias?[(g*o)], stride, padding, dilation, groups) -> y[b (g*o) m]\n"
        "    sum c\n    once bias over c\n    whole l t m\n    local groups = size[g]\n"
        "    example x[2 24 14], w[24 4 3], bias[24], groups = 6",
        "g",
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


def test_there_are_twenty() -> None:
    assert len(WRONG) == 20


@pytest.mark.parametrize("name", ["gradient of a recipe", "a gradient cut off"])
def test_a_wrong_gradient_alone_is_found(name: str) -> None:
    report = check(WRONG[name][0])
    assert "the gradient of operand 0 differs" in str(report.of("wrong")[0])


def test_blocks_of_blocks_are_what_two_axes_on_one_dim_make() -> None:
    report = check_rules(rules.parse_rules("op aten.mm(a[m k], b[k n]) -> c[m n]\n    max k"), blocks=((2, 3),))
    assert report.of("wrong")[0].detail.startswith("2x3 blocks: result 0 differs at [")
    check_rules(ops=["aten.mm", "aten.layer_norm", "aten.embedding"], blocks=((2, 2), (2, 3))).raise_on_error()


def test_a_finding_holds_the_call_that_failed() -> None:
    assert check(WRONG["wrong reduction"][0]).of("wrong")[0].call == "self float64[12, 12], mat2 float64[12, 12]"


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


def test_a_rule_of_a_library_that_is_not_imported_is_not_tried() -> None:
    rule = rules.parse_rules("op aten.outer(a[m], b[n]) -> c[m n]")["aten.outer"]
    (finding,) = check_rules({"no_such_library.outer": rule}).findings
    assert (finding.verdict, finding.detail) == ("not tried", "the library that defines this op is not imported")
