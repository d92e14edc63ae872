"""Precision: which autocast is on around a call, and the dtypes that options may name."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import torch

from partir.errors import PartirError

DEVICES = ("cpu", "cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_dtype(option: str, dtype: object) -> None:
    """Refuse what is no floating dtype that every backend adds up.

    Raises:
        PartirError: says which are.
    """
    if dtype is not None and dtype not in DTYPES:
        names = ", ".join(str(each) for each in DTYPES)
        unknown = f"{option}={dtype!r} is not understood: sums in it are not defined on every backend"
        raise PartirError(f"{unknown}; choose from {names}, or None.")


def autocast_text() -> str:
    """Return which autocasts are on, ``"cpu torch.bfloat16"``; ``""`` where none is.

    >>> with torch.autocast("cpu", dtype=torch.float16):
    ...     autocast_text()
    'cpu torch.float16'
    """
    return ", ".join(f"{kind} {torch.get_autocast_dtype(kind)}" for kind in DEVICES if torch.is_autocast_enabled(kind))


@contextmanager
def without_autocast() -> Generator[None]:
    """Run what the compiler itself computes in the dtypes that it says."""
    with ExitStack() as stack:
        for kind in DEVICES:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def is_half(dtype: torch.dtype) -> bool:
    """Return whether a dtype has 16 bits, in which torch's own kernels compute in float32."""
    return dtype in (torch.float16, torch.bfloat16)
