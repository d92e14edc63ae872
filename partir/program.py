"""A compiled program: one rank's forward and backward graphs, and what enters and leaves them.

    forward(*input blocks)            -> (*output blocks, *saved)
    backward(*saved, *tangent blocks) -> one gradient block, or None, for each input slot

Both graphs are local: every rank runs the same one. Collectives in them name axes, and a rank's place enters
only through them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch.fx import GraphModule

from partir.errors import PartirError
from partir.layout import Layout
from partir.mesh import Mesh

SlotKind = Literal["parameter", "buffer", "constant", "input", "seed", "output"]


@dataclass(frozen=True)
class Slot:
    """One tensor that enters or leaves a program.

    Args:
        name: the dotted name of a parameter or buffer, or the name of an input or output.
        kind: what it is.
        layout: its layout at rest; for an output, the layout in which it leaves.
        shape: global shape; smaller than the layout's where the blocks of an output are padded.
        dtype: torch dtype.
        differentiable: an input that gets a gradient, or an output that has one.
        reaches: the outputs, by number, through which an input gets its gradient; without a cotangent for one of them it gets none;
            None: through any.
        source: the parameter of which it is a gathered value, in a program that is given those.
    """

    name: str
    kind: SlotKind
    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = False
    reaches: tuple[int, ...] | None = None
    source: str = ""

    def gets_gradient(self, cotangents: Sequence[object]) -> bool:
        """Return whether an input gets a gradient from these cotangents, None for an output that the loss does not read."""
        return self.reaches is None or any(cotangents[number] is not None for number in self.reaches)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of one rank's block."""
        return tuple(self.layout.local_shape(mesh))

    def real_shape(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Return the shape of what is no pad in a rank's block."""
        local = self.local_shape(mesh)
        if self.layout.shape == self.shape:
            return local
        place = mesh.coordinate(rank)
        starts = [place[dim.all_axes[0]] * held if dim.all_axes else 0 for dim, held in zip(self.layout.dims, local)]
        return tuple(max(0, min(held, size - start)) for held, size, start in zip(local, self.shape, starts))


@dataclass(frozen=True)
class Program:
    """What every rank runs.

    Args:
        mesh: the ranks.
        memory: ``"low"`` saves shards and gathers again in the backward, ``"fast"`` saves what was gathered; bytes: what fits.
        inputs: one slot for each placeholder of ``forward``.
        outputs: one slot for each of the first ``num_outputs`` results of ``forward``.
        forward: the forward graph.
        backward: the backward graph, or None where nothing has a gradient.
        num_outputs: results of ``forward`` that are outputs; the rest are saved for ``backward``.
        texts: the text of the graph after each stage, by the stage's name.
    """

    mesh: Mesh
    memory: str
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    forward: GraphModule
    backward: GraphModule | None
    num_outputs: int
    texts: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if len(self.outputs) != self.num_outputs:
            raise PartirError(f"a program of {self.num_outputs} outputs was given {len(self.outputs)} output slots.")

    def input(self, name: str) -> Slot:
        """Return the input slot called ``name``.

        Raises:
            PartirError: there is none.
        """
        for slot in self.inputs:
            if slot.name == name:
                return slot
        raise PartirError(f"no input is called {name!r}; inputs are {', '.join(slot.name for slot in self.inputs)}.")

    def tangents(self) -> tuple[Slot, ...]:
        """Return the output slots that take a tangent, in the order in which ``backward`` takes them."""
        return tuple(slot for slot in self.outputs if slot.differentiable) if self.backward is not None else ()

    def with_texts(self, texts: Mapping[str, str]) -> Program:
        """Return this program carrying ``texts`` besides its own."""
        return replace(self, texts={**self.texts, **texts})
