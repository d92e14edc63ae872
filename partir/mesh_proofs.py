"""Which programs are proven to be that of a mesh: the mesh is laid out anew, which takes a tenth of what compiling does, and compared."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch.fx import GraphModule

from partir.cost.template import Template
from partir.mesh import Mesh
from partir.passes.pipeline import Lowered
from partir.passes.same_program import is_laid_out_alike, other_forms

MARGIN, NEAR, FAR = 0.25, 0.02, 0.5
"""How far an estimate may be off, what a program says that is laid out as the mesh's own, and memory where sizes do not divide."""


class Proofs:
    """What was compared so far.

    Args:
        lay_out: returns the graph with layouts and collectives that a mesh gets.
    """

    def __init__(self, lay_out: Callable[[Mesh], GraphModule]) -> None:
        self._lay_out = lay_out
        self._laid_out = dict[Mesh, GraphModule]()
        self._alike = dict[tuple[int, Mesh], bool]()
        self._own = dict[tuple[int, Mesh], bool]()

    def prove(self, number: int, template: Template, mesh: Mesh) -> bool:
        """Return whether a template's program is, without the axes that the mesh lacks, the one that the mesh would get."""
        key = (number, mesh)
        if key not in self._own:
            self._alike[key] = self._is_alike(template.low, template.padded, mesh)
            self._own[key] = self._alike[key] and not template.other_forms(mesh.split_axes())
            if self._own[key]:
                self._laid_out.pop(mesh, None)
        return self._own[key]

    def is_program_of(self, low: Lowered, padded: Collection[int], mesh: Mesh) -> bool:
        """Return whether what is derived from a lowered graph will be the program of a mesh; ``padded``: the sub-dims that are padded."""
        return self._is_alike(low, padded, mesh) and not other_forms(low, mesh.split_axes())

    def is_own(self, number: int, mesh: Mesh) -> bool | None:
        """Return whether a template's program is a mesh's own; None: it was not asked."""
        return self._own.get((number, mesh))

    def has_seen(self, mesh: Mesh) -> bool:
        """Return whether the mesh was compared with any template."""
        return any(other == mesh for _, other in self._own)

    def is_alike(self, number: int, mesh: Mesh) -> bool | None:
        """Return whether a mesh is laid out as a template but for ops that run in another way; None: it was not asked."""
        return self._alike.get((number, mesh))

    def margins(self, number: int, template: Template, mesh: Mesh, divides: bool) -> tuple[float, float]:
        """Return how far bytes and seconds, and memory, of a template may be off on a mesh whose program it is not proven to be.

        Where the mesh is laid out as the template, calls that run in another way make the difference: they move nothing, their seconds
        are no part of the least, but what they keep may differ. A mesh that was not laid out is like those of its axes that were.

        Args:
            divides: whether the sizes do that divide in the template.
        """
        alike = self.is_alike(number, mesh)
        if alike is None and divides:
            of_axes = [one for (n, other), one in self._alike.items() if n == number and other.split_axes() == mesh.split_axes()]
            alike = bool(of_axes) and all(of_axes)
        if not alike:
            return MARGIN, MARGIN if divides else FAR
        return NEAR, MARGIN if template.other_forms(mesh.split_axes()) else NEAR

    def _is_alike(self, low: Lowered, padded: Collection[int], mesh: Mesh) -> bool:
        """Return whether a mesh is laid out as a program was; programs with pads are compared on the same axes alone."""
        if low.mesh == mesh:
            return True
        if padded and low.mesh.split_axes() != mesh.split_axes():
            return False
        if mesh not in self._laid_out:
            self._laid_out[mesh] = self._lay_out(mesh)
        return is_laid_out_alike(low, self._laid_out[mesh], mesh)
