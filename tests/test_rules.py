"""Rule text parses into what it says, prints back, and is never run as Python."""

from __future__ import annotations

import pytest
import torch
import transformers.integrations.moe  # its ops have built-in rules  # noqa: F401

from partir import rules
from partir.errors import RuleError
from partir.rules.parser import parse
from partir.rules.syntax import Form

DESIGN = """
op aten.linear(x[* k], w[n k], b?[n]) -> y[* n]
    sum k                       # splitting k leaves partial sums
    once b over k               # the bias enters one of them only
    flops 2 * k * numel[y]      # a sympy expression in sizes

op aten.layer_norm(x[* h], shape, w?[h], b?[h], eps) -> y[* h]
    split h:                    # how to run when h is split; sum[h] and max[h] reduce over its axes
        mu = sum[h](x) / size[h]
        c  = x - mu
        y  = c * rsqrt(sum[h](c * c) / size[h] + eps) * w + b

op aten.embedding(w[v h], ids[*]) -> y[* h]
    index ids into v            # shift, mask, look up the local part
    sum v

op aten.dropout(x[*], p, train) -> y[*]
    random
"""

GOLDEN = """\
op aten.linear(x[* k], w[n k], b?[n]) -> y[* n]
    sum k
    once b over k
    flops 2 * k * numel[y]
op aten.layer_norm(x[* h], shape, w?[h], b?[h], eps) -> y[* h]
    split h:
        mu = sum[h](x) / size[h]
        c = x - mu
        y = c * rsqrt(sum[h](c * c) / size[h] + eps) * w + b
op aten.embedding(w[v h], ids[*]) -> y[* h]
    index ids into v
    sum v
op aten.dropout(x[*], p, train) -> y[*]
    random"""


def test_the_examples_of_the_design_parse_as_they_stand() -> None:
    assert "\n".join(map(str, rules.parse_rules(DESIGN).values())) == GOLDEN


def test_every_built_in_rule_prints_and_parses_back() -> None:
    for name, rule in rules.builtin().items():
        again = rules.parse_rules(str(rule))[name]
        assert again == rule, name


@pytest.mark.parametrize(
    "text",
    [
        "(x[... d@dim ...], dim?, keepdim) -> y[... 1@dim?keepdim ...]\n    sum d when not keepdim or dim == None",
        "(q[* (h*g) l d], k[* h s d], mask?[* (h*g)~ l~ s~]) -> y[* (h*g) l d]\n    whole s l",
        "(xs*[... (c'*d)@dim ...], dim) -> ys*[... (c*d)@dim ...]\n    whole c' c",
        "(x[...], dims) -> y[...@dims]\n    linear x",
        "(x[k]) -> y[k]\n    split k:\n        a = x - (x - 1) * -x / (2 - (3 - x))\n        y = a",
        "(x[...], size) -> y[...]\n    regroup\n    local size = part(shape[y], 0, len(size))\n"
        "    example x[12 2]: bool, size = [24]",
    ],
)
def test_forms_print_and_parse_back(text: str) -> None:
    form = parse(_inline(text), start="inline")
    assert isinstance(form, Form)
    assert str(form) == text


def _inline(text: str) -> str:
    """Take the parentheses around the parameters away."""
    head, arrow, tail = text.partition(") -> ")
    return head.removeprefix("(") + arrow.removeprefix(")") + tail


def test_clauses_may_stand_on_one_line() -> None:
    form = parse("x[* k], w[n k] -> y[* n]; sum k", start="inline")
    assert str(form) == "(x[* k], w[n k]) -> y[* n]\n    sum k"


def test_a_signature_may_go_over_lines() -> None:
    text = "op aten.mm(a[m k],   # rows\n           b[k n]) -> c[m n]\n    sum k\n"
    assert str(rules.parse_rules(text)["aten.mm"]) == "op aten.mm(a[m k], b[k n]) -> c[m n]\n    sum k"


def test_built_in_rules_name_ops_that_exist() -> None:
    for name in rules.builtin():
        namespace, op, *overload = name.split(".")
        packet = getattr(getattr(torch.ops, namespace), op)
        assert not overload or overload[0] in packet.overloads(), name


def test_find_prefers_the_overload_and_falls_back_to_the_pointwise_tag() -> None:
    aten = torch.ops.aten
    assert str(rules.find(aten.sum.dim_IntList)).startswith("op aten.sum.dim_IntList(x[... d@dim ...]")
    assert str(rules.find(aten.sum.default)).startswith("op aten.sum.default(x[...], dtype?) -> y[]")
    assert str(rules.find(aten.gelu.default)) == "op aten.gelu.default(self?[*], approximate?) -> y[*]"
    assert rules.find(aten.fft_fft.default) is None
    assert rules.find(aten.nonzero.default) is None


def test_rule_of_a_custom_op() -> None:
    @rules.rule("x[* k], w[n k] -> y[* n]; sum k")
    @torch.library.custom_op("partir_test::product", mutates_args=())
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w.T

    op = torch.ops.partir_test.product.default
    try:
        rule = rules.find(op)
        assert rule is not None
        x, w = torch.rand(2, 3), torch.rand(5, 3)
        binding = rule.bind((x, w), {}, product(x, w))
        assert binding.operands == ((("*0",), ("k",)), (("n",), ("k",)))
        assert binding.sums == {"k"}
    finally:
        rules.forget("partir_test.product.default")
    assert rules.find(op) is None


def test_user_files_come_before_the_built_in_rules(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "mine.rules"
    path.write_text("op aten.linear.default(x[* k], w[n k], b?[n]) -> y[* n]\n    whole k n\n")
    rules.add(path)
    try:
        found = rules.find(torch.ops.aten.linear.default)
        assert found is not None and "whole k n" in str(found)
        assert found.where == f"{path}:1"
    finally:
        rules.forget("aten.linear.default")
    assert "once b over k" in str(rules.find(torch.ops.aten.linear.default))


@pytest.mark.parametrize(
    "body",
    [
        "y = __import__(x)",
        "y = eval(x)",
        "y = exec(x)",
        "y = system(x)",
        "y = _to_copy(x)",
        "y = x.__class__",
        "y = open('gone')",
    ],
)
def test_rule_text_is_never_executed(body: str, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuleError):
        rules.parse_rules(f"op aten.relu(x[k]) -> y[k]\n    split k:\n        {body}\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", ["__import__('os').mkdir('gone')", "exec(k)", "k.__class__", "lambda: k", "Integer(k)"]
)
def test_flops_text_is_never_executed(text: str, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuleError):
        rules.parse_rules(f"op aten.relu(x[k]) -> y[k]\n    flops {text}\n")
    assert not list(tmp_path.iterdir())


def test_no_source_file_evaluates_text() -> None:
    import ast
    from pathlib import Path

    forbidden = {"eval", "exec", "compile", "sympify", "parse_expr", "literal_eval", "__import__", "import_module"}
    for path in Path(rules.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "id", getattr(node, "attr", None))
            assert name not in forbidden, f"{path.name} uses {name}"
