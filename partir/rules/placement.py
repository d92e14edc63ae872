"""Where a placement file puts matrix products and vectors.

place product a[m k] b[k n] -> c[m n]       the indices of the operands and the result
    state y: m -> data.x, k -> z, n -> y    in this state each index has these axes, major to minor
    start y, lookup z                       the state of the first product; of a lookup in a table (an embedding)
    rest innermost on a.m, b.first, c.m     the dim that a matrix at rest splits further, along its direction
    swap y <-> z                            a product in one state hands its result to the other
place vector balanced[n]
    hidden on y rests n@y.z.x               the layout at rest of a vector used where the hidden dim is split by y
    hidden on z rests n@y.x on y=z          ... that only the ranks whose y equals their z hold
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from partir.errors import RuleError
from partir.rules.parser import parse
from partir.rules.source import Source
from partir.rules.transform import Entry

Axes = tuple[str, ...]


@dataclass(frozen=True)
class VectorRest:
    """A vector at rest: the axes of its one dim; owner ("y", "z") when only ranks with y equal to z hold it."""

    axes: Axes
    owner: tuple[str, str] | None = None


@dataclass(frozen=True)
class Placement:
    """A placement file.

    matrices: "a", "b", "c" -> its two indices.         states: state -> index -> axes.
    start, lookup_start: the first state.               rest: matrix -> the index split further at rest, or "first".
    swap: state -> the state of the result.             vectors: kind -> state (where hidden is) -> VectorRest.
    """

    name: str
    matrices: Mapping[str, tuple[str, str]]
    states: Mapping[str, Mapping[str, Axes]]
    start: str
    lookup_start: str
    rest: Mapping[str, str]
    swap: Mapping[str, str]
    vectors: Mapping[str, Mapping[str, VectorRest]]

    def direction(self, state: str, matrix: str) -> str:
        """Return the axis that a matrix lacks in a state: the innermost axis of the index it does not have."""
        (missing,) = set(self.states[state]) - set(self.matrices[matrix])
        return self.states[state][missing][-1]

    @property
    def directions(self) -> dict[str, dict[str, str]]:
        """State -> matrix -> direction."""
        return {state: {matrix: self.direction(state, matrix) for matrix in self.matrices} for state in self.states}

    def compute(self, state: str, matrix: str) -> tuple[Axes, Axes]:
        """Return the axes of the two dims of a matrix inside the product."""
        rows, columns = self.matrices[matrix]
        return self.states[state][rows], self.states[state][columns]

    def at_rest(self, state: str, matrix: str, first: str | None = None) -> dict[str, Axes]:
        """Return index -> axes of a matrix at rest.

        Args:
            first: the index that the tensor as stored has first; needed where the file says `first`.
        """
        rows, columns = self.matrices[matrix]
        inner = self.rest[matrix] if self.rest[matrix] != "first" else (first or rows)
        further = (self.direction(state, matrix),)
        return {index: self.states[state][index] + (further if index == inner else ()) for index in (rows, columns)}


def placement(name: str | Path = "placement_3d") -> Placement:
    """Read a placement: one that partir brings, by name, or a file of your own, by path.

    >>> placement().at_rest("y", "b", first="n")
    {'k': ('z',), 'n': ('y', 'x')}
    """
    bundled = _bundled(name) if isinstance(name, str) else None
    if bundled is not None:
        return bundled
    if not Path(name).is_file():
        raise RuleError(f"no placement {name}: neither one of partir's nor a file")
    return parse_placement(Path(name).read_text(encoding="utf-8"), str(name))


@lru_cache(maxsize=8)
def _bundled(name: str) -> Placement | None:
    """Return a placement that partir brings; a compilation asks for it every time, and the file does not change."""
    file = resources.files("partir.rules").joinpath(f"{name}.rules")
    return parse_placement(file.read_text(encoding="utf-8"), f"{name}.rules") if file.is_file() else None


def parse_placement(text: str, path: str = "<placement>") -> Placement:
    """Read a placement from text.

    Raises:
        RuleError: with file, line, column and a caret.
    """
    source = Source(path, text)
    products: list[Any] = []
    vectors: dict[str, dict[str, VectorRest]] = {}
    for entry in parse(text, path):
        if isinstance(entry, Entry):
            raise RuleError(f"{entry.where}: a placement file holds no `op`")
        if entry[0] == "product":
            products.append(entry[1])
        else:
            vectors[entry[1]] = {str(state): VectorRest(axes, owner) for state, _, axes, owner in entry[3]}
    if len(products) != 1:
        raise RuleError(f"{path}: a placement has one `place product`, this file {len(products)}")
    return _build(path, products[0], vectors, source)


def _build(path: str, children: Any, vectors: dict[str, dict[str, VectorRest]], source: Source) -> Placement:
    matrices = dict(child for child in children if child[0] not in _CLAUSES)
    indices = {index for pair in matrices.values() for index in pair}
    states: dict[str, dict[str, Axes]] = {}
    found: dict[str, Any] = {}
    for clause in (child for child in children if child[0] in _CLAUSES):
        if clause[0] == "state":
            states[str(clause[1])] = _assign(clause[2], indices, source)
        else:
            found[clause[0]] = clause[1:]
    for kind in ("start", "rest", "swap"):
        if kind not in found:
            raise RuleError(f"{path}: the placement does not say `{kind}`")
    for state in (*(name for name in found["start"] if name is not None), *found["swap"]):
        if state not in states:
            raise source.error(f"unknown state `{state}`; known: {', '.join(states)}", state)
    start, lookup = found["start"]
    one, other = map(str, found["swap"])
    rest = _rest(found["rest"][0], matrices, source)
    return Placement(Path(path).stem, matrices, states, str(start), str(lookup or start), rest, {one: other, other: one}, vectors)


def _assign(assignments: Any, indices: set[str], source: Source) -> dict[str, Axes]:
    """Read `m -> data.x, k -> z, n -> y`: every index once, every axis at most once."""
    given: dict[str, Axes] = {}
    used: set[str] = set()
    for index, axes in assignments:
        if index not in indices:
            raise source.error(f"unknown index `{index}`; the product has {', '.join(sorted(indices))}", index)
        if used & set(axes) or index in given:
            raise source.error(f"index `{index}`: an index or an axis stands twice in one state", index)
        used |= set(axes)
        given[str(index)] = axes
    missing = indices - set(given)
    if missing:
        raise source.error(f"this state gives no axis to {', '.join(sorted(missing))}", assignments[0][0])
    return given


def _rest(slots: Any, matrices: Mapping[str, tuple[str, str]], source: Source) -> dict[str, str]:
    rest: dict[str, str] = {}
    for matrix, dim in slots:
        if matrix not in matrices:
            raise source.error(f"unknown matrix `{matrix}`; the product has {', '.join(matrices)}", matrix)
        if dim != "first" and dim not in matrices[matrix]:
            raise source.error(f"`{matrix}` has no index `{dim}`; it has {', '.join(matrices[matrix])}", dim)
        rest[str(matrix)] = str(dim)
    return rest


_CLAUSES = ("state", "start", "rest", "swap")
