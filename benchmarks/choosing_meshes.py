"""Time `partir.suggest_mesh` on a GPT from meta: the trace, and the search after it, for several numbers of ranks.

    python benchmarks/choosing_meshes.py
    python benchmarks/choosing_meshes.py --ranks 8 --layers 2 --hidden 64 --heads 4
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it runs as a script

import partir  # noqa: E402
from examples.models.gpt import GPT, GPTConfig  # noqa: E402
from partir.passes.trace import trace  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 4096])
    parser.add_argument("--by", nargs="+", default=["bytes", "time"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50304)
    return parser.parse_args()


def model_of(arguments: argparse.Namespace) -> tuple[GPT, tuple[Any, ...], dict[str, Any]]:
    """Return a GPT and its inputs on meta."""
    config = GPTConfig(
        vocab_size=arguments.vocabulary,
        block_size=arguments.seq,
        num_layers=arguments.layers,
        num_heads=arguments.heads,
        hidden=arguments.hidden,
    )
    with torch.device("meta"):
        ids = torch.zeros(arguments.batch, arguments.seq, dtype=torch.long)
        return GPT(config), (ids,), {"labels": ids.clone()}


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    model, args, kwargs = model_of(arguments)
    trace(model, args, kwargs)  # imports and caches are not the search's time
    start = time.perf_counter()
    trace(model, args, kwargs)
    traced = time.perf_counter() - start
    table = Table(title=f"suggest_mesh: GPT, {arguments.layers} layers of {arguments.hidden}, batch {arguments.batch} x {arguments.seq}")
    for column in ("ranks", "by", "meshes", "programs compiled", "trace s", "search s", "best"):
        table.add_column(column, justify="right")
    for ranks in arguments.ranks:
        for by in arguments.by:
            start = time.perf_counter()
            found = partir.suggest_mesh(model, ranks, args, kwargs, by=by)
            seconds = time.perf_counter() - start - traced
            meshes = len({one.mesh for one in (*found.ranked, *found.rejected)})
            best = f"{found[0].mesh} {found[0].mode}"
            table.add_row(str(ranks), by, str(meshes), str(found.compiled), f"{traced:.1f}", f"{seconds:.1f}", best)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
