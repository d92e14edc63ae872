"""What a user asks of a compilation and of the runs after it: one frozen value, validated once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch

from partir.errors import PartirError
from partir.precision import check_dtype
from partir.quantities import parse_bytes
from partir.rules.source import Source

LEGAL = {
    "memory": ("low", "fast"),
    "vectors": ("balanced", "diagonal"),
    "outputs": ("auto", "whole", "sharded"),
    "check_inputs": ("first", "always", "never"),
    "check_finite": ("never", "loss", "nodes"),
    "rng": ("exact", "fast"),
}


def memory_text(memory: str | int) -> str:
    """Return a memory mode or a budget as text.

    Raises:
        PartirError: it is neither.
    """
    if isinstance(memory, str) and memory in LEGAL["memory"]:
        return memory
    try:
        parse_bytes(memory)
    except PartirError as error:
        raise PartirError(f"memory={memory!r} is not understood; choose from 'low', 'fast', or a number of bytes, \"40GB\".") from error
    return str(memory)


def budget_of(memory: str) -> int | None:
    """Return the bytes that a rank may hold, None where memory is a mode.

    >>> budget_of("40GB"), budget_of("low")
    (40000000000, None)
    """
    return None if memory in LEGAL["memory"] else parse_bytes(memory)


@dataclass(frozen=True)
class Options:
    """What the user asked of `parallelize` or `plan`; see there.

    Args:
        memory: ``"low"`` keeps shards and gathers again in the backward, ``"fast"`` keeps what was gathered; bytes, ``"40GB"``: what
            fits is kept.
        vectors: ``"balanced"`` or the paper's ``"diagonal"``.
        outputs: ``"auto"``, ``"whole"`` or ``"sharded"``.
        check_inputs: compare inputs between ranks at the ``"first"`` call of a signature, ``"always"`` or ``"never"``.
        check_finite: what to look at for nan and inf: ``"never"``, the ``"loss"``, or the loss and then the ``"nodes"``.
        pin: name pattern -> layout text.
        rng: ``"exact"``: the same random numbers on every mesh; ``"fast"``: each block has a generator of its own.
        timeout: the longest wait for another rank.
        placement: name of the placement file.
        rules: the user's rule files, as they were read.
        compute_dtype: parameters and floating inputs are cast to it before they are gathered; None: as they are.
        reduce_dtype: sums between ranks are made in it where it is wider; None: in the dtype of what is added.

    Raises:
        PartirError: a value that is none of the legal ones.
    """

    memory: str = "low"
    vectors: str = "balanced"
    outputs: str = "auto"
    check_inputs: str = "first"
    check_finite: str = "never"
    pin: Mapping[str, str] = field(default_factory=dict[str, str])
    rng: str = "exact"
    timeout: timedelta | None = None
    placement: str = "placement_3d"
    rules: tuple[Source, ...] = ()
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", memory_text(self.memory))
        check_dtype("compute_dtype", self.compute_dtype)
        check_dtype("reduce_dtype", self.reduce_dtype)
        for name, values in LEGAL.items():
            if getattr(self, name) not in values and not (name == "memory" and budget_of(self.memory)):
                raise PartirError(f"{name}={getattr(self, name)!r} is not understood; choose from {', '.join(map(repr, values))}.")
