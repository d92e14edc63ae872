"""Collectives: torch ops over axis names, what they do to layouts, and the bytes that they move.

One module each:

    vocabulary   the ops `torch.ops.partir.*`: schemas, kernels, fake formulas
    gradients    their derivatives
    algebra      operand layout -> result layout, and cotangents
    traffic      bytes received by one rank
    lockstep     the same collectives on the blocks of all ranks in one process
    backend      what moves the data when an op runs on real tensors
    addressing   one part of a product dim, on blocks; `dims` the same on layouts
"""

from partir.collectives import addressing, backend, gradients, lockstep
from partir.collectives.addressing import split_axes
from partir.collectives.algebra import apply, cotangent
from partir.collectives.backend import Backend, current_backend, use_backend
from partir.collectives.traffic import received_bytes
from partir.collectives.vocabulary import SCHEMAS, overload

__all__ = [
    "SCHEMAS",
    "Backend",
    "addressing",
    "apply",
    "backend",
    "cotangent",
    "current_backend",
    "gradients",
    "lockstep",
    "overload",
    "received_bytes",
    "split_axes",
    "use_backend",
]
