"""A model's and an optimizer's state by original names, as the blocks that this process holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from partir.errors import CheckpointError
from partir.pieces import Block
from partir.runtime.held_blocks import check_elementwise, empty_state, held_block

SHOWN_NAMES = 8


@dataclass(frozen=True)
class ModelState:
    """The tensors of a model that a state dict holds.

    Args:
        blocks: by name, each tensor once: under its first name.
        tied: other name -> first name, of tensors that have several.
    """

    blocks: Mapping[str, Block]
    tied: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        """Every name of a state dict."""
        return [*self.blocks, *self.tied]


@dataclass(frozen=True)
class Saved:
    """What a file says of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class Names:
    """How the names of a file and of a model meet.

    Args:
        source: name in the model -> name in the file, of what is to be read.
        missing: names that only the model has.
        unexpected: names that only the file has.
        mismatched: texts that say of a name what is saved and what the model has.
    """

    source: dict[str, str] = field(default_factory=dict[str, str])
    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])
    mismatched: list[str] = field(default_factory=list[str])

    def check(self, where: str, model: str, strict: bool) -> None:
        """Raise if the file is of another model.

        Args:
            where: the file.
            strict: refuse missing and unexpected names, too.

        Raises:
            CheckpointError: lists the names.
        """
        found = [("mismatched", self.mismatched)]
        if strict:
            found += [("missing", self.missing), ("unexpected", self.unexpected)]
        if any(names for _, names in found):
            lines = [f"    {kind} ({len(names)}): {shown(names)}" for kind, names in found if names]
            hint = " strict=False leaves out names that only one of them has." if not self.mismatched else ""
            raise CheckpointError(f"{where} is not of this {model}; nothing was loaded.{hint}\n" + "\n".join(lines))


def model_state(model: nn.Module) -> ModelState:
    """Return the parameters and persistent buffers of a model.

    Raises:
        CheckpointError: a module has extra state, which is no tensor.
    """
    first: dict[int, str] = {}
    blocks: dict[str, Block] = {}
    tied: dict[str, str] = {}
    for name, t in _tensors(model):
        known = first.setdefault(id(t), name)
        if known == name:
            blocks[name] = held_block(t)
        else:
            tied[name] = known
    return ModelState(blocks, tied)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    left_out: set[str] = set()
    for path, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False)):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            where = path or type(module).__name__
            raise CheckpointError(f"{where} has extra state (get_extra_state), which no checkpoint holds; save it in extra=.")
        left_out.update(f"{path}.{name}" if path else name for name in cast(Any, module)._non_persistent_buffers_set)
    yield from model.named_parameters(remove_duplicate=False)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name not in left_out:
            yield name, buffer


def match_names(state: ModelState, saved: Mapping[str, Saved], saved_tied: Mapping[str, str]) -> Names:
    """Say for each tensor of a model where to read it. A tensor with several names may be saved under any of them.

    Args:
        saved: what the file has.
        saved_tied: other name -> first name of tensors that the file has once.
    """
    names = Names()
    available = {**{name: name for name in saved}, **{other: first for other, first in saved_tied.items() if first in saved}}
    for name, block in state.blocks.items():
        own = [name, *(other for other, first in state.tied.items() if first == name)]
        sources = list(dict.fromkeys(available[one] for one in own if one in available))
        if not sources:
            names.missing.append(name)
        elif len(sources) > 1:
            names.mismatched.append(f"{' and '.join(own)} are one parameter here, {' and '.join(sources)} are two there")
        else:
            _match(names, name, block, sources[0], saved[sources[0]])
    known = {*state.names, *names.source.values()}
    names.unexpected.extend(name for name in saved if name not in known)
    return names


def _match(names: Names, name: str, block: Block, source: str, saved: Saved) -> None:
    expected = Saved(block.shape, block.tensor.dtype)
    if saved == expected:
        names.source[name] = source
    else:
        names.mismatched.append(f"{name}: saved {saved}, the model has {expected}")


