"""How long one rank draws: numbers by element index against a generator a block, and torch's own op beside them.

    python benchmarks/random_numbers.py                # a block of 1024 x 1024
    python benchmarks/random_numbers.py --rows 64 --repeats 3
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from partir.mesh import Mesh, use_mesh
from partir.options import LEGAL
from partir.random_numbers import seed_tensor
from partir.random_ops import DRAWN

aten = torch.ops.aten


def seconds(work: Callable[[], Any], repeats: int) -> float:
    """Return the shortest of some runs, after one that warms up."""
    work()
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(rows: int, columns: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return seconds of each op on a float32 block `[rows, columns]`: "torch", "exact" and "fast"."""
    x = torch.ones(rows, columns)
    drawn = {"seed": seed_tensor(0, 0), "site": 0, "layout": f"f32[{rows}, {columns}]", "device": x.device}
    ops: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "dropout": (aten.dropout.default, (x, 0.1, True)),
        "rand_like": (aten.rand_like.default, (x,)),
        "randn_like": (aten.randn_like.default, (x,)),
    }
    found: dict[str, dict[str, float]] = {}
    for name, (op, args) in ops.items():
        found[name] = {"torch": seconds(lambda op=op, args=args: op(*args), repeats)}
        with use_mesh(Mesh.parse((1, 1, 1))):
            for rng in LEGAL["rng"]:
                found[name][rng] = seconds(lambda op=op, args=args, rng=rng: DRAWN[op](*args, **drawn, rng=rng), repeats)
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    """Return a line for each op: milliseconds, and how many times as long as torch."""
    lines = [f"{'':12}{'torch':>10}{'exact':>18}{'fast':>18}{'exact / fast':>14}"]
    for name, times in found.items():
        cells = [f"{times['torch'] * 1e3:7.2f} ms"]
        cells += [f"{times[rng] * 1e3:7.2f} ms {times[rng] / times['torch']:5.1f} x" for rng in LEGAL["rng"]]
        lines.append(f"{name:12}{cells[0]:>10}{cells[1]:>18}{cells[2]:>18}{times['exact'] / times['fast']:12.1f} x")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--columns", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print(table(measure(arguments.rows, arguments.columns, arguments.repeats)))


if __name__ == "__main__":
    main()
