"""Checkpoint folders, over torch.distributed.checkpoint: blocks are written and read as boxes of the original tensor.

    .step_100.unfinished/   each rank writes its own file, and the checksum of it
    step_100/               renamed by one rank when all have written: only complete checkpoints have their name

Any mesh reads what any mesh wrote, for a box says where it lies in the whole tensor. No rank ever holds a whole tensor.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from partir.errors import CheckpointError, first_line
from partir.pieces import Block
from partir.runtime.checkpoint_planners import BlockLoadPlanner, BlockSavePlanner, Entries

# torch.distributed.checkpoint has partly unknown types throughout.
_loader, _saver = cast(Any, state_dict_loader), cast(Any, state_dict_saver)
dcp_load, dcp_save, dcp_async_save = _loader.load, _saver.save, _saver.async_save

MANIFEST = "checkpoint.json"
FACTS = "facts"
"""The entry that holds all that is no tensor."""
CHECKED_BYTES = 2**20

class AtomicWriter(FileSystemWriter):
    """Writes into a folder beside the checkpoint's, which the coordinator renames when every rank has written.

    Args:
        path: of the checkpoint.
        manifest: what the manifest says.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        cast(Any, super()).__init__(unfinished(path))
        self._folder = unfinished(path)
        self._target = path
        self._manifest = dict(manifest)

    def stage(self, state_dict: Entries) -> Entries:
        """Copy blocks, so that training may go on while they are written."""
        return {name: staged(entry) if isinstance(entry, Block) else entry for name, entry in state_dict.items()}

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        prefix = str(plan.storage_data.prefix)
        folder = self._folder
        sums = {file.name: checksum(file) for file in sorted(folder.glob(f"{prefix}*.distcp"))}
        write_synced(folder / f"{prefix}checksums.json", json.dumps(sums))
        return written

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        super().finish(metadata, results)
        folder = self._folder
        sums = {".metadata": checksum(folder / ".metadata")}
        for file in sorted(folder.glob("*checksums.json")):
            sums.update(json.loads(file.read_text()))
        write_synced(folder / MANIFEST, json.dumps({**self._manifest, "files": sums}, indent=1))
        sync_folder(folder)
        os.rename(folder, self._target)
        sync_folder(self._target.parent)


