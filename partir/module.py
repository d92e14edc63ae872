"""The module: an ordinary `nn.Module` whose forward runs a compiled program, all else as it was.

`parallelize` swaps a subclass in, `type("PartirGPT", (ParallelModule, GPT), ...)`, that overrides only `forward` (and how it is
pickled).
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any, cast

from torch import Tensor, nn

from partir.errors import PartirError
from partir.parallelized import Parallelized, class_of
from partir.runtime.norms import clip_gradients


class ParallelModule(nn.Module):
    """The mixin that `parallelize` puts in front of a module's class."""

    def __reduce__(self) -> tuple[Any, ...]:
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return _rebuild, (parallelized(self).original,), state


def parallelized(model: nn.Module) -> Parallelized:
    """Return what a parallelized module keeps.

    Raises:
        PartirError: it is not parallelized.
    """
    state = model.__dict__.get("_partir")
    if state is None:
        raise PartirError(f"{type(model).__name__} is not parallelized; call partir.parallelize(model, mesh=...) first.")
    return cast(Parallelized, state)


@functools.cache
def parallel_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a module's class whose forward runs the compiled program."""

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return parallelized(self).call(self, args, kwargs)

    members: dict[str, Any] = {"forward": forward, "__module__": original.__module__}
    if not hasattr(original, "clip_grad_norm_"):
        members["clip_grad_norm_"] = _clip_grad_norm_
    return type(f"Partir{original.__name__}", (ParallelModule, original), members)


def _clip_grad_norm_(self: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
    """Clip the gradients by their norm; see `partir.clip_grad_norm_`."""
    return clip_gradients(list(self.parameters()), parallelized(self).session(self), max_norm, norm_type, error_if_nonfinite)


def original_class(model: nn.Module) -> AbstractContextManager[None]:
    """Give a parallelized module its own class back while it is traced."""
    return class_of(model, parallelized(model).original)


def _rebuild(original: type[nn.Module]) -> nn.Module:
    made = parallel_class(original)
    return made.__new__(made)
