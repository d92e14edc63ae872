"""Keep torch's own reports of what stops a trace off the screen: the command says in one line what is wrong, and where."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Generator
from typing import Any, TextIO, cast

LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch.export._trace")
"""Those that log a traceback, or half a graph, of an op that a model calls wrongly."""
GRAPH = "def forward(self"


@contextlib.contextmanager
def quiet_torch() -> Generator[None]:
    """Drop what torch logs and prints of a trace that fails; with TORCH_LOGS in the environment, drop nothing."""
    if "TORCH_LOGS" in os.environ:
        yield
        return
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addFilter(_drop)
    try:
        with contextlib.redirect_stderr(cast(TextIO, _WithoutGraphs(sys.stderr))):
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    return record.levelno < logging.WARNING


class _WithoutGraphs:
    """A stream that drops the graph that `torch.export` prints when it fails, whatever its logs are set to."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._dropped = False

    def write(self, text: str) -> int:
        """Write a text, unless it is a graph or the line's end after one."""
        dropped, self._dropped = self._dropped, text.lstrip().startswith(GRAPH)
        return len(text) if self._dropped or (dropped and text == "\n") else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
