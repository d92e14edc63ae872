"""Give eager calls the random numbers that a parallelized module draws."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from partir.errors import PartirError
from partir.layout import Layout
from partir.mesh import Mesh, use_mesh
from partir.passes.functionalize import functional_op
from partir.random_numbers import seed_tensor
from partir.random_ops import DRAWN, draws, positional, refusal

_ONE = Mesh.parse((1, 1, 1))


@contextmanager
def same_randomness(seed: int, calls: int = 0) -> Generator[None]:
    """Draw in eager calls of a module what the module draws when it is parallelized, on any mesh, with ``rng="exact"``.

    A number is a function of the seed, of how often the module was called before, of which draw in that call it belongs to
    and of its place in the tensor. Attention is computed in the open, so that its dropout is an op like others. What is drawn
    outside of modules, or from a generator of its own, is left as it is.

    Args:
        seed: what ``torch.initial_seed()`` is where the parallelized module runs, on rank 0.
        calls: how often the parallelized module was called before.

    Raises:
        PartirError: an op draws numbers that no mesh could repeat, or the backward draws (activation checkpointing does).

    Example:
        >>> layer, x = nn.Dropout(0.5), torch.ones(2, 4)
        >>> with same_randomness(7):
        ...     first, second = layer(x), layer(x)
        >>> with same_randomness(7, calls=1):
        ...     torch.equal(layer(x), second), torch.equal(layer(x), first)
        (True, False)
    """
    counter = _Calls(calls)
    before = register_module_forward_pre_hook(counter.enter)
    after = register_module_forward_hook(counter.leave, always_call=True)
    try:
        with sdpa_kernel(SDPBackend.MATH), _SameRandomness(seed, counter):
            yield
    finally:
        before.remove()
        after.remove()


class _Calls:
    """Counts the calls of each module that no other module calls, and the draws of the present call."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.present = first
        self.site = 0
        self.depth = 0
        self._counts: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def enter(self, module: nn.Module, inputs: Any) -> None:
        if self.depth == 0:
            self.present = self._counts.get(module, self.first)
            self._counts[module] = self.present + 1
            self.site = 0
        self.depth += 1

    def leave(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.depth -= 1


class _SameRandomness(TorchDispatchMode):
    """Replaces what an op draws by what `random_ops.DRAWN` says of its functional form."""

    def __init__(self, seed: int, counter: _Calls) -> None:
        cast(Any, super()).__init__()
        self.seed = seed
        self.counter = counter

    def __torch_dispatch__(self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = cast("Mapping[str, Any]", kwargs or {})
        if not draws(func, args, kwargs) or any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)
        _refuse_in_backward(func)
        if self.counter.depth == 0:
            return func(*args, **kwargs)
        functional = func if func in DRAWN else functional_op(func) or func
        reason = refusal(functional)
        if reason is not None:
            raise PartirError(reason)
        given = positional(func, args, kwargs)
        shaped = func(*args, **kwargs) if functional is func else functional(*given)
        drawn = self._draw(functional, given, shaped)
        if functional is not func:
            return args[0].copy_(drawn)
        return shaped.copy_(drawn) if isinstance(shaped, Tensor) else drawn

    def _draw(self, op: Any, args: Sequence[Any], shaped: Any) -> Any:
        """Return an op's results, numbered as the next draw of this call; `shaped` are such results with other numbers."""
        result = cast(Tensor, shaped if isinstance(shaped, Tensor) else shaped[0])
        site, self.counter.site = self.counter.site, self.counter.site + 1
        seed, layout = seed_tensor(self.seed, self.counter.present), str(Layout.whole(result, grad=False))
        with use_mesh(_ONE):
            return DRAWN[op](*args, seed=seed, site=site, layout=layout, device=result.device)


def _refuse_in_backward(func: Any) -> None:
    # Private; the test of activation checkpointing notices when it changes.
    if torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportPrivateUsage]
        raise PartirError(
            f"{func} draws while the backward runs: activation checkpointing calls forward again, and would draw other numbers. "
            "Turn it off under same_randomness."
        )
