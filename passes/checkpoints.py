"""Note what a user's `torch.utils.checkpoint` encloses while a module is traced: the backward computes it again, as on one device.

    Before: checkpoint(block, x)           inside a forward, with and without use_reentrant
    After:  %linear, %gelu ... have the key "checkpoint 0" in meta["nn_module_stack"], which every pass keeps

A checkpoint in another is part of it. Policies (context_fn) that would keep some values inside are not read: all is computed again.

`torch.utils.checkpoint`'s private parts are replaced here; `tests/test_checkpoints.py` notices when torch changes them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.utils.checkpoint
from torch.fx import Node
from torch.fx.traceback import annotate, preserve_node_meta

REGION = "partir_checkpoint"


@contextmanager
def checkpoints_noted() -> Generator[None]:
    """Let `torch.utils.checkpoint` run its function as it is, each node that comes of it annotated with the number of the region."""
    numbers, inside = itertools.count(), list[int]()

    @contextmanager
    def region() -> Generator[None]:
        with ExitStack() as stack:
            if not inside:
                stack.enter_context(preserve_node_meta())
                stack.enter_context(annotate({REGION: next(numbers)}))
            inside.append(1)
            stack.callback(inside.pop)
            yield

    def around(*_: Any, **__: Any) -> Generator[None]:
        with region():
            yield

    class Reentrant:
        """Stands for torch's autograd.Function."""

        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            """Run the function."""
            with region():
                return function(*args)

    module: Any = torch.utils.checkpoint
    with (
        mock.patch.object(module, "_checkpoint_without_reentrant_generator", around),
        mock.patch.object(module, "CheckpointFunction", Reentrant),
    ):
        yield


def region_key(meta: Mapping[str, Any]) -> str | None:
    """Return the key of a traced node's region in its stack of modules, None outside of all."""
    custom: Mapping[str, Any] = meta.get("custom") or {}
    number = custom.get(REGION)
    return None if number is None else f"checkpoint {number}"


def region_of(node: Node | None) -> str | None:
    """Return the region of a node of a later graph."""
    stack: Mapping[str, Any] = (node.meta.get("nn_module_stack") or {}) if node is not None else {}
    return next((key for key in stack if re.fullmatch(r"checkpoint \d+", key)), None)
