"""How a subcommand is added: its help is verbatim text with examples."""

from __future__ import annotations

import argparse
from typing import Any

Commands = Any
"""What `ArgumentParser.add_subparsers` returns; its class has no public name."""


def add_command(commands: Commands, name: str, summary: str, text: str) -> argparse.ArgumentParser:
    """Return the parser of a new subcommand."""
    return commands.add_parser(name, help=summary, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
