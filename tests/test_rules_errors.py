"""Every mistake in rule text is an error that says where and what; its corrected twin is accepted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from partir import rules
from partir.errors import RuleError

CASES = {
    "syntax": (
        "op aten.relu(x[k] -> y[k]\n",
        "op aten.relu(x[k]) -> y[k]\n",
        "f.rules:1:19: unexpected `->`; expected `)`\n    op aten.relu(x[k] -> y[k]\n                      ^",
    ),
    "character": (
        "op aten.relu(x[k]) -> y[k] $\n",
        "op aten.relu(x[k]) -> y[k]\n",
        "f.rules:1:28: unexpected character `$`",
    ),
    "unknown clause": (
        "op aten.relu(x[k]) -> y[k]\n    hole k\n",
        "op aten.relu(x[k]) -> y[k]\n    whole k\n",
        "f.rules:2:5: unknown clause `hole`; known: sum, max, whole, free, once,",
    ),
    "unknown entry": (
        "rule aten.relu(x[k]) -> y[k]\n",
        "op aten.relu(x[k]) -> y[k]\n",
        "f.rules:1:1: unknown entry `rule`; an entry starts with `op` or `place`",
    ),
    "unknown factor": (
        "op aten.relu(x[k]) -> y[k]\n    whole q\n",
        "op aten.relu(x[k]) -> y[k]\n    whole k\n",
        "f.rules:2:11: unknown factor `q`; this op has k\n        whole q\n              ^",
    ),
    "unknown operand": (
        "op aten.linear(x[* k], w[n k], b?[n]) -> y[* n]\n    sum k\n    once c over k\n",
        "op aten.linear(x[* k], w[n k], b?[n]) -> y[* n]\n    sum k\n    once b over k\n",
        "f.rules:3:10: unknown operand `c`; this op has b, w, x",
    ),
    "unknown attribute": (
        "op aten.softmax.int(x[... d@dims ...], dim) -> y[... d@dim ...]\n    whole d\n",
        "op aten.softmax.int(x[... d@dim ...], dim) -> y[... d@dim ...]\n    whole d\n",
        "f.rules:1:29: unknown attribute `dims`; this op has dim",
    ),
    "vanishing factor": (
        "op aten.mm(a[m k], b[k n]) -> c[m n]\n",
        "op aten.mm(a[m k], b[k n]) -> c[m n]\n    sum k\n",
        "f.rules:1:16: factor `k` does not reach a result: say sum, max, whole, free or split",
    ),
    "duplicate name": (
        "op aten.mm(a[m k], a[k n]) -> c[m n]\n    sum k\n",
        "op aten.mm(a[m k], b[k n]) -> c[m n]\n    sum k\n",
        "f.rules:1:20: the name `a` stands twice in one signature",
    ),
    "two clauses": (
        "op aten.mm(a[m k], b[k n]) -> c[m n]\n    sum k\n    whole k\n",
        "op aten.mm(a[m k], b[k n]) -> c[m n]\n    sum k\n    whole m\n",
        "f.rules:3:11: factor `k` is in two clauses: sum and whole",
    ),
    "duplicate op": (
        "op aten.relu(x[*]) -> y[*]\n\nop aten.relu(x[*]) -> y[*]\n",
        "op aten.relu(x[*]) -> y[*]\n\nop aten.gelu(x[*], how) -> y[*]\n",
        "f.rules:3: aten.relu already has a rule at f.rules:1",
    ),
    "too many parameters": (
        "op aten.mm(a[m k], b[k n], bias[n]) -> c[m n]\n    sum k\n",
        "op aten.mm.default(a[m k], b[k n]) -> c[m n]\n    sum k\n",
        "f.rules:1: aten.mm: the rule names 3 parameters (a, b, bias), the op has 2 (self, mat2)",
    ),
    "too few parameters": (
        "op aten.mm(a[m k]) -> c[m k]\n",
        "op aten.mm(a[m k], b[k n]) -> c[m n]\n    sum k\n",
        "f.rules:1: aten.mm: the rule names 1 parameters (a), the op has 2 (self, mat2) and needs mat2",
    ),
    "attribute for a tensor": (
        "op aten.mm(a[m k], b) -> c[m k]\n",
        "op aten.mm(a[m k], b[k n]) -> c[m n]\n    sum k\n",
        "f.rules:1: aten.mm: `b` has no dims, but the op's mat2 is a Tensor",
    ),
    "result count": (
        "op aten.mm(a[m k], b[k n]) -> c[m n], d[m]\n    sum k\n",
        "op aten.mm(a[m k], b[k n]) -> c[m n]\n    sum k\n",
        "f.rules:1: aten.mm: the rule has 2 results, the op has 1",
    ),
    "no such op": (
        "op aten.rellu(x[*]) -> y[*]\n",
        "op aten.relu(x[*]) -> y[*]\n",
        "f.rules:1: torch has no op aten.rellu",
    ),
    "recipe name": (
        "op aten.relu(x[k]) -> y[k]\n    split k:\n        y = z + 1\n",
        "op aten.relu(x[k]) -> y[k]\n    split k:\n        z = x\n        y = z + 1\n",
        "f.rules:3:13: unknown name `z`; known here: x",
    ),
    "recipe result": (
        "op aten.relu(x[k]) -> y[k]\n    split k:\n        z = x\n",
        "op aten.relu(x[k]) -> y[k]\n    split k:\n        y = x\n",
        "f.rules:2:11: the recipe for `k` never assigns the result `y`",
    ),
    "recipe function": (
        "op aten.relu(x[k]) -> y[k]\n    split k:\n        y = rsqrtt(x)\n",
        "op aten.relu(x[k]) -> y[k]\n    split k:\n        y = rsqrt(x)\n",
        "f.rules:3:13: unknown function `rsqrtt`: no elementwise aten op has this name",
    ),
    "reduction": (
        "op aten.relu(x[k]) -> y[k]\n    split k:\n        y = mean[k](x)\n",
        "op aten.relu(x[k]) -> y[k]\n    split k:\n        y = sum[k](x)\n",
        "f.rules:3:13: unknown reduction `mean`; known: sum, max",
    ),
    "list factor": (
        "op aten.relu(x[k']) -> y[k']\n",
        "op aten.relu(x[k]) -> y[k]\n",
        "f.rules:1:16: `k'` differs in each tensor of a list, and `x` is no list",
    ),
    "size": (
        "op aten.relu(x[2]) -> y[2]\n",
        "op aten.relu(x[1]) -> y[1]\n",
        "f.rules:1:16: a dim is a factor or 1, not 2",
    ),
    "condition": (
        "op aten.dropout(x[*], p, train) -> y[*]\n    random when q > 0\n",
        "op aten.dropout(x[*], p, train) -> y[*]\n    random when p > 0\n",
        "f.rules:2:17: unknown attribute `q`; this op has p, train",
    ),
    "early end": (
        "op aten.relu(x[k]) -> ",
        "op aten.relu(x[k]) -> y[k]",
        "f.rules:1:22: unexpected end of line; expected a name",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_mistake_and_twin(name: str) -> None:
    bad, good, message = CASES[name]
    with pytest.raises(RuleError) as error:
        rules.parse_rules(bad, "f.rules")
    assert message in str(error.value)
    rules.parse_rules(good, "f.rules")


def test_load_names_the_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "mine.rules"
    path.write_text("\n# comment\nop aten.relu(x[k]) -> y[k]\n    hole k\n")
    with pytest.raises(RuleError, match=r"mine\.rules:4:5: unknown clause `hole`"):
        rules.load(path)
    path.write_text("\n# comment\nop aten.relu(x[k]) -> y[k]\n    whole k\n")
    assert list(rules.load(path)) == ["aten.relu"]


def test_binding_a_call_that_fits_no_form_lists_the_reasons() -> None:
    rule = rules.find(torch.ops.aten.mm.default)
    assert rule is not None
    with pytest.raises(RuleError) as error:
        rule.bind((torch.rand(2, 3), torch.rand(4, 5)), {}, torch.rand(2, 5))
    assert "the rule of aten.mm.default does not fit self[2, 3], mat2[4, 5]" in str(error.value)
    assert "(a[m k], b[k n]) -> c[m n]: factor k has sizes 3 and 4" in str(error.value)
    assert rule.bind((torch.rand(2, 3), torch.rand(3, 5)), {}, torch.rand(2, 5)).sums == {"k"}


def test_a_tensor_that_the_rule_does_not_mention_is_refused() -> None:
    table = rules.parse_rules("op aten.linear.default(x[* k], w[n k]) -> y[* n]\n    sum k\n")
    rule = table["aten.linear.default"]
    x, w, b = torch.rand(2, 3), torch.rand(5, 3), torch.rand(5)
    with pytest.raises(RuleError, match="the rule does not say how tensor bias is split"):
        rule.bind((x, w, b), {}, torch.rand(2, 5))
    assert rule.bind((x, w), {}, torch.rand(2, 5)).sums == {"k"}


def test_rule_decorator_refuses_functions_without_types_and_wrong_arity() -> None:
    with pytest.raises(RuleError, match="plain: a rule needs the types of the arguments and of the result"):

        @rules.rule("x[*] -> y[*]")
        def plain(x):  # type: ignore[no-untyped-def]
            return x

    with pytest.raises(RuleError, match="is no torch op and no function"):
        rules.rule("x[*] -> y[*]")(nn.Identity())

    with pytest.raises(RuleError, match=r"aten.relu.default: the rule names 2 parameters \(x, w\), the op has 1"):
        rules.rule("x[* k], w[n k] -> y[* n]; sum k")(torch.ops.aten.relu.default)
