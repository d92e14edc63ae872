"""Bytes as people write them: `"40GB"` is 40e9, `"40GiB"` is 40 * 2**30."""

from __future__ import annotations

import math
import re

from partir.errors import PartirError

UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(text: str | int | float) -> int:
    """Return a number of bytes.

    Raises:
        PartirError: it is no positive number of bytes.

    >>> parse_bytes("40GB"), parse_bytes("1.5 GiB"), parse_bytes(1000)
    (40000000000, 1610612736, 1000)
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)\s*", str(text).lower())
    if found is None or found[2] not in UNITS or not 0 < float(found[1]) < math.inf:
        raise PartirError(f"memory={text!r} is no number of bytes; write \"40GB\", \"40GiB\" or 40_000_000_000.")
    return int(float(found[1]) * UNITS[found[2]])


def spell_bytes(number: float) -> str:
    """Return bytes in the unit that suits them.

    >>> spell_bytes(40e9), spell_bytes(1536), spell_bytes(12)
    ('40 GB', '1.54 kB', '12 B')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} B"