def shown(names: Iterable[str]) -> str:
    """Return a list of names as text, the first ones of a long one."""
    names = list(names)
    return ", ".join(names[:SHOWN_NAMES]) + (f", ... and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else "")


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer's state by the names of its parameters.

    Args:
        blocks: "name.key" -> block, of the state that is tensors.
        plain: name -> key -> value, of the rest.
        groups: `param_groups` with names for parameters.
        keys: "name.key" -> (name, key).
    """

    blocks: Mapping[str, Block]
    plain: Mapping[str, Mapping[str, Any]]
    groups: list[dict[str, Any]]
    keys: Mapping[str, tuple[str, str]]


def optimizer_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of an optimizer's parameters, a list a group.

    Raises:
        CheckpointError: it has parameters that are not the model's.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    groups = cast("list[list[Tensor]]", [group["params"] for group in optimizer.param_groups])
    strange = [p for group in groups for p in group if id(p) not in names]
    if strange:
        shapes = shown(str(list(p.shape)) for p in strange)
        raise CheckpointError(
            f"the optimizer holds {len(strange)} parameters that are not the model's (shapes {shapes}): build it after parallelize."
        )
    return [[names[id(p)] for p in group] for group in groups]


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Return an optimizer's state."""
    names = optimizer_names(model, optimizer)
    blocks: dict[str, Block] = {}
    plain: dict[str, dict[str, Any]] = {}
    keys: dict[str, tuple[str, str]] = {}
    for name, parameter in _named(names, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                plain.setdefault(name, {})[key] = value
                continue
            check_elementwise(name, key, value, parameter)
            blocks[f"{name}.{key}"] = held_block(value, like=parameter if value.shape == parameter.shape else None)
            keys[f"{name}.{key}"] = (name, key)
    groups = [{**group, "params": own} for group, own in zip(optimizer.param_groups, names)]
    return OptimizerState(blocks, plain, groups, keys)


def _named(names: list[list[str]], optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for group, own in zip(optimizer.param_groups, names):
        yield from zip(own, group["params"])


def room_for_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, keys: Mapping[str, tuple[str, str]], saved: Mapping[str, Saved]
) -> tuple[dict[str, Block], dict[str, dict[str, Tensor]]]:
    """Return blocks to fill by "name.key", and the tensors that they are part of by name and key."""
    parameters = dict(_named(optimizer_names(model, optimizer), optimizer))
    blocks: dict[str, Block] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    for entry, (name, key) in keys.items():
        tensors.setdefault(name, {})[key], blocks[entry] = empty_state(parameters[name], key, saved[entry].shape, saved[entry].dtype)
    return blocks, tensors


def check_optimizer(where: str, model: nn.Module, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Refuse an optimizer state that is of another kind of optimizer, or of other parameters.

    Raises:
        CheckpointError: lists the names.
    """
    saved = {key for group in groups for key in group} - {"params"}
    own = {key for group in optimizer.param_groups for key in group} - {"params"}
    if saved - own and own - saved:  # a schedule adds options, another optimizer lacks some, too
        raise CheckpointError(
            f"{where}: its optimizer state is of another optimizer than {type(optimizer).__name__}: it has the options "
            f"{', '.join(sorted(saved - own))}, which this one lacks, and not {', '.join(sorted(own - saved))}. Nothing was loaded."
        )
    _check_groups(where, optimizer_names(model, optimizer), groups)


def _check_groups(where: str, expected: list[list[str]], groups: list[dict[str, Any]]) -> None:
    saved = [cast("list[str]", group["params"]) for group in groups]
    if [sorted(own) for own in saved] == [sorted(own) for own in expected]:
        return
    have, had = {name for own in expected for name in own}, {name for own in saved for name in own}
    lines = [(kind, sorted(names)) for kind, names in (("missing", have - had), ("unexpected", had - have)) if names]
    if not lines:
        sizes = f"{[len(own) for own in saved]}, the optimizer's have {[len(own) for own in expected]}"
        raise CheckpointError(f"{where}: its parameter groups have {sizes} parameters, or in another order: group them as they were.")
    text = "\n".join(f"    {kind} ({len(names)}): {shown(names)}" for kind, names in lines)
    raise CheckpointError(f"{where}: its optimizer state is of other parameters; nothing was loaded.\n{text}")
