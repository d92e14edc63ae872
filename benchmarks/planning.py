"""Time each pass of partir on a GPT that grows in layers. Nothing runs: the model is on meta, no process group.

    python benchmarks/planning.py
    python benchmarks/planning.py --mesh 2,2,2 --layers 2 4 --repeats 1

`growth` is the time's growth from the fewest layers to the most, divided by the layers' growth: 1 is linear,
less is a constant part, more is worse than linear.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it runs as a script

import partir  # noqa: E402
from examples.models.gpt import GPT, GPTConfig  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="4,4,4")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8, 12])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--memory", choices=["low", "fast"], default="low")
    parser.add_argument("--repeats", type=int, default=3, help="plans of each size; the fastest counts")
    return parser.parse_args()


def time_passes(arguments: argparse.Namespace, num_layers: int) -> dict[str, float]:
    """Return the seconds of each pass in one plan."""
    config = GPTConfig(
        vocab_size=arguments.vocabulary,
        block_size=arguments.seq,
        num_layers=num_layers,
        num_heads=arguments.heads,
        hidden=arguments.hidden,
    )
    mesh = tuple(int(size) for size in arguments.mesh.split(","))
    with torch.device("meta"):
        model = GPT(config)
        ids = torch.zeros(arguments.batch, arguments.seq, dtype=torch.long)
    gc.collect()
    gc.disable()  # A collection would count for whichever pass it falls into.
    try:
        return dict(partir.plan(model, mesh, (ids,), {"labels": ids.clone()}, memory=arguments.memory).timings)
    finally:
        gc.enable()


def fastest_times(arguments: argparse.Namespace, num_layers: int) -> dict[str, float]:
    runs = [time_passes(arguments, num_layers) for _ in range(arguments.repeats)]
    return {name: min(run[name] for run in runs) for name in runs[0]}


def print_table(times: dict[int, dict[str, float]], arguments: argparse.Namespace) -> None:
    """Print one row a pass, one column a number of layers, and the growth."""
    fewest, most = min(times), max(times)
    table = Table(title=f"seconds a pass: GPT, hidden {arguments.hidden}, on ({arguments.mesh}), from meta")
    table.add_column("pass")
    for num_layers in times:
        table.add_column(f"{num_layers} layers", justify="right")
    table.add_column("growth", justify="right")
    for row in times.values():
        row["total"] = sum(row.values())
    for name in times[most]:
        seconds = [row.get(name, 0.0) for row in times.values()]
        growth = times[most][name] / max(times[fewest].get(name, 0.0), 1e-6) / (most / fewest)
        table.add_row(
            name, *(f"{value:.3f}" for value in seconds), f"{growth:.2f}", end_section=name == list(times[most])[-2]
        )
    Console(width=120).print(table)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    time_passes(arguments, 1)  # imports and caches are not a pass's time
    print_table({layers: fastest_times(arguments, layers) for layers in sorted(arguments.layers)}, arguments)


if __name__ == "__main__":
    main()
