"""Checkpoints: a model, its optimizer and where its run stands, from any mesh to any other, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from partir.errors import CheckpointError
from partir.model_state import (
    Names,
    Saved,
    check_optimizer,
    match_names,
    model_state,
    optimizer_names,
    optimizer_state,
    room_for_optimizer,
)
from partir.module import ParallelModule, parallelized
from partir.runtime import checkpoint as folder_of
from partir.runtime.checkpoint import FACTS, AtomicWriter, Entries
from partir.runtime.session import Session

MODEL, OPTIMIZER = "model.", "optimizer.state."
FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says of its run, besides the tensors that were loaded.

    Args:
        path: of the checkpoint.
        step: as it was given to `save_checkpoint`.
        extra: as it was given to `save_checkpoint`.
        seed: `torch.initial_seed()` of rank 0 where it was saved.
        calls: how often the model had been called; with `seed` it says what random numbers come next.
        missing: names that only the model has (`strict=False`).
        unexpected: names that only the checkpoint has (`strict=False`).
    """

    path: Path
    step: int
    extra: dict[str, Any]
    seed: int
    calls: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@dataclass(frozen=True)
class SavingCheckpoint:
    """A checkpoint that is being written.

    Args:
        path: where it will be.
    """

    path: Path
    _future: Future[Any] | None = field(default=None, repr=False)

    def wait(self) -> Path:
        """Return the path once the checkpoint is complete. Every rank should wait before the process ends.

        Raises:
            CheckpointError: it was not written.
        """
        if self._future is not None:
            error = self._future.exception()
            if error is not None:
                raise _not_saved(self.path, error) from error
        return self.path

    def done(self) -> bool:
        """Return whether the checkpoint is complete, or failed."""
        return self._future is None or self._future.done()


def save_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: str | os.PathLike[str],
    *,
    step: int = 0,
    extra: Mapping[str, Any] | None = None,
    calls: int | None = None,
    asynchronous: bool = False,
) -> SavingCheckpoint:
    """Write a model, its optimizer and where the run stands to a new folder. Every rank calls it.

    Each rank writes what it holds, by torch.distributed.checkpoint. The folder gets its name when all have written: a save that is
    killed leaves nothing under it, and earlier checkpoints are never touched. On more than one machine the folder is a shared one.

    Args:
        model: parallelized, on any mesh, or a plain module in one process.
        optimizer: of the model's parameters; None saves the model alone.
        path: of the new folder, a name for each step: `runs/step_100`.
        step: kept, and read by `latest_checkpoint`.
        extra: kept, as the state of a data loader or of a learning rate schedule: dicts, lists, numbers, texts and tensors.
        calls: of a plain module under `same_randomness`: how often it was called. A parallelized module counts.
        asynchronous: return when the state is copied to the CPU; a thread writes it.

    Returns:
        The checkpoint to wait for; complete unless `asynchronous`.

    Raises:
        CheckpointError: the path exists, a file cannot be written, or the optimizer is of other parameters.
        RankError: another rank failed or stopped.
    """
    target, session = Path(path).absolute(), session_of(model)
    group = None if session is None else session.checkpoint_group()
    folder_of.finish_earlier(group)
    entries, paths = attempt(session, "gathering the state to save", lambda: _entries(model, optimizer, step, extra, calls))
    attempt(session, f"making {target}", lambda: folder_of.prepare(target) if _first(session) else None)
    writer = AtomicWriter(target, {"format": FORMAT, "step": step})
    if asynchronous:
        return SavingCheckpoint(target, folder_of.write_later(entries, paths, writer, group))
    try:
        folder_of.write(entries, paths, writer, group)
    except Exception as error:
        if session is not None:
            session.failures.report(f"stopped while saving {target}: {error}")
        raise _not_saved(target, error) from error
    return SavingCheckpoint(target)


