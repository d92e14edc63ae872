"""Weights to and from safetensors files in Hugging Face's layout, streamed: no rank ever holds a whole model or a whole file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from partir.checkpoint import attempt, session_of
from partir.errors import CheckpointError
from partir.model_state import Names, Saved, match_names, model_state
from partir.pieces import Block
from partir.runtime import safetensors_files as files
from partir.runtime.checkpoint import finish_earlier
from partir.runtime.held_blocks import holders
from partir.runtime.safetensors_files import Entry, Outgoing

Rename = Callable[[str], str]
FILE_BYTES = 5 * 10**9


def load_safetensors(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, rename: Rename | None = None
) -> tuple[list[str], list[str]]:
    """Load weights from safetensors, each rank reading only the slices that it holds. Every rank calls it.

    A tied parameter may be there under any of its names. Names, shapes and dtypes are compared before anything is read.

    Args:
        model: parallelized and compiled, or a plain module.
        path: of a file, or of a folder with `model.safetensors` or `model.safetensors.index.json`.
        strict: refuse names that only the model or only the files have. Shapes and dtypes always have to agree.
        rename: gives the model's name for a name in the files.

    Returns:
        The missing and the unexpected names (`strict=False`).

    Raises:
        CheckpointError: a file is missing or damaged (named), or of another model (lists missing, unexpected and mismatched names).
        RankError: another rank failed or stopped.
    """
    source, session = Path(path).absolute(), session_of(model)
    names, wanted = attempt(session, f"reading {source}", lambda: _wanted(model, source, strict, rename))
    with torch.no_grad():
        attempt(session, f"loading {source}", lambda: files.read_blocks(wanted))
    return names.missing, names.unexpected


def save_safetensors(
    model: nn.Module, path: str | os.PathLike[str], *, file_bytes: int = FILE_BYTES, rename: Rename | None = None
) -> None:
    """Write weights to safetensors in Hugging Face's layout. Every rank calls it; rank 0 writes, a chunk at a time.

    Args:
        model: parallelized, on any mesh, or a plain module in one process.
        path: of a folder that has no such files yet.
        file_bytes: the most that one file holds; of several there is an index.
        rename: gives the name in the files for the model's.

    Raises:
        CheckpointError: the folder has such files, or they cannot be written.
        RankError: another rank failed or stopped.
    """
    folder, session = Path(path).absolute(), session_of(model)
    rank = 0 if session is None else session.groups.rank
    tensors = attempt(session, f"preparing {folder}", lambda: _outgoing(model, folder, rename, rank))
    group = None if session is None else session.checkpoint_group()
    finish_earlier(group)
    try:
        files.write_files(folder, tensors, file_bytes, rank, group)
    except Exception as error:
        if session is not None:
            session.failures.report(f"stopped while writing {folder}: {error}")
        raise CheckpointError(f"{folder} was not written: {type(error).__name__}: {error}") from error
    attempt(session, f"writing {folder}", lambda: None)


def _wanted(
    model: nn.Module, source: Path, strict: bool, rename: Rename | None
) -> tuple[Names, Mapping[str, list[tuple[Entry, Block]]]]:
    found = files.entries(source)
    own = {name: name if rename is None else rename(name) for name in found}
    if len(set(own.values())) < len(own):
        raise CheckpointError(f"{source}: rename gives several tensors one name.")
    in_file = {renamed: name for name, renamed in own.items()}
    state = model_state(model)
    names = match_names(state, {own[name]: Saved(entry.shape, entry.dtype) for name, entry in found.items()}, {})
    names.check(str(source), type(model).__name__, strict)
    wanted: dict[str, list[tuple[Entry, Block]]] = {}
    for name, saved in names.source.items():
        wanted.setdefault(in_file[saved], []).append((found[in_file[saved]], state.blocks[name]))
    return names, wanted


def _outgoing(model: nn.Module, folder: Path, rename: Rename | None, rank: int) -> list[Outgoing]:
    present = [name for name in (files.SINGLE, files.INDEX) if (folder / name).exists()]
    if present:
        raise CheckpointError(f"{folder / present[0]} exists: choose another folder, or remove it first.")
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    blocks = model_state(model).blocks
    listed = [Outgoing(name if rename is None else rename(name), block, holders(tensors[name])) for name, block in blocks.items()]
    strange = [tensor.name for tensor in listed if tensor.block.tensor.dtype not in files.NAMES]
    if strange:
        raise CheckpointError(f"safetensors files cannot hold the dtype of {', '.join(strange)}.")
    return listed
