"""A part of torch's own database of ops in blocks, against the op itself; `python -m benchmarks.op_coverage` tries all of it."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks import op_coverage
from benchmarks.op_coverage import Row, summary, table, try_apart, try_op
from benchmarks.opinfo import Split, database, samples_of, splits_of
from benchmarks.opinfo_trial import Outcome, expect, try_sample
from partir import rules

IN_BLOCKS = """
    add addmm addr amax argmax atan2 baddbmm bmm bucketize cdist clamp_max cumprod cumsum diagonal diff dot expand fft.fft fft.irfft
    flip
    gather index_add index_fill index_put index_select kthvalue linalg.cholesky linalg.inv linalg.solve logcumsumexp logsumexp masked.mean
    matmul median mode nn.functional.avg_pool2d nn.functional.batch_norm nn.functional.conv2d
    nn.functional.conv_transpose2d nn.functional.group_norm nn.functional.max_pool2d nn.functional.nll_loss nn.functional.pixel_shuffle
    nn.functional.unfold norm outer prod roll scatter_add scatter_reduce.sum softmax sort special.i1 std topk tril unfold
    view_as_complex where
""".split()
WHOLE = ["histc", "linalg.tensorinv", "masked_scatter", "searchsorted"]
REFUSED = ["masked_select", "nonzero", "unique"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def outcomes(name: str, most: int = 4, splits: int = 4) -> list[Outcome]:
    """Try samples of an op until one split has computed in blocks."""
    found: list[Outcome] = []
    for sample in samples_of(database()[name], most):
        expected = expect(sample)
        if expected is not None:
            found += try_sample(sample, expected, list(splits_of(sample.tensors))[:splits])
        if any(outcome.verdict == "right" and outcome.share < 1 for outcome in found):
            break
    return found


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_in_blocks(name: str) -> None:
    found = outcomes(name)
    bad = [outcome.detail for outcome in found if outcome.verdict in ("wrong", "crashed")]
    assert not bad, bad[0]
    assert any(outcome.verdict == "right" and outcome.share < 1 for outcome in found), found[:1]


@pytest.mark.parametrize("name", WHOLE)
def test_right_whole(name: str) -> None:
    assert summary(outcomes(name, 1, 2)).verdict == "whole"


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str) -> None:
    tried = summary(outcomes(name, 1, 1))
    assert tried.verdict == "refused" and "depends on data" in tried.reason


def test_a_wrong_rule_is_reported_wrong() -> None:
    """A running sum whose dim is called free is right only where it is split at its end: nowhere."""
    right = rules.find(torch.ops.aten.cumsum.default)
    assert right is not None
    rules.rule("x[... d@dim ...], dim, dtype? -> y[... d@dim ...]")(torch.ops.aten.cumsum.default)
    try:
        assert summary(outcomes("cumsum")).verdict == "wrong"
    finally:
        rules.forget("aten.cumsum.default")
    assert summary(outcomes("cumsum")).verdict == "blocks"


def test_splits_are_in_2_and_3_blocks_or_in_5_or_7() -> None:
    splits = list(splits_of([torch.zeros(6, 5), torch.zeros(1, 11), torch.zeros(0, 2)]))
    assert splits == [Split(0, 0, 2), Split(0, 0, 3), Split(0, 1, 5)]


def test_the_table_counts_verdicts() -> None:
    row = try_op("sinh", 1, 30, dtensor=True)
    assert (row.partir.verdict, row.dtensor.verdict, row.partir.share) == ("blocks", "blocks", 0.5)
    text = table([row, Row("never", 0, summary([]), summary([Outcome("wrong", "why")]))])
    assert "| blocks | 1 | 1 |" in text and "| wrong | 0 | 1 |" in text and "| never | 0 | not tried |" in text


def test_an_op_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_apart("sinh", 1, 30, False) == try_op("sinh", 1, 30, False)

    def die(*_: Any) -> None:
        os._exit(3)

    def hang(*_: Any) -> None:
        threading.Event().wait(60)

    monkeypatch.setattr(op_coverage, "try_op", die)
    died = try_apart("sinh", 1, 0, False).partir
    assert (died.verdict, died.reason) == ("crashed", "the process ended with 3")
    monkeypatch.setattr(op_coverage, "HANGS", 0)
    monkeypatch.setattr(op_coverage, "try_op", hang)
    assert try_apart("sinh", 1, 0, False).partir.reason == "the process did not end"
