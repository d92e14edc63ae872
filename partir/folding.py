"""Fold what repeated layers have alike: ``blocks.0`` to ``blocks.11`` become ``blocks.0..11 (12 alike)``.

Texts are alike if they differ in nothing but the layer's own number and the numbers of value names.

>>> generic("blocks.3.mlp.fc1.weight for linear_14", "blocks.3"), generic("fc1.weight for linear_14", "")
('blocks.*.mlp.fc1.weight for linear', 'fc1.weight for linear_14')
>>> layers_text(["h.0", "h.1", "h.2", "h.4"]), layers_text(["h.7"]), layers_text(["a.0", "b.0"])
('h.0..2,4 (4 alike)', 'h.7', 'a.0, b.0')
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

Item = TypeVar("Item")


def generic(text: str, layer: str) -> str:
    """Return a text of a layer with ``*`` for the layer's number and without the numbers of value names."""
    if not layer:
        return text
    starred = layer.rpartition(".")[0] + ".*" if "." in layer else "*"
    text = re.sub(rf"(?<![\w.]){re.escape(layer)}(?![\w])", starred, text)
    return re.sub(r"(?<=[a-z])_\d+\b", "", text)


def alike(items: Iterable[tuple[str, Hashable, Item]]) -> list[tuple[list[str], list[Item]]]:
    """Group items whose keys are equal, in the order in which they first come.

    Args:
        items: ``(layer, key, item)``; the key is generic in the layer.

    Returns:
        for each key, the layers, each once, and the items.
    """
    found: dict[Hashable, tuple[list[str], list[Item]]] = {}
    for layer, key, item in items:
        layers, members = found.setdefault(key, ([], []))
        members.append(item)
        if layer not in layers[-1:]:
            layers.append(layer)
    return list(found.values())


def layers_text(layers: Sequence[str]) -> str:
    """Return layers of one list as a range, with their number."""
    unique = list(dict.fromkeys(layers))
    stems = {layer.rpartition(".")[0] for layer in unique}
    if len(stems) > 1 or not all(layer.rpartition(".")[2].isdigit() for layer in unique):
        return ", ".join(unique)
    numbers = sorted(int(layer.rpartition(".")[2]) for layer in unique)
    stem = stems.pop() + "." if "." in unique[0] else ""
    text = stem + ",".join(_runs(numbers))
    return f"{text} ({len(unique)} alike)" if len(unique) > 1 else text


def _runs(numbers: Sequence[int]) -> list[str]:
    runs: list[list[int]] = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]


def columns(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Return rows of cells in columns two blanks apart; ``right``: columns of numbers."""
    width: dict[int, int] = {}
    for row in rows:
        for index, cell in enumerate(row):
            width[index] = max(width.get(index, 0), len(cell))
    numbers = set(right)
    return ["  ".join(c.rjust(width[i]) if i in numbers else c.ljust(width[i]) for i, c in enumerate(row)).rstrip() for row in rows]


def shortened(text: str, length: int) -> str:
    """Return a text cut to a length."""
    return text if len(text) <= length else text[: max(length - 3, 0)] + "..."
