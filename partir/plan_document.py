"""A plan as a document: all that it says as plain values, which print, explain, compare and are kept in a file.

    plan = partir.plan(model, mesh=(4, 4, 4), example_inputs=ids)
    plan.save("gpt.json")
    document = partir.Plan.load("gpt.json")           # no graphs, no weights, no model
    print(document.explain("blocks.0.mlp.fc1.weight"))
    partir.parallelize(model, plan=document)          # an edited layout or option included
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch

from partir.errors import PartirError, UnknownNameError
from partir.json_places import Entry
from partir.layout import DTYPES, Layout, dtype_name
from partir.mesh import Mesh
from partir.options import Options
from partir.records import layer_of

if TYPE_CHECKING:
    from partir.plan_difference import PlanDifference

Kind = Literal["parameter", "buffer", "constant", "input", "seed", "value", "output"]
CHOSEN_KINDS = ("parameter", "buffer", "input", "value")  # those whose layout a person may choose


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of a plan.

    Args:
        name: of a parameter, buffer or input as the user knows it; of a value as in `plan.text("annotated")`; ``output[0]``.
        kind: what it is.
        shape: global shape, pads of values included.
        layout: at rest; of an output, as it leaves.
        chosen: the layout that the compiler chose; another ``layout`` is an edit. None: the layout is asked for.
        why: what decided the layout.
        direction: the axis along which it is gathered or scattered.
        state: y or z, of a product.
        op: what computes a value.
        module: dotted path of the module that computes it.
        line: the user's line, ``gpt.py:71``.
        read: ``(reader, layout in which it is read)``.
        notes: pads and copies.
        place: where it stands in a file.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    layout: Layout
    chosen: Layout | None
    why: str = ""
    direction: str = ""
    state: str = ""
    op: str = ""
    module: str = ""
    line: str = ""
    read: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    place: Entry | None = field(default=None, compare=False, repr=False)

    @property
    def dtype(self) -> str:
        """Short name, ``f32``."""
        return self.layout.dtype

    @property
    def edited(self) -> bool:
        """Whether its dims are split otherwise than the compiler chose."""
        return self.kind in CHOSEN_KINDS and (self.chosen is None or self.chosen.dims != self.layout.dims)

    @property
    def layer(self) -> str:
        """The list item that it belongs to, ``blocks.0``, or ``""``."""
        return layer_of(self.module if self.kind == "value" else self.name if self.kind in ("parameter", "buffer") else "")

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def local_bytes(self, mesh: Mesh) -> int:
        """Return the bytes of one rank's block."""
        return math.prod(self.layout.local_shape(mesh)) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class PlannedCollective:
    """One collective of a plan; see `partir.records.Collective`.

    Args:
        tensors: names of the tensors for which it moves data.
    """

    stage: str
    op: str
    axis: str
    bytes: int
    reason: str
    line: str
    module: str
    tensors: tuple[str, ...]

    @property
    def layer(self) -> str:
        """The list item that it serves, or ``""``."""
        return layer_of(self.module)


@dataclass(frozen=True)
class Origin:
    """The model that a plan is of.

    Args:
        model: name of its class.
        parameters: name -> dtype and shape, ``f32[64, 16]``.
        tied: further names of tied parameters -> the first.
        call: digest of all that a trace depends on besides sizes of parameters: inputs, modes, plain attributes of modules.
        graph: digest of the traced graph.
        ops: digest of the traced graph's ops without sizes.
        torch: torch's version.
    """

    model: str
    parameters: Mapping[str, str]
    tied: Mapping[str, str]
    call: str
    graph: str
    ops: str
    torch: str


@dataclass(frozen=True)
class Settings:
    """What was asked for: the mesh and the options that decide what is compiled; see `parallelize`.

    Args:
        rules: name and digest of each rule file.
    """

    mesh: Mesh
    memory: str
    vectors: str
    outputs: str
    rng: str
    pin: Mapping[str, str]
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    rules: tuple[tuple[str, str], ...] = ()

    @property
    def precision(self) -> dict[str, str]:
        """The dtypes that were asked for, by option, in notation."""
        asked = {"compute_dtype": self.compute_dtype, "reduce_dtype": self.reduce_dtype}
        return {name: dtype_name(dtype) for name, dtype in asked.items() if dtype is not None}

    @property
    def rules_text(self) -> str:
        """Rule files as text, ``softmax.rules 8f0c31aa94e7b210``."""
        return ", ".join(f"{name} {text}" for name, text in self.rules)

    def __str__(self) -> str:
        options = f"memory={self.memory}  vectors={self.vectors}  outputs={self.outputs}  rng={self.rng}"
        asked = self.precision | {"rules": self.rules_text} if self.rules else self.precision
        more = "".join(f"  {name}={text}" for name, text in asked.items())
        return f"mesh {self.mesh}  {options}{more}" + (f"  pin={dict(self.pin)}" if self.pin else "")


