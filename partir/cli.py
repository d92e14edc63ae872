"""The command line: `partir check-rules FILE` or `partir calibrate`, the same as `python -m partir ...`.

A command is a function from its parsed options to an exit code: 0 for success, 1 for a finding, 2 for a mistake of the user.
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
from partir.errors import PartirError
from partir.hardware import hardware_text
from partir.rules import load
from partir.rules.check import BLOCKS, Report, check_rules
from partir.rules.compare import Blocks

Command = Callable[[argparse.Namespace], int]
FOUND, MISTAKE = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a mistake is one message on stderr, without a traceback."""
    options = _parser().parse_args(arguments)
    try:
        return cast(Command, options.command)(options)
    except (PartirError, OSError) as error:
        print(f"partir: {error}", file=sys.stderr)
        return MISTAKE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="partir", description="A declarative graph compiler and auto-partitioner for PyTorch.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan.add_commands(commands)
    mesh.add_commands(commands)
    _add_check_rules(commands.add_parser("check-rules", help="prove the rules of a file by trial", description=_check_rules.__doc__))
    help_of_calibrate, verbatim = "measure a hardware profile on this machine", argparse.RawDescriptionHelpFormatter
    _add_calibrate(commands.add_parser("calibrate", help=help_of_calibrate, description=CALIBRATE, formatter_class=verbatim))
    return parser


CALIBRATE = """\
Measure this machine as `plan.time` needs it: FLOP/s, memory bandwidth, and latency and bandwidth of each kind of
collective, all ranks at once. The profile is TOML; pass its path as hardware=.

    partir calibrate --ranks 8 --backend gloo --out machine.toml
    torchrun --nnodes 2 --nproc-per-node 8 -m partir calibrate --backend nccl --out cluster.toml
"""


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=_positive, default=2, help="processes to start (default 2); under torchrun its ranks are taken")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="of torch.distributed (default gloo)")
    parser.add_argument("--out", type=Path, required=True, help="the TOML file to write")
    parser.add_argument("--seconds", type=float, default=0.2, help="about how long each figure is measured (default 0.2)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for all of it (default 600)")
    parser.set_defaults(command=_calibrate)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _calibrate(options: argparse.Namespace) -> int:
    """Measure, print the profile and write it."""
    from partir.runtime.calibrate import calibrate, join_world

    if not options.out.parent.is_dir():
        raise PartirError(f"--out {options.out}: there is no folder {options.out.parent}.")
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
    except ImportError as error:
        raise PartirError(f"--import {module}: {error}") from None


def _text(report: Report) -> str:
    """Return the table and, for each wrong factor, the call with which it was tried."""
    tried = [f"{each.op} {each.signature}\n    {each.factor}: {each.detail}\n    with {each.call}" for each in report.of("wrong")]
    return "\n\n".join([str(report), *tried])
