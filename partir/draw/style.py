"""How a drawing looks: a colour for each axis, a tint for each state, and a width for a number of bytes."""

from __future__ import annotations

COLOURS = {"x": "#1b9e77", "y": "#d95f02", "z": "#7570b3", "data": "#e7298a"}
TINTS = {"y": "#fde5cf", "z": "#e3e1f2"}
PLAIN = "#f4f4f4"
THINNEST, WIDEST = 1.0, 9.0  # points of an edge
NARROWEST, BROADEST = 1.0, 4.0  # inches of a node
COSTLIEST = 5  # collectives that are marked by their place


def colour(axis: str) -> str:
    """Return the colour of an axis, or the colours of several, as graphviz lists them.

    >>> colour("y"), colour("z.x")
    ('#d95f02', '#7570b3:#1b9e77')
    """
    return ":".join(COLOURS[name] for name in axis.split("."))


def width(num_bytes: int, most: int) -> float:
    """Return the width of an edge in points: the square root keeps what is a hundred times smaller in sight."""
    return round(THINNEST + (WIDEST - THINNEST) * _share(num_bytes, most), 2)


def breadth(num_bytes: int, most: int) -> float:
    """Return the breadth of a node in inches."""
    return round(NARROWEST + (BROADEST - NARROWEST) * _share(num_bytes, most), 2)


def _share(num_bytes: int, most: int) -> float:
    return (num_bytes / most) ** 0.5 if most else 0.0


def byte_text(num_bytes: int) -> str:
    """Return a number of bytes in three digits.

    >>> byte_text(384), byte_text(196_608), byte_text(1_811_939_328)
    ('384 B', '197 kB', '1.81 GB')
    """
    value, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"
