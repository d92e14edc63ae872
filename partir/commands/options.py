"""Options that several commands share: the mesh and what `partir.plan` takes beside it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from partir.commands.models import add_model, load_model
from partir.errors import PartirError
from partir.options import LEGAL
from partir.plans import Plan, plan

EXIT_CODES = "exit codes: 0 success, 1 a finding (a rule or a result is wrong), 2 a mistake in what was given, 130 Ctrl-C"


def add_model_and_plan(parser: argparse.ArgumentParser) -> None:
    """Add a model, the mesh and the choices of a plan."""
    add_model(parser)
    parser.add_argument("--mesh", required=True, help='"4,4,4" is x,y,z; "2,4,4,4" data,x,y,z; "x=8,y=2" names them')
    parser.add_argument("--memory", default="low", help='"low", "fast", or a number of bytes, "40GB", into which a step has to fit')
    for name in ("vectors", "outputs"):
        parser.add_argument(f"--{name}", choices=LEGAL[name], default=LEGAL[name][0], help="as for partir.parallelize")
    add_compilation(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_compilation(parser: argparse.ArgumentParser) -> None:
    """Add what changes a program on any mesh: dtypes and rule files."""
    parser.add_argument("--compute-dtype", type=floating_dtype, help="parameters and inputs are cast to it before they are gathered")
    parser.add_argument("--reduce-dtype", type=floating_dtype, help="sums between ranks are made in it where it is wider")
    parser.add_argument("--rules", type=Path, action="append", default=[], help="a rule file; may be given several times")


def compilation(options: argparse.Namespace) -> dict[str, Any]:
    """Return what `add_compilation` read, as `partir.plan` and `partir.suggest_mesh` take it."""
    return {"compute_dtype": options.compute_dtype, "reduce_dtype": options.reduce_dtype, "rules": options.rules or None}


def floating_dtype(text: str) -> torch.dtype:
    """Read the name of a floating dtype of torch.

    >>> floating_dtype("bfloat16")
    torch.bfloat16
    """
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise argparse.ArgumentTypeError(f"{text!r} is no floating-point dtype of torch, such as bfloat16.")
    return found


def parse_mesh(text: str) -> Any:
    """Return what `Mesh.parse` takes."""
    try:
        if "=" in text:
            named = [(name.strip(), int(size)) for name, size in (part.split("=") for part in text.split(","))]
            if len(dict(named)) < len(named):
                raise PartirError(f"--mesh {text!r} names an axis twice.")
            return dict(named)
        return tuple(int(size) for size in text.replace("x", ",").split(","))
    except ValueError:
        raise PartirError(f'--mesh {text!r}: write sizes, "4,4,4", or names, "x=8,y=2".') from None


def make_plan(options: argparse.Namespace) -> Plan:
    """Plan the model that the options name."""
    model = load_model(options)
    chosen = {name: getattr(options, name) for name in ("memory", "vectors", "outputs")} | compilation(options)
    with Progress(f"planning {type(model.module).__name__}"):
        return plan(model.module, parse_mesh(options.mesh), model.args, model.kwargs, **chosen)


class Progress:
    """Say on stderr what takes long, where a person looks."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __enter__(self) -> None:
        if sys.stderr.isatty():
            print(f"{self.text} ...", file=sys.stderr, flush=True)

    def __exit__(self, *error: object) -> None:
        return None


def print_json(value: Any) -> None:
    """Print JSON, sorted, the same for every run."""
    print(json.dumps(value, indent=2, sort_keys=True))
