"""Say what differs between ranks: which ranks are the odd ones, and each text once, of long ones only where they part."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

SHOWN_RANKS = 8
SHOWN_CHARACTERS = 600

Value = TypeVar("Value", str, int)


def difference(texts: Sequence[str], what: str) -> str:
    """Say which ranks differ from the most common text, and show each text once.

    Args:
        texts: one a rank.
        what: they describe: "the signature of a call".
    """
    distinct = list(dict.fromkeys(texts))
    shown = [f"    {_ranks(_who_has(texts, text))}: {part}" for text, part in zip(distinct, _where_they_part(distinct))]
    return (
        f"{what} differs between ranks: {_ranks(_odd(texts))} from the others. Every rank must pass the same global batch and run the "
        "same code.\n" + "\n".join(shown)
    )


def other_calls(calls: Sequence[int]) -> str:
    """Say which ranks are at another call than most, given how many calls each has made."""
    shown = [f"    {_ranks(_who_has(calls, made))}: call {made + 1}" for made in dict.fromkeys(calls)]
    return (
        f"the number of this call differs between ranks: {_ranks(_odd(calls))} from the others. Every rank must call the model equally "
        "often and resume from the same checkpoint.\n" + "\n".join(shown)
    )


def _where_they_part(texts: list[str]) -> list[str]:
    """Return texts as they are; of long ones the first line that is not the same in all.

    >>> short, long = "a 1", "a" * 600
    >>> _where_they_part([long + "\\nb = 1", long + "\\nb = 2"])
    ['line 2: b = 1', 'line 2: b = 2']
    """
    if max(map(len, texts)) <= SHOWN_CHARACTERS:
        return texts
    split = [text.splitlines() for text in texts]
    shortest = min(map(len, split))
    number = next((n for n, lines in enumerate(zip(*split)) if len(set(lines)) > 1), shortest)
    rows = [lines[number] if number < len(lines) else "(no such line)" for lines in split]
    return [f"line {number + 1}: {_around(row, rows)}" for row in rows]


def _around(row: str, rows: list[str]) -> str:
    """Return the part of a long line that begins a little before its first difference from the others."""
    start = max(0, len(os.path.commonprefix(rows)) - SHOWN_CHARACTERS // 4)
    end = start + SHOWN_CHARACTERS
    return ("..." if start else "") + row[start:end] + ("..." if end < len(row) else "")


def _odd(values: Sequence[Value]) -> list[int]:
    counts = Counter(values)
    usual = max(counts, key=lambda value: (counts[value], -values.index(value)))
    return [rank for rank, value in enumerate(values) if value != usual]


def _who_has(values: Sequence[Value], one: Value) -> list[int]:
    return [rank for rank, value in enumerate(values) if value == one]


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN_RANKS])) + (", ..." if len(ranks) > SHOWN_RANKS else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
