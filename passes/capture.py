"""Run a module once on fake tensors under `torch.export` and return the raw graph; torch's private calls are made here.

Non-strict `torch.export` runs the user's Python on fake tensors: nothing is computed and no weights are needed. It
accepts some models whose gradients it then loses, so everything that would be lost is refused here: tensor hooks, values
that leave the graph for Python. A function with a backward of its own becomes one op.

Ensures: the module is as it was, its parameters, flags and attributes the same objects, also after a failure.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import _SingleLevelFunction  # pyright: ignore[reportPrivateUsage]
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import PythonKeyTracer
from torch.nn.utils import stateless
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from partir.errors import TraceError
from partir.inference import ordinary_tensors
from partir.passes.autograd_functions import call_as_op, give_rules
from partir.passes.checkpoints import checkpoints_noted
from partir.passes.hidden_paths import OWN_GENERATOR, fill_with_integers, nested_tensors_padded, no_seeding
from partir.passes.structure import Structure, flatten
from partir.passes.user_lines import DATA_DEPENDENT, fail, refuse


@dataclass(frozen=True)
class Capture:
    """What `torch.export` made of a module.

    Attributes:
        program: the exported program of a wrapper whose only child, ``model``, is the user's module.
        outputs: structure of what the module returned; its tensors are the first outputs of the graph, in order.
        assigned: names of the buffers that forward replaced; their new values are the outputs that follow.
    """

    program: ExportedProgram
    outputs: Structure
    assigned: tuple[str, ...]


def capture(
    model: nn.Module,
    leaves: Sequence[torch.Tensor],
    structure: Structure,
    names: Sequence[str],
    compute_dtype: torch.dtype | None = None,
) -> Capture:
    """Export ``model(*args, **kwargs)``, where `structure` rebuilds ``(args, kwargs)`` from `leaves`, called `names`.

    Args:
        compute_dtype: what floating parameters and inputs are cast to first.

    Raises:
        TraceError: the module does something that no graph can hold, with the user's line.
    """
    device = _device(model, leaves, names)
    mode = FakeTensorMode()
    wrapper = _Wrapper(model, structure, compute_dtype)
    fakes = tuple(_fake(leaf, mode, device) for leaf in leaves)
    with ExitStack() as stack:
        for context in _contexts(model, _fake_state(model, mode, device)):
            stack.enter_context(context)
        try:
            program = torch.export.export(wrapper, fakes, strict=False)
        except TraceError:
            raise
        except Exception as error:
            refuse(error)
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            give_rules(module.graph)
    assert wrapper.returned.outputs is not None
    return Capture(program, wrapper.returned.outputs, wrapper.returned.assigned)


@dataclass
class _Returned:
    """What forward returned; apart from the wrapper, because export takes back what forward assigns to attributes."""

    outputs: Structure | None = None
    assigned: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Names:
    """Names of the module's own tensors."""

    by_identity: dict[int, str]


