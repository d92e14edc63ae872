"""Import timm without torchvision: its models need nothing of it, but its modules name classes of torchvision when they are imported.

The torchvision of PyPI is built for CUDA's torch; beside the CPU one its import fails, and with it that of transformers, which looks for
it. So timm is installed without its dependencies, and finds empty classes here, as long as it is being imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast


class _Anything(type):
    """A class that has every attribute: another class of its kind."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _StandIn(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Finder:
    """Finds every module of torchvision, empty."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, cast(Any, _Finder)) if name.split(".")[0] == "torchvision" else None

    @staticmethod
    def create_module(spec: Any) -> ModuleType:
        return _StandIn(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        return None


@contextmanager
def _stand_in() -> Generator[None]:
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    sys.meta_path.append(_Finder)
    try:
        yield
    finally:
        sys.meta_path.remove(_Finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]


def import_timm(module: str = "timm") -> Any:
    """Return a module of timm."""
    with _stand_in():
        return importlib.import_module(module)
