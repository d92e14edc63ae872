"""A tape of what a model's own init functions do to its parameters, recorded on fake tensors: nothing is allocated.

    for each module, children first     reset_parameters() or _reset_parameters()
    a Hugging Face model                initialize_weights()
    a module with _init_weights         module.apply(module._init_weights), after its children
    initialize, if the user gives one   initialize(model), last
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partir.errors import PartirError
from partir.initial_regions import cover
from partir.random_ops import draws

aten = torch.ops.aten
_SETTERS = frozenset({
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.copy_.default,
    aten._foreach_zero_.default,
    aten._foreach_copy_.default,
})
_REPEAT = "which no mesh could repeat; leave generator= out."
Initialize = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Step:
    """One op that was called.

    Args:
        op: the overload.
        args, kwargs: as it was called; tensors are fake, or constants.
        result: what it returned, fake.
        site: its number among the ops that draw random numbers; None of one that does not.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    site: int | None

    def reads(self) -> list[Tensor]:
        """Return the tensors among its arguments."""
        return _tensors((self.args, dict(self.kwargs)))

    def writes(self) -> list[Tensor]:
        """Return the tensors that it makes or changes."""
        return [*self._changes(), *_tensors(self.result)]

    def sets(self) -> list[Tensor]:
        """Return the tensors that it gives values which do not depend on what they held."""
        if self.op._schema.is_mutable:
            return self._changes() if self.site is not None or self.op in _SETTERS or "out" in self.kwargs else []
        before = {storage_of(t) for t in self.reads()}
        return [t for t in _tensors(self.result) if storage_of(t) not in before]

    def _changes(self) -> list[Tensor]:
        changed = [value for argument, value in zip(self.op._schema.arguments, self.args) if _is_written(argument)]
        return _tensors([*changed, *(value for name, value in self.kwargs.items() if name == "out")])


@dataclass
class Tape:
    """What was recorded.

    Args:
        steps: in order.
        tensors: the fake tensor that each meta parameter and buffer has at the end, by the id of the meta one.
    """

    steps: list[Step] = field(default_factory=list[Step])
    tensors: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def steps_of(self, t: Tensor) -> list[Step]:
        """Return the steps that decide what a tensor holds, in order."""
        needed, found = {storage_of(t)}, list[Step]()
        for step in reversed(self.steps):
            if needed.isdisjoint(storage_of(written) for written in step.writes()):
                continue
            found.append(step)
            needed.update(storage_of(read) for read in step.reads())
        return found[::-1]


def record(model: nn.Module, initialize: Initialize | None = None) -> Tape:
    """Run a meta model's init functions on fake tensors.

    Raises:
        PartirError: parameters are neither all on meta nor all elsewhere, an init function reads values, or no init function sets a
            parameter or a buffer: the message lists them.
    """
    _check_all_meta(model)
    tape = Tape()
    with _fakes_in(model, tape), _truncated_normal_without_reading(), _Recorder(tape), torch.no_grad():
        _run(model)
        if initialize is not None:
            _call(lambda: initialize(model), "initialize=")
    _check_all_set(model, tape)
    return tape


class _Recorder(TorchDispatchMode):
    """Enters each op in the tape."""

    def __init__(self, tape: Tape) -> None:
        cast(Any, super()).__init__()
        self.tape = tape
        self.sites = 0

    def __torch_dispatch__(self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(cast("Mapping[str, Any]", kwargs or {}))
        if kwargs.get("generator") is not None:
            raise PartirError(f"{func} draws from a generator of its own, {_REPEAT}")
        site = self.sites if func is TRUNCATED_NORMAL or draws(func, args, kwargs) else None
        self.sites += site is not None
        result = func(*args, **kwargs)
        self.tape.steps.append(Step(func, tuple(args), kwargs, result, site))
        return result


def _run(module: nn.Module) -> None:
    """Initialize a module, children first, each as its kind does."""
    name = type(module).__qualname__
    hugging_face = getattr(module, "initialize_weights", None)
    own = getattr(module, "_init_weights", None)
    if callable(hugging_face) and callable(own):
        for part in module.modules():
            cast(Any, part)._is_hf_initialized = False
        _call(hugging_face, f"{name}.initialize_weights")
        for part in module.modules():
            del cast(Any, part)._is_hf_initialized
        return
    for child in module.children():
        _run(child)
    for reset in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(module, reset, None)):
            _call(getattr(module, reset), f"{name}.{reset}")
            break
    if callable(own):
        _call(lambda: module.apply(cast(Any, own)), f"{name}._init_weights")


def _call(function: Callable[[], Any], name: str) -> None:
    try:
        function()
    except DataDependentOutputException as error:
        raise PartirError(
            f"{name} reads values of tensors ({error.func}), which a model on meta does not have. Build the model on a device, or "
            "write its init without reading."
        ) from error


