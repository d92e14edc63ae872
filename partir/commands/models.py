"""The model of a command: a function in a file, or a Hugging Face config, built without weights."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from partir.commands.numbers import positive_integer
from partir.errors import PartirError, first_line

EXAMPLE = "path/to/file.py:function"


@dataclass(frozen=True)
class Model:
    """A model and a call of it."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a model."""
    help_of_model = f"{EXAMPLE}; the function returns (module, example inputs) or (module, example inputs, keyword inputs)"
    parser.add_argument("model", nargs="?", help=help_of_model)
    parser.add_argument("--hf", type=Path, metavar="CONFIG", help="a Hugging Face config.json; the model is built without weights")
    parser.add_argument("--batch", type=positive_integer, default=8, help="of the example of --hf (default: %(default)s)")
    parser.add_argument("--seq", type=positive_integer, default=None, help="sequence of --hf (default: 128, or what the model takes)")
    parser.add_argument("--dtype", default="float32", help="of the parameters of --hf (default: %(default)s)")


def load_model(options: argparse.Namespace, device: str = "meta") -> Model:
    """Return the model that the options name.

    Args:
        device: for the parameters of a Hugging Face model.

    Raises:
        PartirError: there is none, two, or it cannot be made.
    """
    if (options.model is None) == (options.hf is None):
        raise PartirError(f"give one model: {EXAMPLE}, or --hf config.json.")
    if options.hf is not None:
        return from_config(options.hf, options.batch, options.seq, options.dtype, device)
    return from_function(options.model)


def from_function(text: str) -> Model:
    """Call ``file.py:function`` and return what it makes."""
    file, separator, name = text.rpartition(":")
    if not separator or not name.isidentifier():
        raise PartirError(f"{text!r} is no model: write {EXAMPLE}.")
    if not Path(file).is_file():
        raise PartirError(f"{text}: there is no file {file}.")
    function = getattr(_import_file(Path(file)), name, None)
    if not callable(function):
        raise PartirError(f"{text}: {file} has no function {name}.")
    return _checked(text, _called(text, cast("Callable[[], Any]", function)))


def _called(text: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise PartirError(f"{text}: the function raised {type(error).__name__}: {error}") from error


def _import_file(file: Path) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise PartirError(f"{file} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise PartirError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _checked(text: str, made: Any) -> Model:
    parts: list[Any] = list(cast("tuple[Any, ...]", made)) if isinstance(made, tuple) else [made]
    if not 2 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        got = type(cast(object, made)).__name__
        raise PartirError(f"{text} returned {got}; expected (module, example inputs) or (module, inputs, keyword inputs).")
    given: Any = parts[1]
    inputs: list[Any] = list(cast("list[Any]", given)) if isinstance(given, (tuple, list)) else [given]
    kwargs: Any = parts[2] if len(parts) == 3 else {}
    if not isinstance(kwargs, dict):
        raise PartirError(f"{text}: keyword inputs are a dict of names, got {type(kwargs).__name__}.")
    unnamed = [name for name in cast("dict[Any, Any]", kwargs) if not isinstance(name, str)]
    if unnamed:
        raise PartirError(f"{text}: keyword inputs are a dict of names, and {unnamed[0]!r} is none.")
    return Model(parts[0], tuple(inputs), cast("dict[str, Any]", kwargs))


def from_config(path: Path, batch: int, seq: int | None, dtype: str, device: str = "meta") -> Model:
    """Build the model of a Hugging Face config with random weights, or none on meta, and an example of its inputs.

    Raises:
        PartirError: transformers is not there, the file is no config, or its architecture is unknown.
    """
    try:
        import transformers
    except ImportError as error:
        raise PartirError(f"--hf needs transformers: pip install transformers ({error}).") from None
    facts = _read(path)
    wanted = getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        raise PartirError(f"--dtype {dtype}: no floating-point dtype of torch.")
    try:
        config = cast(Any, transformers).AutoConfig.for_model(**facts)
        with torch.device(device):
            module = cast(nn.Module, _class_of(transformers, facts, config)(config)).to(wanted)
    except Exception as error:
        raise PartirError(f"--hf {path}: {type(error).__name__}: {first_line(error)}") from error
    return Model(module.train(), (), _example(module, config, batch, seq, device))


def _read(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise PartirError(f"--hf {path}: line {error.lineno}, column {error.colno}: this is no JSON: {error.msg}.") from None
    except UnicodeDecodeError:
        raise PartirError(f"--hf {path}: this is no text; a config.json is JSON.") from None
    if not isinstance(facts, dict) or "model_type" not in facts:
        raise PartirError(f'--hf {path}: a config of Hugging Face has a "model_type", such as "gpt2"; this has none.')
    return cast("dict[str, Any]", facts)


def _class_of(transformers: Any, facts: Mapping[str, Any], config: Any) -> Any:
    """Return the class that the config names, else the one that predicts the next token, else the plain one."""
    for name in facts.get("architectures") or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise PartirError(f"transformers has no model for {type(config).__name__}.")


def _example(module: nn.Module, config: Any, batch: int, seq: int | None, device: str) -> dict[str, Any]:
    if hasattr(config, "image_size") and hasattr(config, "num_channels"):
        size = (config.image_size,) * 2 if isinstance(config.image_size, int) else tuple(config.image_size)
        dtype = next(module.parameters()).dtype
        return {"pixel_values": torch.zeros(batch, config.num_channels, *size, device=device, dtype=dtype)}
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    longest = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    length = seq or min(128, longest or 128)
    if longest is not None and length > longest:
        raise PartirError(f"--seq {length}: this model takes at most {longest} positions.")
    ids = torch.zeros(batch, length, dtype=torch.long, device=device)
    takes_labels = "labels" in inspect.signature(module.forward).parameters
    return {"input_ids": ids, "labels": ids.clone()} if takes_labels else {"input_ids": ids}
