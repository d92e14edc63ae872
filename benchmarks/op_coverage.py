"""Try every op of torch's own database in blocks, by partir and by DTensor, and write docs/ops.md.

    python -m benchmarks.op_coverage                      all ops; many minutes
    python -m benchmarks.op_coverage --ops sum norm.fro   these anew, the others as build/ops.json has them

Each dim of each tensor of each sample is split in 2 and in 3 blocks (5 or 7 where neither divides), one split a program.
Needs the test extra: torch's database imports expecttest.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.opinfo import Split, database, samples_of, splits_of
from benchmarks.opinfo_trial import Outcome, expect, try_sample

HANGS = 600  # seconds that one split may take, beyond the time for an op
VERDICTS = {
    "blocks": "right, and at least one split computes in blocks",
    "whole": "right, but every split computes on whole tensors",
    "drawn": "random numbers: shapes and dtypes are right, values are not compared",
    "refused": "every split is refused with a message",
    "wrong": "a split gives other numbers",
    "crashed": "a split fails with an error that no message explains",
    "not tried": "no dense tensor that can be split, or the op itself does not run here",
}


@dataclass(frozen=True)
class Tried:
    """What all splits of all samples of one op showed: the verdict, how many splits had which outcome, one rank's least share."""

    verdict: str
    counts: dict[str, int] = field(default_factory=dict[str, int])
    share: float = 1.0
    reason: str = ""


@dataclass(frozen=True)
class Row:
    """One op: how many samples were tried, and the outcomes of partir and of DTensor."""

    op: str
    samples: int
    partir: Tried
    dtensor: Tried


def try_op(name: str, most: int, seconds: int, dtensor: bool) -> Row:
    """Try one op.

    Args:
        most: the largest number of samples.
        seconds: the longest time for each of partir and DTensor; what was tried until then counts.
        dtensor: try DTensor too.
    """
    from benchmarks.opinfo_dtensor import try_dtensor

    op = database()[name]
    pairs = [(sample, expected) for sample in samples_of(op, most) if (expected := expect(sample)) is not None]
    mine, theirs = list[Outcome](), list[Outcome]()
    deadline = time.perf_counter() + seconds
    for sample, expected in pairs:
        mine.extend(try_sample(sample, expected, before(deadline, splits_of(sample.tensors))))
    deadline = time.perf_counter() + seconds
    for sample, expected in pairs if dtensor else ():
        for split in before(deadline, splits_of(sample.tensors)):
            outcome = try_dtensor(sample, expected, split)
            drawn = expected.drawn and outcome.verdict in ("right", "wrong")
            theirs.append(Outcome("drawn") if drawn else outcome)
            if theirs[-1].verdict == "drawn" or theirs[-1].share < 1:
                break
    return Row(name, len(pairs), summary(mine), summary(theirs))


def try_apart(name: str, most: int, seconds: int, dtensor: bool) -> Row:
    """Try one op in a process of its own, a copy of this one: a rank of DTensor that never ends is a thread that nothing can stop.

    Arguments as for `try_op`. A process that dies, or does not answer in time, is a crash.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(sender, name, most, seconds, dtensor))
    child.start()
    sender.close()
    try:
        row = receiver.recv() if receiver.poll(HANGS + 2 * seconds) else _crashed(name, "the process did not end")
    except EOFError:
        child.join()
        row = _crashed(name, f"the process ended with {child.exitcode}")
    child.kill()
    child.join()
    return row


def _answer(sender: Connection, name: str, most: int, seconds: int, dtensor: bool) -> None:
    sender.send(try_op(name, most, seconds, dtensor))


def _crashed(name: str, reason: str) -> Row:
    return Row(name, 0, Tried("crashed", {"crashed": 1}, reason=reason), Tried("not tried"))


def summary(outcomes: Sequence[Outcome]) -> Tried:
    """Return the verdict on an op from the outcomes of its splits."""
    counts = dict(Counter(outcome.verdict for outcome in outcomes))
    share = min((outcome.share for outcome in outcomes if outcome.verdict in ("right", "drawn")), default=1.0)
    worst = next((kind for kind in ("crashed", "wrong") if kind in counts), None)
    verdict = worst or ("drawn" if "drawn" in counts else ("blocks" if share < 1 else "whole") if "right" in counts else "refused")
    telling = worst or "refused"
    reason = next((outcome.detail for outcome in outcomes if outcome.verdict == telling), "")
    return Tried(verdict if outcomes else "not tried", counts, share, " ".join(reason.split())[:300])


def before(deadline: float, splits: Iterable[Split]) -> Iterator[Split]:
    """Yield splits until a time of `time.perf_counter`: between them, since nothing that torch traces may be interrupted."""
    for split in splits:
        if time.perf_counter() > deadline:
            return
        yield split


def table(rows: Sequence[Row]) -> str:
    """Return the document."""
    counted = {side: Counter(getattr(row, side).verdict for row in rows) for side in ("partir", "dtensor")}
    num_samples, version = sum(row.samples for row in rows), torch.__version__.split("+")[0]
    lines = [HEADER.strip(), "", f"{len(rows)} of {len(database())} ops of torch {version}, {num_samples} samples.", ""]
    lines += ["| verdict | partir | DTensor | |", "|---|---|---|---|"]
    lines += [f"| {kind} | {counted['partir'][kind]} | {counted['dtensor'][kind]} | {text} |" for kind, text in VERDICTS.items()]
    for side in ("partir", "dtensor"):
        splits = sum((Counter(getattr(row, side).counts) for row in rows), Counter[str]())
        lines += ["", f"Splits, {side}: " + ", ".join(f"{count} {kind}" for kind, count in splits.most_common()) + "."]
    lines += ["", "| op | samples | partir | share | right / refused | DTensor | partir's first refusal |", "|---|---|---|---|---|---|---|"]
    return "\n".join([*lines, *map(_line, rows)]) + "\n"


def _line(row: Row) -> str:
    mine = row.partir
    share = f"{mine.share:.2f}" if mine.verdict in ("blocks", "whole", "drawn") else ""
    counts = f"{mine.counts.get('right', 0) + mine.counts.get('drawn', 0)} / {mine.counts.get('refused', 0)}"
    reason = re.sub(r"(?<!\S)/\S*/", "", mine.reason).replace("|", "\\|")[:160]  # no folders of this machine
    return f"| {row.op} | {row.samples} | {mine.verdict} | {share} | {counts} | {row.dtensor.verdict} | {reason} |"


HEADER = """
# The ops of torch, in blocks

