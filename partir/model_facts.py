"""What a trace reads of a model besides tensors: each module's class, its attributes, its hooks.

    ('blocks.0.drop', 'Dropout')   p: 0.1   inplace: False
    ('', 'GPT')                    config: GPTConfig(vocab_size: 64, ...)   act: function torch.tanh   table: a tensor

Numbers and texts that are attributes must be alike on all ranks. Lists, dicts and configs may hold what is not (a rank, a device), so they
count within this process alone; ranks that compile other programs are told so. What has no text (a tensor in an attribute, a function, an
object of the user's) is told by which object it is: another in its place makes another program. A change inside such an object is not
seen, unless all that it holds is plain, as in a config. An attribute that changes at every call (a counter, a list of losses) makes every
call a new signature: slow, where a stale value would be wrong.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, range, slice, torch.dtype, torch.device, torch.Size)
_SHARED = (bool, int, float, str)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
MOST = 2_000
"""Values of one attribute that are read; an object that holds more is told by which object it is."""


class Same:
    """An object that is equal to itself alone, and lives as long as this."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class _Reader:
    """Reads values, and notes the objects among them that only which object it is tells apart."""

    def __init__(self) -> None:
        self.objects: list[Same] = []
        self._texts: dict[int, str] = {}
        self._read: list[object] = []  # alive, so that their ids are theirs
        self._left = 0

    def attribute(self, value: object) -> str:
        """Return the text of an attribute."""
        if isinstance(value, _PLAIN):
            return repr(cast(object, value))
        if id(value) not in self._texts:  # a config is shared by all modules
            self._read.append(value)
            self._left, held = MOST, len(self.objects)
            text = self._text(value, ())
            if self._left < 0:
                del self.objects[held:]
                text = self._which(value)
            self._texts[id(value)] = text
        return self._texts[id(value)]

    def _text(self, value: object, above: tuple[int, ...]) -> str:
        self._left -= 1
        if isinstance(value, _PLAIN):
            return repr(cast(object, value))
        if self._left < 0:
            return ""
        if id(value) in above:
            return "itself"
        above = (*above, id(value))
        if isinstance(value, Mapping):
            pairs = cast("Mapping[Any, Any]", value).items()
            return "{" + ", ".join(f"{self._text(key, above)}: {self._text(one, above)}" for key, one in pairs) + "}"
        if isinstance(value, (list, tuple, set, frozenset)):
            several = cast("Iterable[Any]", value)
            texts = [self._text(one, above) for one in several]
            return f"{type(several).__name__}({', '.join(sorted(texts) if isinstance(several, (set, frozenset)) else texts)})"
        if isinstance(value, functools.partial):
            whole = cast("functools.partial[Any]", value)
            return f"partial({self._text(whole.func, above)}, {self._text(whole.args, above)}, {self._text(whole.keywords, above)})"
        inside = getattr(value, "__dict__", None)
        if isinstance(value, (Tensor, nn.Module, type)) or callable(value) or not isinstance(inside, dict):
            return self._which(value)
        return self._of_an_object(value, cast("dict[str, Any]", inside), above)

    def _of_an_object(self, value: object, inside: dict[str, Any], above: tuple[int, ...]) -> str:
        held = len(self.objects)
        texts = [f"{key}: {self._text(one, above)}" for key, one in inside.items()]
        if len(self.objects) > held:  # more than a config
            del self.objects[held:]
            return self._which(value)
        return f"{type(value).__qualname__}({', '.join(texts)})"

    def _which(self, value: object) -> str:
        self.objects.append(Same(value))
        return str(getattr(value, "__qualname__", type(value).__qualname__))


@dataclass(frozen=True)
class Facts:
    """What a trace reads of a model.

    Args:
        rows: a text for each attribute that is a number or a text, and the dtype of each tensor: alike on all ranks.
        here: a text for each other attribute, and what only which object it is tells apart: within this process.
        training: the modules in training mode, "all" or "none".
        frozen: the parameters that take no gradient.
    """

    rows: tuple[tuple[str, ...], ...]
    here: tuple[Hashable, ...]
    training: str
    frozen: str


def facts_of(model: nn.Module) -> Facts:
    """Return what a trace reads of a model; it is asked at each call, so the modules are walked once."""
    reader, rows, here = _Reader(), list[tuple[str, ...]](), list[Hashable]()
    training, frozen, seen, count = list[str](), list[str](), set[int](), 0
    for name, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        count += 1
        training += [name or "root"] if module.training else []
        rows.append((name, type(module).__qualname__))
        for key, value in _attributes(module):
            (rows if isinstance(value, _SHARED) else here).append((name, key, reader.attribute(value)))
        for key, t in (*cast(Any, module)._parameters.items(), *cast(Any, module)._buffers.items()):
            if t is not None and id(t) not in seen:
                seen.add(id(t))
                rows.append((name, key, str(t.dtype)))
                frozen += [f"{name}.{key}" if name else key] if isinstance(t, nn.Parameter) and not t.requires_grad else []
    trained = "all" if len(training) == count else ", ".join(training) or "none"
    return Facts(tuple(rows), (*here, *reader.objects), trained, ", ".join(frozen) or "none")


def _attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    for key, value in vars(module).items():
        if key in _HOOKS and value:
            yield key, list(value.values())
        elif key[0] != "_" and key != "training":
            yield key, value
