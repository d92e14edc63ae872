"""Numbers on the command line: each reads a text or says which numbers are legal, before anything runs."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError


def positive_integer(text: str) -> int:
    """Read 1, 2, 3, ...

    >>> positive_integer("16")
    16
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ArgumentTypeError(f"{text!r} is no integer of 1 or more.")
    return number


def positive_number(text: str) -> float:
    """Read a finite number above 0."""
    number = _finite(text)
    if not number > 0:
        raise ArgumentTypeError(f"{text!r} is no finite number above 0.")
    return number


def tolerance(text: str) -> float:
    """Read a finite number of 0 or more."""
    number = _finite(text)
    if not number >= 0:
        raise ArgumentTypeError(f"{text!r} is no finite number of 0 or more.")
    return number


def _finite(text: str) -> float:
    """Return a number, -1 for a text that is none."""
    try:
        number = float(text)
    except ValueError:
        return -1.0
    return number if math.isfinite(number) else -1.0
