"""Run a module once on fake tensors under `torch.export` and return the raw graph; the private calls of capture live here.

Non-strict `torch.export` runs the user's Python on fake tensors: nothing is computed and no weights are needed. It accepts
some models whose gradients it then loses, so everything that would be lost is refused here: custom backward functions,
tensor hooks, values that leave the graph for Python, autocast.

Ensures: the module is as it was, its parameters, flags and attributes the same objects, also after a failure.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import Function
from torch.export import ExportedProgram
from torch.nn.utils import stateless
from torch.overrides import TorchFunctionMode

from partir.errors import TraceError
from partir.passes.structure import Structure, flatten

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_RESTORED_APART = ("_parameters", "_buffers", "_modules")


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


def capture(model: nn.Module, leaves: Sequence[torch.Tensor], structure: Structure) -> Capture:
    """Export ``model(*args, **kwargs)``, where `structure` rebuilds ``(args, kwargs)`` from `leaves`.

    Raises:
        TraceError: the module does something that no graph can hold, with the user's line.
    """
    device = _device(model, leaves)
    mode = FakeTensorMode()
    wrapper = _Wrapper(model, structure)
    fakes = tuple(_fake(leaf, mode, device) for leaf in leaves)
    with ExitStack() as stack:
        for context in _contexts(model, _fake_state(model, mode, device)):
            stack.enter_context(context)
        try:
            program = torch.export.export(wrapper, fakes, strict=False)
        except TraceError:
            raise
        except Exception as error:
            _refuse(error)
    assert wrapper.returned.outputs is not None
    return Capture(program, wrapper.returned.outputs, wrapper.returned.assigned)


def user_stack(stack_trace: str) -> str:
    """Return a stack trace without the frames of torch and of this package, if others remain.

    The line that made a node is then the last one, also where the op is called by a module of ``torch.nn``.
    """
    frames = ["  File " + part for part in ("\n" + stack_trace).replace("\nFile ", "\n  File ").split("\n  File ")[1:]]
    files = [frame.split('"')[1] if '"' in frame else "" for frame in frames]
    own = [frame for frame, file in zip(frames, files, strict=True) if not _foreign(file)]
    rest = [frame for frame, file in zip(frames, files, strict=True) if not file.startswith(_HERE)]
    return "\n".join(own or rest)


@dataclass
class _Returned:
    """What forward returned; apart from the wrapper, because export takes back what forward assigns to attributes."""

    outputs: Structure | None = None
    assigned: tuple[str, ...] = ()


class _Wrapper(nn.Module):
    """Give `torch.export` a function from flat tensors to flat tensors, whatever the module takes and returns."""

    def __init__(self, model: nn.Module, structure: Structure) -> None:
        super().__init__()
        self.model = model
        self.structure = structure
        self.returned = _Returned()

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.structure.rebuild(leaves)
        before = dict(self.model.named_buffers(remove_duplicate=False))
        with _Guard():
            # Hooks of the root run around the compiled call, so they are not part of the graph.
            value = self.model.forward(*args, **kwargs)
        tensors, outputs = flatten(value, merge=True)
        after = dict(self.model.named_buffers(remove_duplicate=False))
        assigned = tuple(name for name, buffer in after.items() if before.get(name) is not buffer)
        self.returned.outputs, self.returned.assigned = outputs, assigned
        if not tensors:
            raise TraceError(f"{type(self.model).__name__}: forward returns no tensor, but {outputs.text}.")
        return (*tensors, *(after[name] for name in assigned))


class _Guard(TorchFunctionMode):
    """Refuse tensor hooks, and values that leave the graph: Python numbers and shapes that depend on data."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("register_hook", "register_post_accumulate_grad_hook"):
            _fail(
                f"{name} on a tensor inside forward: the graph cannot hold the hook and the gradient would be lost. "
                "Set hooks on modules or parameters outside forward."
            )
        result = func(*args, **(kwargs or {}))
        if _depends_on_data(result):
            _fail(DATA_DEPENDENT.format(what=f"`{name}` makes a value or a shape that depends on data"))
        return result


