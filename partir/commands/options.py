"""Options that several commands share: the mesh and what `partir.plan` takes beside it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

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
    parser.add_argument("--json", action="store_true", help="print JSON")


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
    chosen = {name: getattr(options, name) for name in ("memory", "vectors", "outputs")}
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
