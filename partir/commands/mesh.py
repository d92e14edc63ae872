"""`partir mesh`: every mesh of a number of ranks, ranked. `partir verify`: a model on a mesh against itself on one device."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from partir.commands.models import add_model, load_model
from partir.commands.numbers import positive_integer, tolerance
from partir.commands.options import EXIT_CODES, add_compilation, compilation, parse_mesh, print_json
from partir.commands.parsers import Commands, add_command
from partir.equivalence import verify
from partir.errors import VerifyError
from partir.suggest import KEYS, suggest_mesh

MESH = f"""Rank every mesh of a number of ranks, in each memory mode, by predicted seconds, bytes received or memory held.

    partir mesh model.py:make --ranks 64 --memory 40GB --hardware dgx-h100
    partir mesh --hf config.json --batch 64 --seq 2048 --ranks 64 --by bytes --top 5
    partir mesh --hf config.json --ranks 64 --compute-dtype bfloat16 --reduce-dtype float32

{EXIT_CODES}
"""
VERIFY = f"""Run a model on a simulated mesh and on one device in float64, and compare loss, outputs and every gradient.

    partir verify model.py:make --mesh 2,2,2

{EXIT_CODES}
"""


def add_commands(commands: Commands) -> None:
    """Add the two parsers."""
    _add_mesh(add_command(commands, "mesh", "choose a mesh", MESH))
    _add_verify(add_command(commands, "verify", "compare a mesh with one device", VERIFY))


def _add_mesh(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--ranks", type=int, required=True, help="how many there are")
    parser.add_argument("--memory", help='the most that a rank may hold, "40GB"; by default what the hardware has')
    parser.add_argument("--hardware", default="dgx-h100", help="a profile's name or its TOML file (default: %(default)s)")
    parser.add_argument("--by", choices=tuple(KEYS), default="time")
    parser.add_argument("--top", type=positive_integer, default=10, help="how many to print (default: %(default)s)")
    add_compilation(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, the rejected ones too")
    parser.set_defaults(command=_mesh)


def _mesh(options: argparse.Namespace) -> int:
    model = load_model(options)
    say = _say if sys.stderr.isatty() else None
    chosen = {"memory": options.memory, "hardware": options.hardware, "by": options.by} | compilation(options)
    found = suggest_mesh(model.module, options.ranks, model.args, model.kwargs, progress=say, **chosen)
    if options.json:
        print_json({"by": found.by, "ranked": [asdict(one) for one in found.ranked], "rejected": [asdict(one) for one in found.rejected]})
    else:
        print(found.text(options.top), end="")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--mesh", required=True, help='"4,4,4" is x,y,z; "x=8,y=2" names them')
    parser.add_argument("--memory", choices=("low", "fast"), default="low")
    parser.add_argument("--tolerance", type=tolerance, default=1e-9, help="largest relative difference (default: %(default)s)")
    parser.add_argument("--rules", type=Path, action="append", default=[], help="a rule file; may be given several times")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=_verify)


def _verify(options: argparse.Namespace) -> int:
    model = load_model(options, device="cpu")
    try:
        report = verify(
            model.module,
            parse_mesh(options.mesh),
            model.args,
            dict(model.kwargs),
            memory=options.memory,
            tolerance=options.tolerance,
            rules=options.rules or None,
        )
    except VerifyError as error:
        print(f"partir: {error}", file=sys.stderr)
        return 1
    if options.json:
        print_json({"worst": report.worst, "loss": report.loss, "gradients": dict(report.gradients)})
    else:
        print(report)
    return 0