def settings_of(mesh: Mesh, options: Options) -> Settings:
    """Return what was asked for, of a mesh and the options of a compilation."""
    names = ("memory", "vectors", "outputs", "rng", "pin", "compute_dtype", "reduce_dtype")
    rules = tuple(source.identity for source in options.rules)
    return Settings(mesh, **{name: getattr(options, name) for name in names}, rules=rules)


@dataclass(frozen=True)
class PlanDocument:
    """A plan without its graphs. `print` it.

    Args:
        origin: the model.
        settings: mesh and options.
        tensors: parameters, inputs, values and outputs, in this order.
        collectives: in the order in which they run.
        saved: bytes that each rank keeps for the backward besides inputs and parameters.
        notes: what was done where sizes do not divide.
        counted: the settings for which collectives and ``saved`` were counted, as text; others once a file is edited.
        file: path of the file that it was read from.
    """

    origin: Origin
    settings: Settings
    tensors: tuple[PlannedTensor, ...]
    collectives: tuple[PlannedCollective, ...]
    saved: int
    notes: tuple[str, ...]
    counted: str
    file: str = field(default="", compare=False)

    @property
    def mesh(self) -> Mesh:
        """The ranks."""
        return self.settings.mesh

    @property
    def edits(self) -> tuple[PlannedTensor, ...]:
        """The tensors whose layouts were edited since the compiler chose them."""
        return tuple(tensor for tensor in self.tensors if tensor.edited)

    def of(self, *kinds: Kind) -> tuple[PlannedTensor, ...]:
        """Return the tensors of some kinds."""
        return tuple(tensor for tensor in self.tensors if tensor.kind in kinds)

    def bytes(self, stage: str | None = None, axis: str | None = None, op: str | None = None) -> int:
        """Return the bytes that one rank receives in one step, in all collectives that match."""
        wanted = [(name, value) for name, value in (("stage", stage), ("axis", axis), ("op", op)) if value is not None]
        return sum(c.bytes for c in self.collectives if all(getattr(c, name) == value for name, value in wanted))

    @cached_property
    def _by_name(self) -> Mapping[str, PlannedTensor]:
        """Tensors by name: parameters and inputs come before values, values before modules of one value."""
        modules: dict[str, list[PlannedTensor]] = {}
        for tensor in self.of("value"):
            modules.setdefault(tensor.module, []).append(tensor)
        found = {path: values[0] for path, values in modules.items() if path and len(values) == 1}
        found |= {tensor.name: tensor for tensor in reversed(self.tensors)}
        return {**found, **{name: found[first] for name, first in self.origin.tied.items() if first in found}}

    def __getitem__(self, name: str) -> PlannedTensor:
        """Return a tensor by its name, or by that of a module with one value.

        Raises:
            UnknownNameError: nothing is called so.
        """
        if name not in self._by_name:
            raise UnknownNameError.of("parameter, input, value or output", name, self._by_name)
        return self._by_name[name]

    def __iter__(self) -> Iterator[PlannedTensor]:
        return iter(self.tensors)

    def explain(self, name: str) -> str:
        """Return what happens to one tensor, and why; see `partir.Plan.explain`."""
        from partir.explain import explain

        return explain(self, name)

    def diff(self, other: object) -> PlanDifference:
        """Return how another plan differs; see `partir.Plan.diff`."""
        from partir.plan_difference import difference

        return difference(self, as_document(other))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document as JSON; see `partir.Plan.save`."""
        from partir.plan_file import write

        write(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> PlanDocument:
        """Read a document; see `partir.Plan.load`."""
        from partir.plan_file import read

        return read(Path(path))

    def __str__(self) -> str:
        from partir.summary import summary

        return summary(self)

    def __repr__(self) -> str:
        return f"<PlanDocument of {self.origin.model} on {self.mesh}: {len(self.collectives)} collectives, {self.bytes():,} bytes a rank>"


def as_document(plan: object) -> PlanDocument:
    """Return the document of a plan, of a document, or of the file at a path.

    Raises:
        PartirError: it is none of these.
        PlanError: the file is no plan.
    """
    if isinstance(plan, PlanDocument):
        return plan
    if isinstance(plan, (str, os.PathLike)):
        return PlanDocument.load(cast("str | os.PathLike[str]", plan))
    document = getattr(plan, "document", None)
    if isinstance(document, PlanDocument):
        return document
    raise PartirError(f"a plan is a partir.Plan, a partir.PlanDocument or the path of a saved one, not {type(plan).__name__}.")
