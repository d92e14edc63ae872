"""The command line: `partir check-rules FILE` or `partir calibrate`, the same as `python -m partir ...`.

A command is a function from its parsed options to an exit code: 0 for success, 1 for a finding, 2 for a mistake of the user, 130
for Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch

from partir.commands import mesh, plan
from partir.commands.numbers import positive_integer, positive_number
from partir.commands.options import EXIT_CODES
from partir.commands.parsers import add_command
from partir.commands.quiet import quiet_torch
from partir.errors import PartirError, first_line
from partir.hardware import hardware_text
from partir.rules import load
from partir.rules.check import BLOCKS, Report, check_rules
from partir.rules.compare import Blocks

Command = Callable[[argparse.Namespace], int]
FOUND, MISTAKE, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a mistake is one message on stderr, without a traceback."""
    options = _parser().parse_args(arguments)
    try:
        with quiet_torch():
            return cast(Command, options.command)(options)
    except (PartirError, OSError) as error:
        print(f"partir: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print("partir: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="partir", description="A declarative graph compiler and auto-partitioner for PyTorch.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan.add_commands(commands)
    mesh.add_commands(commands)
    _add_check_rules(add_command(commands, "check-rules", "prove the rules of a file by trial", CHECK_RULES))
    _add_calibrate(add_command(commands, "calibrate", "measure a hardware profile on this machine", CALIBRATE))
    return parser


CHECK_RULES = f"""Run each op whole and in blocks as its rule says, and compare outputs and gradients.

    partir check-rules softmax.rules
    partir check-rules mine.rules --import my_ops --blocks 2 3 2x3

{EXIT_CODES}
"""
CALIBRATE = f"""\
Measure this machine as `plan.time` needs it: FLOP/s, memory bandwidth, and latency and bandwidth of each kind of
collective, all ranks at once. The profile is TOML; pass its path as hardware=.

    partir calibrate --ranks 8 --backend gloo --out machine.toml
    torchrun --nnodes 2 --nproc-per-node 8 -m partir calibrate --backend nccl --out cluster.toml

{EXIT_CODES}
"""


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=positive_integer, default=2, help="processes (default 2); under torchrun its ranks are taken")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="of torch.distributed (default gloo)")
    parser.add_argument("--out", type=Path, required=True, help="the TOML file to write")
    parser.add_argument("--seconds", type=positive_number, default=0.2, help="about how long each figure is measured (default 0.2)")
    parser.add_argument("--timeout", type=positive_number, default=600.0, help="seconds for all of it (default 600)")
    parser.set_defaults(command=_calibrate)


def _calibrate(options: argparse.Namespace) -> int:
    """Measure, print the profile and write it."""
    from partir.runtime.calibrate import calibrate, join_world

    if not options.out.parent.is_dir():
        raise PartirError(f"--out {options.out}: there is no folder {options.out.parent}.")
    if options.out.is_dir():
        raise PartirError(f"--out {options.out}: that is a folder; name a file in it, cluster.toml.")
    if options.backend == "nccl" and not torch.cuda.is_available():
        raise PartirError("--backend nccl needs GPUs, and torch sees none; --backend gloo runs on the CPU.")
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    name = options.out.stem
    if under_torchrun:
        hardware = join_world(options.backend, name, options.seconds, options.timeout)
    else:
        hardware = calibrate(options.ranks, options.backend, name, options.seconds, options.timeout)
    if not under_torchrun or os.environ["RANK"] == "0":
        text = hardware_text(hardware)
        options.out.write_text(text)
        print(text, end="")
    return 0


def _add_check_rules(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a .rules file")
    help_of_import = "a module that defines ops of the file; may be given several times"
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE", help=help_of_import)
    help_of_blocks = "numbers of blocks to try; 2x3 is two axes on one dim"
    parser.add_argument("--blocks", type=_blocks, nargs="+", default=list(BLOCKS), metavar="N", help=help_of_blocks)
    parser.set_defaults(command=_check_rules)


def _blocks(text: str) -> Blocks:
    """Read `4` or `2x3`."""
    counts = tuple(int(part) for part in text.split("x"))
    if min(counts) < 1:
        raise ValueError
    return counts[0] if len(counts) == 1 else counts


def _check_rules(options: argparse.Namespace) -> int:
    """Run each op whole and in blocks as its rule says, and compare outputs and gradients. Exit code 1 where a rule is wrong."""
    sys.path.insert(0, str(Path.cwd()))
    for module in options.modules:
        _import(module)
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = check_rules(load(options.file), blocks=options.blocks)
    print(_text(report))
    return FOUND if report.of("wrong") else 0


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # it is the user's code
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        raise PartirError(f"--import {module}: {kind}{first_line(error)}") from None


def _text(report: Report) -> str:
    """Return the table and, for each wrong factor, the call with which it was tried."""
    tried = [f"{each.op} {each.signature}\n    {each.factor}: {each.detail}\n    with {each.call}" for each in report.of("wrong")]
    return "\n\n".join([str(report), *tried])