Written by `python -m benchmarks.op_coverage`, `--samples` as the column says; do not edit.

Every op of torch's own database (OpInfo, `torch.testing._internal.common_methods_invocations.op_db`) with its own sample inputs,
in float64 where the op takes it. Each dim of each tensor of a sample is split in 2 and in 3 blocks, in 5 or 7 where neither
divides it, one split a program. partir traces the op, chooses layouts with that tensor split and the others laid as the op wants
them, lowers it, derives its backward and runs both on simulated ranks. Results and the gradient of every tensor are compared with
the op itself (relative to the largest element: 1e-9 in float64, 1e-5 in float32; integers exactly; no gradient and a gradient of
zero are the same).

*share* is the part that one rank holds of all elements that the op's computations read and write, views left out, at its best
split: 0.5 in 2 blocks is an even split, 1.00 means that everything was gathered first. An op is *in blocks* where it is below 1
at one split at least, and no split is wrong.

DTensor gets the same samples, the same tensor as `Shard(dim)` and the others as `Replicate()`, on ranks that are threads with a
real (threaded) process group, and the same comparison. It counts as in blocks where a computing op reads a tensor as large as the
split tensor's block: more generous than *share*, since what follows may be gathered. After the first such split of a sample its
other splits are not tried, so that a wrong number there would not be seen. An error of any kind counts as refused for DTensor.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 where an op is wrong or crashed."""
    options = _options(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kept: dict[str, Row] = _read(options.results) if options.ops else {}
    names = options.ops or list(database())
    try_op("abs", 1, options.seconds, False)  # what the first op loads, the copies of this process have
    for number, name in enumerate(names):
        start = time.perf_counter()
        row = kept[name] = try_apart(name, options.samples, options.seconds, not options.no_dtensor)
        seconds = time.perf_counter() - start
        verdicts = f"{row.partir.verdict} {row.partir.counts}, DTensor {row.dtensor.verdict}"
        print(f"{number + 1}/{len(names)} {name}: {verdicts}, {seconds:.1f} s", flush=True)
        if row.partir.verdict in ("wrong", "crashed"):
            print(f"    {row.partir.reason}", flush=True)
        _write(options.results, kept)
    rows = [kept[name] for name in database() if name in kept]
    options.out.write_text(table(rows), encoding="utf-8")
    return int(any(row.partir.verdict in ("wrong", "crashed") for row in rows))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.op_coverage", description="Try torch's ops in blocks; write docs/ops.md.")
    parser.add_argument("--ops", nargs="*", help="only these, by name; the others as in --results")
    parser.add_argument("--samples", type=int, default=10, help="at most so many samples an op")
    parser.add_argument("--seconds", type=int, default=60, help="at most so long an op, for each of partir and DTensor")
    parser.add_argument("--no-dtensor", action="store_true", help="leave DTensor out")
    parser.add_argument("--results", type=Path, default=Path("build/ops.json"), help="where outcomes are kept")
    parser.add_argument("--out", type=Path, default=Path("docs/ops.md"))
    return parser.parse_args(arguments)


def _read(path: Path) -> dict[str, Row]:
    if not path.exists():
        return {}
    listed: list[Any] = json.loads(path.read_text(encoding="utf-8"))
    return {row["op"]: Row(row["op"], row["samples"], Tried(**row["partir"]), Tried(**row["dtensor"])) for row in listed}


def _write(path: Path, rows: dict[str, Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in rows.values()]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
