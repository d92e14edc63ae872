"""`partir plan`, `draw` and `cost`: what a model becomes on a mesh, as text, JSON, a picture or expressions."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from partir.commands.options import EXIT_CODES, add_model_and_plan, make_plan, print_json
from partir.commands.parsers import Commands, add_command
from partir.cost import Cost
from partir.hardware import load_hardware
from partir.plans import STAGES, Plan

PLAN = f"""Show what every tensor's layout is and what moves: nothing runs, and a model on meta needs no memory.

    partir plan model.py:make --mesh 4,4,4
    partir plan --hf config.json --batch 16 --seq 1024 --mesh 4,4,4 --stage lowered
    partir plan --hf config.json --mesh 4,4,4 --compute-dtype bfloat16 --out plan.json
    partir plan model.py:make --mesh 4,4,4 --json --explain fc1.weight

{EXIT_CODES}
"""
DRAW = f"""Draw the communication graph. .html is a page that needs nothing else; .svg, .png and .pdf need graphviz' program dot.

    partir draw model.py:make --mesh 4,4,4 --out gpt.html

{EXIT_CODES}
"""
COST = f"""Show what one rank receives, computes and holds in a step, as expressions and as numbers, how far that is from the least
that any algorithm must move, and the predicted seconds.

    partir cost model.py:make --mesh 4,4,4 --hardware dgx-h100

{EXIT_CODES}
"""


def add_commands(commands: Commands) -> None:
    """Add the three parsers."""
    _add_plan(add_command(commands, "plan", "show layouts and collectives", PLAN))
    _add_draw(add_command(commands, "draw", "draw the communication graph", DRAW))
    _add_cost(add_command(commands, "cost", "show bytes, FLOPs, memory and seconds", COST))


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add_model_and_plan(parser)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--stage", choices=STAGES, help="print the graph after a stage instead; with --json, its text besides")
    instead.add_argument("--explain", metavar="NAME", help="print all about one tensor instead; with --json, its text besides")
    instead.add_argument("--full", action="store_true", help="print every row instead of a screen; JSON has every row")
    parser.add_argument("--out", type=Path, help="write the plan as JSON, to be read, edited and used")
    parser.set_defaults(command=_plan)


def _plan(options: argparse.Namespace) -> int:
    plan = make_plan(options)
    if options.out is not None:
        plan.save(options.out)
    if options.json:
        print_json(_plan_facts(plan) | _texts(plan, options))
    elif options.explain is not None:
        print(plan.explain(options.explain))
    elif options.stage:
        print(plan.text(options.stage), end="")
    else:
        print(plan.report() if options.full else str(plan), end="")
    return 0


def _texts(plan: Plan, options: argparse.Namespace) -> dict[str, Any]:
    """Return the texts that were asked for besides."""
    explained = {} if options.explain is None else {"explain": {options.explain: plan.explain(options.explain)}}
    return explained | ({"stage": {options.stage: plan.text(options.stage)}} if options.stage else {})


def _plan_facts(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.model,
        "mesh": {axis: plan.mesh[axis] for axis in plan.mesh.names},
        "layouts": {name: str(layout) for name, layout in plan.layouts.items()},
        "bytes": {stage: plan.bytes(stage) for stage in ("forward", "backward")},
        "collectives": [
            {"op": c.op, "axis": c.axis, "bytes": c.bytes, "stage": c.stage, "reason": c.reason, "source": c.source}
            for c in plan.collectives
        ],
        "notes": list(plan.notes),
    }


def _add_draw(parser: argparse.ArgumentParser) -> None:
    add_model_and_plan(parser)
    parser.add_argument("--out", type=Path, required=True, help="the file; its suffix says what is written")
    parser.add_argument("--unfold", action="store_true", help="draw repeated layers one by one")
    parser.set_defaults(command=_draw)


def _draw(options: argparse.Namespace) -> int:
    plan = make_plan(options)
    plan.draw(options.out, fold=not options.unfold)
    print_json({"written": str(options.out)}) if options.json else print(f"written: {options.out}")
    return 0


def _add_cost(parser: argparse.ArgumentParser) -> None:
    add_model_and_plan(parser)
    parser.add_argument("--hardware", default="dgx-h100", help="a profile's name or its TOML file (default: %(default)s)")
    parser.set_defaults(command=_cost)


def _cost(options: argparse.Namespace) -> int:
    hardware = load_hardware(options.hardware)
    plan = make_plan(options)
    cost, limit, step = plan.cost(), plan.limit(), plan.time(hardware)
    if options.json:
        print_json({**_cost_facts(cost), "seconds": step.seconds, "over_lower_bound": _number(limit.ratio)})
    else:
        print(cost, limit, step, sep="\n")
    return 0


def _number(value: float) -> float | None:
    """Return a number as JSON has it: nan is null."""
    return None if math.isnan(value) else value


def _cost_facts(cost: Cost) -> dict[str, Any]:
    expressions = {"bytes": cost.bytes(), "flops": cost.flops(), **{f"memory, {kind}": e for kind, e in cost.memory.items()}}
    return {
        "sizes": dict(cost.values),
        "expressions": {name: str(e) for name, e in expressions.items()},
        "values": {name: cost.value(e) for name, e in expressions.items()},
        "peak_memory": int(cost.peak_memory()),
    }