class _Wrapper(nn.Module):
    """Give `torch.export` a function from flat tensors to flat tensors, whatever the module takes and returns."""

    def __init__(self, model: nn.Module, structure: Structure, compute_dtype: torch.dtype | None) -> None:
        super().__init__()
        self.compute_dtype = compute_dtype
        self.model = model
        self.structure = structure
        self.returned = _Returned()
        self.names = _Names({id(tensor): name for name, tensor in _tensors(model).items()})

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.compute_dtype is None:
            return self._run(leaves)
        casts: dict[int, torch.Tensor] = {}
        state = dict(self.model.named_parameters(remove_duplicate=False))
        inside = {name: casts.setdefault(id(p), _cast(p, self.compute_dtype)) for name, p in state.items()}
        with stateless._reparametrize_module(self.model, inside):  # pyright: ignore[reportPrivateUsage]
            return self._run([_cast(leaf, self.compute_dtype) for leaf in leaves])

    def _run(self, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.structure.rebuild(leaves)
        before = dict(self.model.named_buffers(remove_duplicate=False))
        attributes = _tensor_attributes(self.model)
        present = _tensors(self.model)
        with _Guard({identity: present[name] for identity, name in self.names.by_identity.items()}):
            # Hooks of the root run around the compiled call, so they are not part of the graph.
            value = self.model.forward(*args, **kwargs)
        _refuse_new_state(attributes, _tensor_attributes(self.model))
        tensors, outputs = flatten(value, merge=True)
        after = dict(self.model.named_buffers(remove_duplicate=False))
        assigned = tuple(name for name, buffer in after.items() if before.get(name) is not buffer)
        self.returned.outputs, self.returned.assigned = outputs, assigned
        if not tensors:
            raise TraceError(f"{type(self.model).__name__}: forward returns no tensor, but {outputs.text}.")
        return (*tensors, *(after[name] for name in assigned))


def _cast(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return t.to(dtype) if t.is_floating_point() else t


class _Guard(TorchFunctionMode):
    """Refuse tensor hooks, values that depend on data, generators, and tensors with a gradient that are no parameters.

    A parameter that forward reaches by another way than its module, through a Python list, is replaced by its fake.
    """

    def __init__(self, fakes: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.fakes = fakes

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self.fakes:
            return self.fakes[id(tensor)]
        if tensor.requires_grad and not isinstance(tensor, FakeTensor):
            fail(
                "a tensor that requires grad is used by forward but is not a parameter of the module: its gradient "
                "would be lost. Register it as nn.Parameter, nn.ParameterList or nn.ModuleList, or pass it as an input."
            )
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("register_hook", "register_post_accumulate_grad_hook"):
            fail(
                f"{name} on a tensor inside forward: the graph cannot hold the hook and the gradient would be lost. "
                "Set hooks on modules or parameters outside forward."
            )
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._fake, (args, kwargs or {}))
        if any(isinstance(leaf, torch.Generator) for leaf in pytree.tree_leaves((args, kwargs))):
            fail(OWN_GENERATOR.format(name=name))
        result = func(*args, **kwargs) if name != "random_" else fill_with_integers(*args, **kwargs)
        if _depends_on_data(result):
            fail(DATA_DEPENDENT.format(what=f"`{name}` makes a value or a shape that depends on data"))
        return result


def _depends_on_data(result: Any) -> bool:
    if isinstance(result, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return True
    if isinstance(result, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in result.shape)
    if isinstance(result, (list, tuple)):
        return any(_depends_on_data(part) for part in cast("Sequence[Any]", result))
    return False


def _contexts(model: nn.Module, state: dict[str, torch.Tensor]) -> Iterator[AbstractContextManager[Any]]:
    yield _attributes_kept(model)
    yield _functions_as_ops()
    yield _every_frame()
    yield nested_tensors_padded()
    yield no_seeding()
    yield checkpoints_noted()
    # A graph made in inference mode could not be differentiated; the grad mode itself is the user's.
    yield ordinary_tensors()
    yield cast("AbstractContextManager[Any]", stateless._reparametrize_module(model, state))  # pyright: ignore[reportPrivateUsage]


@contextmanager
def _every_frame() -> Generator[None]:
    """Let stack traces hold the functions that forward calls, which export leaves out: there the user's line is."""
    name = "_record_forward_stack_traces_only"
    before: Any = PythonKeyTracer.__dict__.get(name)
    setattr(PythonKeyTracer, name, property(lambda self: False, lambda self, value: None))
    try:
        yield
    finally:
        if before is None:
            delattr(PythonKeyTracer, name)
        else:
            setattr(PythonKeyTracer, name, before)


@contextmanager
def _attributes_kept(model: nn.Module) -> Generator[None]:
    """Restore every attribute of every submodule: forward runs on fakes, which must not stay behind."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def _tensor_attributes(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that modules hold as plain attributes."""
    modules: dict[str, nn.Module] = dict(cast("Any", model).named_modules())
    pairs = ((f"{name}.{key}".lstrip("."), value) for name, m in modules.items() for key, value in vars(m).items())
    return {name: value for name, value in pairs if isinstance(value, torch.Tensor)}


def _refuse_new_state(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    for name, value in before.items():
        if after.get(name) is not value:
            raise TraceError(
                f"forward assigns the tensor attribute `{name}`, which is not a buffer: its new value would be lost. "
                "Register it: self.register_buffer(name, tensor)."
            )


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer by name; those that several modules share under a name in each.

    A module that is used under two names comes once: `_reparametrize_module` would put a fake back as its own.
    """
    named: dict[str, torch.Tensor] = {}
    for path, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        own = [*module.named_parameters(recurse=False, remove_duplicate=False)]
        own += [*module.named_buffers(recurse=False, remove_duplicate=False)]
        named.update((f"{path}.{name}".lstrip("."), tensor) for name, tensor in own)
    return named


@contextmanager
def _functions_as_ops() -> Generator[None]:
    """Make each `torch.autograd.Function` one op, where non-strict export would drop its backward without a word."""

    # Not Function itself: `square = Square.apply`, at the top of a file, has taken its method already.
    base: Any = _SingleLevelFunction

    def apply(cls: type, *args: Any) -> Any:
        if cls.__name__.startswith("GeneratedBackwardFor_"):  # a torch.library op's: one node, differentiated later
            return cast(Any, super(base, cast(Any, cls))).apply(*args)
        return call_as_op(cls, args)

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        del base.apply


def _fake_state(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> dict[str, torch.Tensor]:
    """Return a fake for each parameter and buffer; names that share a tensor share the fake."""
    memo: dict[int, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(model).items():
        if id(tensor) not in memo:
            memo[id(tensor)] = _fake(tensor, mode, device)
        state[name] = memo[id(tensor)]
    return state


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    with mode, torch.inference_mode(False):
        fake = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def _device(model: nn.Module, leaves: Sequence[torch.Tensor], names: Sequence[str]) -> torch.device:
    """Return the one device of a model and its inputs; the device "meta" stands for any."""
    found: dict[torch.device, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found.setdefault(tensor.device, f"parameter `{name}`")
    named = [device for device in found if device.type != "meta"]
    for input_name, leaf in zip(names, leaves, strict=True):
        if leaf.device.type != "meta" and named and leaf.device not in named:
            raise TraceError(
                f"input `{input_name}` is on {leaf.device}, but {found[named[0]]} is on {named[0]}: "
                f"inputs and parameters must be on one device. Move the input: x.to({str(named[0])!r})."
            )
    named += [leaf.device for leaf in leaves if leaf.device.type != "meta"]
    return named[0] if named else torch.device("cpu")
