"""torchrun over two hosts trains as one device does."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.two_hosts import LOOPBACK, namespaces, run_on_both, why_no_namespaces

SCRIPT = str(Path(__file__).resolve().parent.parent / "examples" / "train_gpt.py")
SMALL = "--steps 3 --batch 4 --seq 16 --hidden 32 --layers 1 --heads 4 --dtype float64 --compare".split()

pytestmark = [pytest.mark.timeout(300), pytest.mark.ranks]


@pytest.mark.parametrize("network", ["namespaces", pytest.param("loopback", marks=pytest.mark.slow)])
def test_two_hosts(network: str) -> None:
    reason = why_no_namespaces() if network == "namespaces" else ""
    if reason:
        pytest.skip(reason)
    with namespaces() if network == "namespaces" else nullcontext(LOOPBACK) as hosts:
        first, second = run_on_both(hosts, 1, [SCRIPT, "--mesh", "2,1,1", *SMALL], timeout=280)
    assert first.returncode == 0 and second.returncode == 0, first.stderr + second.stderr
    difference = float(first.stdout.split("largest difference of the two losses in 3 steps: ")[1].splitlines()[0])
    assert difference < 1e-12
