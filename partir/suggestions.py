"""What `partir.suggest_mesh` returns: meshes with what they cost, ranked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

from partir.quantities import spell_bytes

ESTIMATES = "~ estimates: several times off where sizes do not divide on a mesh; sure=None computes all"


@dataclass(frozen=True)
class Suggestion:
    """One mesh in one memory mode.

    Args:
        mesh: ``(x, y, z)``, or ``(data, x, y, z)`` where data has more than one rank.
        mode: ``memory=`` of `parallelize`.
        bytes: that one rank receives in a step.
        seconds: of a step, predicted.
        memory: bytes that one rank holds at most, with AdamW.
        why: what speaks against it; ``""`` for one that is ranked.
        exact: computed from a program that is proven to be its own; False: an estimate, from one that may differ, several times off
            where sizes do not divide on the mesh.
    """

    mesh: tuple[int, ...]
    mode: str
    bytes: int
    seconds: float
    memory: int
    why: str = ""
    exact: bool = True


@dataclass(frozen=True)
class Suggestions(Sequence[Suggestion]):
    """Meshes, best first.

    Args:
        ranked: those that fit.
        rejected: those that do not, and why.
        by: what they are ranked by.
        compiled: how many classes of meshes were compiled.
    """

    ranked: tuple[Suggestion, ...]
    rejected: tuple[Suggestion, ...]
    by: str
    compiled: int = 0

    @overload
    def __getitem__(self, index: int) -> Suggestion: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Suggestion, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.ranked[index]

    def __len__(self) -> int:
        return len(self.ranked)

    def __str__(self) -> str:
        return self.text()

    def text(self, top: int = 20) -> str:
        """Return the best as a table, and the first that were rejected."""
        rows = [("mesh", "memory=", "seconds", "received", "held"), *(_cells(one) for one in self.ranked[:top])]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
        more = [f"{len(self.ranked) - top} more"] if len(self.ranked) > top else []
        refused = [f"rejected {one.mesh} {one.mode}: {one.why}" for one in self.rejected[:5]]
        refused += [f"{len(self.rejected) - 5} more rejected"] if len(self.rejected) > 5 else []
        about = [] if all(one.exact for one in self.ranked[:top]) else [ESTIMATES]
        return "\n".join([f"best by {self.by}", *lines, *more, *about, *refused]) + "\n"


def _cells(one: Suggestion) -> tuple[str, ...]:
    about = "" if one.exact else "~"
    return str(one.mesh), one.mode, f"{about}{one.seconds:.4g}", about + spell_bytes(one.bytes), about + spell_bytes(one.memory)
