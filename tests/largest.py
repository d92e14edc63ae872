"""The largest tensor that a piece of code makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partir.runtime.torch_dtensor import local_of

CPU = torch.device("cpu")


class Largest(TorchDispatchMode):
    """Keeps the most bytes that any one op's result takes: what is fake, or mapped from a file, takes none; of a DTensor the block."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._mapped: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            leaf = local_of(leaf)
            if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) and leaf.device == CPU:
                self._count(leaf.untyped_storage(), func is torch.ops.aten.set_.source_Storage)
        return result

    def _count(self, storage: Any, mapped: bool) -> None:
        if mapped:  # safetensors maps the file and lets a tensor look at it
            self._mapped[storage._cdata] = storage
        if storage._cdata not in self._mapped:
            self.bytes = max(self.bytes, storage.nbytes())
