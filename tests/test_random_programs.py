"""Random programs on random meshes equal one device, in results and gradients, or are refused; never anything else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from torch import Tensor, nn

import partir
from partir import rules
from partir.errors import LayoutError, RuleError, VerifyError
from partir.rules.registry import builtin, find_in
from tests.random_programs import Program, Step, programs

Drawn = tuple[Program, Tensor, tuple[int, int, int], dict[str, str]]
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]
WITHOUT_SHRINKING = [Phase.explicit, Phase.reuse, Phase.generate]  # a smaller program takes longer to find than to read


def check(drawn: Drawn) -> None:
    program, x, mesh, pin = drawn
    try:
        partir.verify(program, mesh, x, pin=pin, tolerance=1e-7)
    except (RuleError, LayoutError) as refusal:
        event(f"refused: {type(refusal).__name__}")


@given(programs())
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=SLOW)
def test_20_random_programs(drawn: Drawn) -> None:
    check(drawn)


@pytest.mark.slow
@pytest.mark.timeout(7200)  # 16 minutes of an idle core
@given(programs())
@settings(max_examples=500, deadline=None, suppress_health_check=SLOW, print_blob=True, phases=WITHOUT_SHRINKING)
def test_500_random_programs(drawn: Drawn) -> None:
    check(drawn)


def test_a_wrong_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: a cumulative sum that claims to be free is not what one device computes."""
    wrong = rules.parse_rules("op aten.cumsum(x[...], dim, dtype?) -> y[...]\n    linear x\n")
    monkeypatch.setitem(builtin(), "aten.cumsum", wrong["aten.cumsum"])
    find_in.cache_clear()
    try:
        program = Program([Step("linear", nn.functional.linear, (0,), ((8, 8),)), Step("cumsum", lambda x: x.cumsum(0), (1,))])
        with pytest.raises(VerifyError, match="differs from one device's"):
            check((program, torch.randn(8, 8, dtype=torch.float64), (2, 1, 1), {}))
    finally:
        find_in.cache_clear()