@contextmanager
def _truncated_normal_without_reading() -> Generator[None]:
    """Let torch's `trunc_normal_` draw by the inverse of its distribution: its own draws until no element is out of bounds.

    Private; the test of a truncated normal notices when it changes.
    """
    init = cast(Any, nn.init)
    own = init._no_grad_trunc_normal_
    init._no_grad_trunc_normal_ = _truncated_normal
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = own


def _truncated_normal(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
    if generator is not None:
        raise PartirError(f"trunc_normal_ draws from a generator of its own, {_REPEAT}")
    cast(Any, truncated_normal_)(tensor, mean, std, a, b)
    return tensor


@torch.library.custom_op("partir_local::truncated_normal_", mutates_args=("x",))
def truncated_normal_(x: Tensor, mean: float, std: float, low: float, high: float) -> None:
    """Fill a tensor with normal numbers of [low, high], drawn from torch's generator."""
    x.copy_(truncated(torch.rand(x.shape, dtype=torch.float64), mean, std, low, high))


def _truncated_normal_fake(x: Tensor, mean: float, std: float, low: float, high: float) -> None:
    return None


cast(Any, truncated_normal_).register_fake(_truncated_normal_fake)
TRUNCATED_NORMAL: Any = cast(Any, torch.ops.partir_local).truncated_normal_.default


def truncated(uniform: Tensor, mean: float, std: float, low: float, high: float) -> Tensor:
    """Return normal numbers of [low, high], by the inverse of their distribution.

    Args:
        uniform: float64, of [0, 1).
    """
    first, last = (math.erf((bound - mean) / (std * math.sqrt(2))) for bound in (low, high))
    inner = (uniform * (last - first) + first).clamp(-1 + 2.0**-53, 1 - 2.0**-53)
    return (torch.erfinv(inner) * (std * math.sqrt(2)) + mean).clamp(low, high)


@contextmanager
def _fakes_in(model: nn.Module, tape: Tape) -> Generator[None]:
    """Put fake tensors of the CPU in the place of meta ones: torch's init functions leave a meta tensor alone."""
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.simplefilter("ignore")
        held = list(_held(model))
        fakes: dict[int, Tensor] = {}
        for owner, name, t in held:
            if id(t) not in fakes:
                made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")
                fakes[id(t)] = nn.Parameter(made, t.requires_grad) if isinstance(t, nn.Parameter) else made
            owner[name] = fakes[id(t)]
        try:
            yield
            tape.tensors.update((id(t), cast(Tensor, owner[name])) for owner, name, t in held)
        finally:
            for owner, name, t in held:
                owner[name] = t


def _held(model: nn.Module) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor]]:
    """Yield the dict, the key and the tensor of each meta parameter and buffer, tied ones each time."""
    for module in model.modules():
        for owner in (cast(Any, module)._parameters, cast(Any, module)._buffers):
            for name, t in cast("dict[str, Tensor | None]", owner).items():
                if t is not None and t.is_meta:
                    yield owner, name, t


def _check_all_meta(model: nn.Module) -> None:
    named = list(model.named_parameters())
    real = [name for name, p in named if not p.is_meta]
    if real and len(real) < len(named):
        raise PartirError(
            f"{type(model).__name__}: {len(named) - len(real)} parameters are on meta and {len(real)} have values ({_some(real)}): "
            "build all of it under torch.device('meta'), or none."
        )


def _check_all_set(model: nn.Module, tape: Tape) -> None:
    set_here: dict[int, list[Tensor]] = {}
    for t in [t for step in tape.steps for t in step.sets()]:
        set_here.setdefault(storage_of(t), []).append(t)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = {name: tape.tensors[id(t)] for name, t in named.items() if t.is_meta}
    unset = [name for name, t in tensors.items() if not cover(set_here.get(storage_of(t), []), t)]
    if unset:
        raise PartirError(
            f"{type(model).__name__} was built on meta, and its init functions do not set all of {_some(unset)}: what __init__ computes is "
            "not kept there. Set it in its module's reset_parameters, pass initialize=function(model), or make a buffer with "
            "device='cpu' in __init__."
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f", ... and {len(names) - 8} more" if len(names) > 8 else "")


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def storage_of(t: Tensor) -> int:
    """Return what tells apart storages while their tensors live."""
    return int(cast(Any, t.untyped_storage())._cdata)


def is_recorded(t: object) -> bool:
    """Return whether a tensor stands for another on the tape."""
    return isinstance(t, FakeTensor)


def meta_tensors(model: nn.Module) -> Iterable[tuple[dict[str, Tensor | None], str, Tensor]]:
    """Return the dict, the key and the tensor of each meta parameter and buffer."""
    return list(_held(model))