DATA_DEPENDENT = (
    "{what}: one graph must serve every input, so control flow, Python numbers and shapes may depend on shapes only. "
    "Use torch.where, masks or a fixed size instead."
)


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
    yield _no_autograd_functions()
    # A graph made in inference mode could not be differentiated; the grad mode itself is the user's.
    yield torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    yield cast("AbstractContextManager[Any]", stateless._reparametrize_module(model, state))  # pyright: ignore[reportPrivateUsage]


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restore every attribute of every submodule: forward runs on fakes, which must not stay behind."""
    before = [(name, module, dict(vars(module))) for name, module in model.named_modules()]
    replaced: list[str] = []
    try:
        yield
    finally:
        for name, module, attributes in before:
            now = vars(module)
            replaced += [f"{name}.{key}".lstrip(".") for key in attributes if _tensor_replaced(attributes[key], now.get(key))]
            now.clear()
            now.update(attributes)
    if replaced:
        raise TraceError(
            f"forward assigns the tensor attribute `{replaced[0]}`, which is not a buffer: its new value would be lost. "
            "Register it with register_buffer."
        )


def _tensor_replaced(before: Any, after: Any) -> bool:
    return isinstance(before, torch.Tensor) and before is not after


@contextmanager
def _no_autograd_functions() -> Iterator[None]:
    """Refuse `torch.autograd.Function`, whose backward non-strict export drops without a word."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        _fail(
            f"torch.autograd.Function `{cls.__name__}`: its backward is not part of the graph, gradients would be silently wrong. "
            "Write it as plain torch ops, or as a torch.library custom op with register_autograd and a rule."
        )

    original = Function.__dict__["apply"]
    setattr(Function, "apply", classmethod(refuse))
    try:
        yield
    finally:
        setattr(Function, "apply", original)


def _fake_state(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> dict[str, torch.Tensor]:
    """Return a fake for each parameter and buffer; names that share a tensor share the fake."""
    memo: dict[int, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
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


def _device(model: nn.Module, leaves: Sequence[torch.Tensor]) -> torch.device:
    """Return the one device of a model and its inputs; the device "meta" stands for any."""
    found: dict[torch.device, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found.setdefault(tensor.device, f"parameter `{name}`")
    named = [device for device in found if device.type != "meta"]
    for index, leaf in enumerate(leaves):
        if leaf.device.type != "meta" and named and leaf.device not in named:
            raise TraceError(
                f"input {index} is on {leaf.device}, but {found[named[0]]} is on {named[0]}: "
                f"inputs and parameters must be on one device. Move the input: x.to({str(named[0])!r})."
            )
    named += [leaf.device for leaf in leaves if leaf.device.type != "meta"]
    return named[0] if named else torch.device("cpu")


def _foreign(filename: str) -> bool:
    return filename.startswith((_TORCH, _HERE, "<"))


def _fail(message: str) -> NoReturn:
    """Raise a TraceError that starts with the innermost line of user code now running."""
    frames = [frame for frame in traceback.extract_stack() if not _foreign(frame.filename)]
    raise TraceError(f"{_where(frames)}{message}")


def _refuse(error: Exception) -> NoReturn:
    """Raise a TraceError for whatever stopped the trace, with the user's line."""
    cause: BaseException = error
    while isinstance(cause.__cause__, Exception) and not isinstance(cause, TraceError):
        cause = cause.__cause__
    if isinstance(cause, TraceError):
        raise cause from None
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _foreign(frame.filename)]
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "DataDependent" in type(error).__name__ or "data-dependent" in text.lower():
        raise TraceError(_where(frames) + DATA_DEPENDENT.format(what="control flow depends on data")) from error
    raise TraceError(f"{_where(frames)}the model cannot be traced: {type(error).__name__}: {text}") from error


def _where(frames: Sequence[traceback.FrameSummary]) -> str:
    if not frames:
        return ""
    frame = frames[-1]
    code = f"`{frame.line.strip()}`: " if frame.line else ""
    return f"{frame.filename}:{frame.lineno}: {code}"