def plain_copy(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts as a load will find them, apart from what training goes on to change. A load takes data, never code.

    Raises:
        CheckpointError: a value is neither dict, list, number, text nor tensor.
    """
    written = io.BytesIO()
    try:
        torch.save(dict(facts), written)
        written.seek(0)
        return cast("dict[str, Any]", torch.load(written, weights_only=True))
    except Exception as error:
        raise CheckpointError(
            "extra= or the optimizer's groups hold a value that no checkpoint can: use dicts, lists, numbers, texts and tensors "
            f"({type(error).__name__}: {first_line(error)})."
        ) from error


def prepare(path: Path) -> None:
    """Make room for a checkpoint: drop what an earlier save that was killed left.

    Raises:
        CheckpointError: there is a checkpoint, or something else, of this name.
    """
    if not path.name or path.name.startswith("."):
        raise CheckpointError(f"{path} is no name for a checkpoint: give a folder's name that does not begin with a dot.")
    if path.exists():
        raise CheckpointError(f"{path} exists: a checkpoint is never overwritten. Name each by its step, or remove it first.")
    shutil.rmtree(unfinished(path), ignore_errors=True)
    try:
        unfinished(path).mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be made: {error}") from error


def write(entries: Entries, paths: Mapping[str, tuple[Any, ...]], writer: AtomicWriter, group: Any) -> None:
    """Write a checkpoint; every rank of the group calls it. Without a group this process writes all of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp_save(entries, storage_writer=writer, planner=BlockSavePlanner(paths), process_group=group, no_dist=group is None)
        except CheckpointException as error:  # no Exception
            raise CheckpointError(reason(error)) from error


# A group's saves follow one another: two at once would mix their messages.
_under_way: WeakKeyDictionary[Any, Future[Any]] = WeakKeyDictionary()


def finish_earlier(group: Any) -> None:
    """Wait until an earlier asynchronous save of a group's ranks is complete.

    Raises:
        CheckpointError: it failed.
    """
    earlier = None if group is None else _under_way.pop(group, None)
    error = None if earlier is None else earlier.exception()
    if error is not None:
        raise CheckpointError(f"an earlier asynchronous save failed: {reason(error)}") from error


def write_later(entries: Entries, paths: Mapping[str, tuple[Any, ...]], writer: AtomicWriter, group: Any) -> Future[Any]:
    """Copy the blocks and write them in a thread of torch.distributed.checkpoint."""
    planner = BlockSavePlanner(paths)
    if group is None:  # said by the thread, where no context of this one reaches
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    found = dcp_async_save(entries, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    if group is not None:
        _under_way[group] = found
    return cast("Future[Any]", found)


def read(entries: Entries, path: Path) -> None:
    """Fill blocks from a checkpoint. Each rank reads for itself.

    Raises:
        CheckpointError: a file cannot be read; the message names it.
    """
    reader = FileSystemReader(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        try:
            dcp_load(entries, storage_reader=reader, planner=BlockLoadPlanner(), no_dist=True)
        except CheckpointException as error:  # no Exception
            raise CheckpointError(f"{path} cannot be read: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return why a save or a load failed, by rank where torch.distributed.checkpoint says it so."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items())
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def read_metadata(path: Path) -> Metadata:
    """Return what a checkpoint holds, by flat name.

    Raises:
        CheckpointError: it is no complete checkpoint.
    """
    manifest(path)
    try:
        return FileSystemReader(path).read_metadata()
    except Exception as error:
        raise CheckpointError(f"{path / '.metadata'} is damaged: {type(error).__name__}: {error}") from error


def manifest(path: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest: its step, and the size and checksum of each file.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    file = path / MANIFEST
    if not file.is_file():
        hint = "partir.latest_checkpoint(folder) finds one that is."
        raise CheckpointError(f"{path} is no complete checkpoint: it has no {MANIFEST}. {hint}")
    try:
        found = json.loads(file.read_text())
        return {**found, "step": int(found["step"]), "files": dict(found["files"])}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error


def check_files(path: Path, share: int = 0, num_shares: int = 1) -> None:
    """Compare files with the sizes and checksums that they had when they were written.

    Args:
        share: which of `num_shares` equal shares of the files this rank reads.

    Raises:
        CheckpointError: a file is missing or differs; the message names it.
    """
    files = sorted(manifest(path)["files"].items())
    for name, expected in files[share::num_shares]:
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: the checkpoint is damaged. Load an earlier one.")
        found = checksum(file)
        if found != expected:
            raise CheckpointError(
                f"{file} is damaged: it has {found['bytes']:,} bytes with CRC-32 {found['crc32']:08x}, was written with "
                f"{expected['bytes']:,} and {expected['crc32']:08x}. Load an earlier checkpoint."
            )


def complete(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield (step, path) of the complete checkpoints in a folder, with a warning of each that is damaged."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(".") or not (path / MANIFEST).is_file():
            continue
        try:
            yield manifest(path)["step"], path
        except CheckpointError as error:
            warnings.warn(f"passed over: {error}", stacklevel=2)


def checksum(file: Path) -> dict[str, int]:
    """Return a file's size and CRC-32."""
    value = 0
    with file.open("rb") as stream:
        while part := stream.read(CHECKED_BYTES):
            value = zlib.crc32(part, value)
    return {"bytes": file.stat().st_size, "crc32": value}


def staged(block: Block) -> Block:
    """Return a copy of a block on the CPU."""
    return dataclasses.replace(block, tensor=block.tensor.detach().to("cpu", copy=True))


def unfinished(path: Path) -> Path:
    """Return the folder in which a checkpoint is written."""
    return path.parent / f".{path.name}.unfinished"


def write_synced(file: Path, text: str) -> None:
    """Write a text file that is on the disk when this returns."""
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Bring a folder's list of files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def names_of(metadata: Metadata, prefix: str) -> Sequence[str]:
    """Return the names of entries below a prefix, without it."""
    return [name.removeprefix(prefix) for name in metadata.state_dict_metadata if name.startswith(prefix)]