def load_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    restore_seed: bool = True,
) -> Checkpoint:
    """Load what `save_checkpoint` wrote, on whatever mesh, in place. Every rank calls it, and reads only what it holds.

    Files are first compared with their checksums and names with the model's: a refusal leaves everything as it was.

    Args:
        model: parallelized, on any mesh, or a plain module.
        optimizer: of the model's parameters, with the same groups; None leaves the optimizer's state in the file.
        path: of the checkpoint's folder.
        strict: refuse names that only the model or only the checkpoint has. Shapes and dtypes always have to agree.
        restore_seed: call `torch.manual_seed` with the seed of the run that saved, so that random numbers go on as they would have.

    Raises:
        CheckpointError: it is incomplete, damaged, or of another model or optimizer; names the file, or lists the names.
        RankError: another rank failed or stopped.
    """
    source, session = Path(path).absolute(), session_of(model)
    rank, size = (0, 1) if session is None else (session.groups.rank, session.mesh.size)
    attempt(session, f"checking {source}", lambda: folder_of.check_files(source, rank, size))
    plan = attempt(session, f"reading {source}", lambda: _plan(model, optimizer, source, strict))
    attempt(session, f"loading {source}", lambda: _fill(model, optimizer, source, plan))
    facts = plan.facts
    if restore_seed:
        cast(Any, torch).manual_seed(facts["seed"])
    if isinstance(model, ParallelModule):
        parallelized(model).calls = facts["calls"]
    names = plan.names
    return Checkpoint(
        source, facts["step"], facts["extra"], facts["seed"], facts["calls"], tuple(names.missing), tuple(names.unexpected)
    )


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint of the highest step in a folder, None where there is none.

    Example:
        >>> latest_checkpoint("no/such/folder") is None
        True
    """
    found = max(folder_of.complete(Path(folder).absolute()), default=None)
    return None if found is None else found[1]


@dataclass(frozen=True)
class _Plan:
    names: Names
    rounds: list[Entries]
    facts: dict[str, Any]
    tensors: dict[str, dict[str, torch.Tensor]]


def _entries(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, step: int, extra: Mapping[str, Any] | None, calls: int | None
) -> tuple[Entries, dict[str, tuple[Any, ...]]]:
    """Return what to save by flat name, and for each name its place in the nested dict that torch's own readers give."""
    state = model_state(model)
    entries: Entries = {MODEL + name: block for name, block in state.blocks.items()}
    paths: dict[str, tuple[Any, ...]] = {MODEL + name: ("model", name) for name in state.blocks}
    counted = parallelized(model).calls if isinstance(model, ParallelModule) else calls or 0
    facts: dict[str, Any] = {"step": step, "extra": dict(extra or {}), "tied": dict(state.tied)}
    facts |= {"calls": counted, "seed": torch.initial_seed()}
    if optimizer is not None:
        own = optimizer_state(model, optimizer)
        entries.update({OPTIMIZER + name: block for name, block in own.blocks.items()})
        paths.update({OPTIMIZER + name: ("optimizer", "state", *key) for name, key in own.keys.items()})
        facts["optimizer"] = {"groups": own.groups, "plain": own.plain, "keys": dict(own.keys)}
    entries[FACTS], paths[FACTS] = folder_of.plain_copy(facts), (FACTS,)
    return entries, paths


def _plan(model: nn.Module, optimizer: torch.optim.Optimizer | None, source: Path, strict: bool) -> _Plan:
    """Compare a checkpoint with what is to be filled, and say what to read where."""
    metadata = folder_of.read_metadata(source)
    given: Entries = {FACTS: None}
    folder_of.read(given, source)
    facts = cast("dict[str, Any]", given[FACTS])
    state, saved = model_state(model), _saved(metadata, MODEL)
    names = match_names(state, saved, facts["tied"])
    names.check(str(source), type(model).__name__, strict)
    rounds: list[Entries] = [{}]
    for name, found in names.source.items():
        _enter(rounds, MODEL + found, state.blocks[name])
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    if optimizer is not None:
        own = facts.get("optimizer")
        if own is None:
            raise CheckpointError(f"{source} holds no optimizer state; pass None for the optimizer.")
        check_optimizer(str(source), model, optimizer, own["groups"])
        room, tensors = room_for_optimizer(model, optimizer, own["keys"], _saved(metadata, OPTIMIZER))
        rounds[0].update({OPTIMIZER + name: block for name, block in room.items()})
    return _Plan(names, rounds, facts, tensors)


def _enter(rounds: list[Entries], name: str, block: Any) -> None:
    """Put an entry in the first round that has none of its name: what was one tensor may be read into several."""
    free = next((entries for entries in rounds if name not in entries), None)
    if free is None:
        rounds.append(free := {})
    free[name] = block


def _fill(model: nn.Module, optimizer: torch.optim.Optimizer | None, source: Path, plan: _Plan) -> None:
    with torch.no_grad():
        for entries in plan.rounds:
            folder_of.read(entries, source)
    if optimizer is None:
        return
    own = plan.facts["optimizer"]
    order = [name for group in optimizer_names(model, optimizer) for name in group]
    places = {name: place for place, name in enumerate(order)}
    known = sorted({*own["plain"], *plan.tensors}, key=lambda name: places[name])
    state = {places[name]: {**own["plain"].get(name, {}), **plan.tensors.get(name, {})} for name in known}
    packed = optimizer.state_dict()["param_groups"]
    groups = [{**group, "params": mine["params"]} for group, mine in zip(own["groups"], packed)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, tensors in plan.tensors.items():
        held = optimizer.state[parameters[places[name]]]
        # torch casts state to the dtype of its parameter: the float32 copy that an optimizer keeps of a bfloat16 one would be rounded.
        held.update({key: t for key, t in tensors.items() if isinstance(held.get(key), torch.Tensor) and held[key].dtype != t.dtype})


def _saved(metadata: Any, prefix: str) -> dict[str, Saved]:
    entries = metadata.state_dict_metadata
    names = folder_of.names_of(metadata, prefix)
    return {name: Saved(tuple(entries[prefix + name].size), entries[prefix + name].properties.dtype) for name in names}


def attempt(session: Session | None, what: str, call: Any) -> Any:
    """Do something on every rank; if it fails on one, all raise."""
    result, error = None, None
    try:
        result = call()
    except Exception as caught:
        error = caught
    if session is not None:
        session.agreement.succeed(what, error)
    elif error is not None:
        raise error
    return result


def session_of(model: nn.Module) -> Session | None:
    """Return this process's rank of a parallelized model; None where one process holds all of it."""
    return parallelized(model).session(model) if isinstance(model, ParallelModule) else None


def _first(session: Session | None) -> bool:
    return session is None or session.groups.rank == 0


def _not_saved(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(f"{path} was not saved; earlier checkpoints are as they were. {folder_of.reason(error)}")
