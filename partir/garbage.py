"""Python's garbage collector, paused while graphs are made.

fx graphs are linked in both directions, so the collector alone frees them, and it looks through all that live again and again: a quarter of
the time of a compilation.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def paused_collector() -> Generator[None]:
    """Pause the collector; where it was paused already, it stays so."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
