"""What a user asks of a compilation and of the runs after it: one frozen value, validated once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch

from partir.errors import PartirError
from partir.precision import check_dtype
from partir.rules.source import Source

LEGAL = {
    "memory": ("low", "fast"),
    "vectors": ("balanced", "diagonal"),
    "outputs": ("auto", "whole", "sharded"),
    "check_inputs": ("first", "always", "never"),
    "rng": ("exact", "fast"),
}


@dataclass(frozen=True)
class Options:
    """What the user asked of `parallelize` or `plan`; see there.

    Args:
        memory: ``"low"`` keeps shards and gathers again in the backward, ``"fast"`` keeps what was gathered.
        vectors: ``"balanced"`` or the paper's ``"diagonal"``.
        outputs: ``"auto"``, ``"whole"`` or ``"sharded"``.
        check_inputs: compare inputs between ranks at the ``"first"`` call of a signature, ``"always"`` or ``"never"``.
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
    pin: Mapping[str, str] = field(default_factory=dict[str, str])
    rng: str = "exact"
    timeout: timedelta | None = None
    placement: str = "placement_3d"
    rules: tuple[Source, ...] = ()
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_dtype("compute_dtype", self.compute_dtype)
        check_dtype("reduce_dtype", self.reduce_dtype)
        for name, values in LEGAL.items():
            if getattr(self, name) not in values:
                raise PartirError(f"{name}={getattr(self, name)!r} is not understood; choose from {', '.join(map(repr, values))}.")
