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

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from partir.errors import CheckpointError
from partir.pieces import Block, Piece

dcp: Any = cast(Any, torch.distributed.checkpoint)

MANIFEST = "checkpoint.json"
FACTS = "facts"
"""The entry that holds all that is no tensor."""
CHECKED_BYTES = 2**20

Entries = dict[str, Any]
"""By flat name a Block; under `FACTS` a dict of plain values."""


class BlockSavePlanner(DefaultSavePlanner):
    """Plans one write for each box of each block.

    Args:
        paths: for each name its place in a nested dict, which torch's own readers give back.
    """

    def __init__(self, paths: Mapping[str, tuple[Any, ...]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._paths = dict(paths)
        self._boxes: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for name, entry in cast(Entries, self.state_dict).items():
            if not isinstance(entry, Block):
                items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)] if self.is_coordinator else []
                continue
            for piece in entry.pieces:
                self._boxes[name, piece.starts] = entry.view(piece)
                items.append(_write_item(name, entry, piece))
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        self.metadata = dataclasses.replace(metadata, planner_data=self._paths)
        return plans, self.metadata

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.offset is None:
            return cast(Entries, self.state_dict)[index.fqn]
        return self._boxes[index.fqn, tuple(index.offset)].contiguous()


class BlockLoadPlanner(DefaultLoadPlanner):
    """Plans the reads that fill each block; what is no tensor replaces its entry."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def set_up_planner(self, state_dict: Entries, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, entry in cast(Entries, self.state_dict).items():
            if not isinstance(entry, Block):
                items.append(_read_facts(name))
                continue
            self._boxes.update({(name, piece.starts): entry.view(piece) for piece in entry.pieces})
            chunks = [_chunk(piece) for piece in entry.pieces]
            items += create_read_items_for_chunk_list(name, cast(Any, self.metadata.state_dict_metadata[name]), chunks)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        box = self._boxes[read_item.dest_index.fqn, tuple(cast(torch.Size, read_item.dest_index.offset))]
        return box[tuple(slice(start, start + size) for start, size in zip(read_item.dest_offsets, read_item.lengths))]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # weights_only: what a checkpoint holds besides tensors is data, never code.
        cast(Entries, self.state_dict)[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class AtomicWriter(FileSystemWriter):
    """Writes into a folder beside the checkpoint's, which the coordinator renames when every rank has written.

    Args:
        path: of the checkpoint.
        manifest: what the manifest says.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        super().__init__(unfinished(path))
        self._target = path
        self._manifest = dict(manifest)

    def stage(self, state_dict: Entries) -> Entries:
        """Copy blocks, so that training may go on while they are written."""
        return {name: staged(entry) if isinstance(entry, Block) else entry for name, entry in state_dict.items()}

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        prefix = str(plan.storage_data.prefix)
        folder = Path(self.path)
        sums = {file.name: checksum(file) for file in sorted(folder.glob(f"{prefix}*.distcp"))}
        write_synced(folder / f"{prefix}checksums.json", json.dumps(sums))
        return written

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        super().finish(metadata, results)
        folder = Path(self.path)
        sums = {".metadata": checksum(folder / ".metadata")}
        for file in sorted(folder.glob("*checksums.json")):
            sums.update(json.loads(file.read_text()))
        write_synced(folder / MANIFEST, json.dumps({**self._manifest, "files": sums}, indent=1))
        sync_folder(folder)
        os.rename(folder, self._target)
        sync_folder(self._target.parent)


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
    unfinished(path).mkdir(parents=True)


def write(entries: Entries, paths: Mapping[str, tuple[Any, ...]], writer: AtomicWriter, group: Any) -> None:
    """Write a checkpoint; every rank of the group calls it. Without a group this process writes all of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp.save(entries, storage_writer=writer, planner=BlockSavePlanner(paths), process_group=group, no_dist=group is None)
        except CheckpointException as error:  # no Exception
            raise CheckpointError(reason(error)) from error


def write_later(entries: Entries, paths: Mapping[str, tuple[Any, ...]], writer: AtomicWriter, group: Any) -> Future[Any]:
    """Copy the blocks and write them in a thread of torch.distributed.checkpoint."""
    planner = BlockSavePlanner(paths)
    if group is None:  # said by the thread, where no context of this one reaches
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    found = dcp.async_save(entries, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
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
            dcp.load(entries, storage_reader=reader, planner=BlockLoadPlanner(), no_dist=True)
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
        raise CheckpointError(f"{path} is no complete checkpoint: it has no {MANIFEST}. partir.latest_checkpoint(folder) finds one that is.")
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
    """Yield (step, path) of the complete checkpoints in a folder."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not path.name.startswith(".") and (path / MANIFEST).is_file():
            yield manifest(path)["step"], path


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


def _write_item(name: str, block: Block, piece: Piece) -> WriteItem:
    properties = TensorProperties(dtype=block.tensor.dtype)
    data = TensorWriteData(_chunk(piece), properties, torch.Size(block.shape))
    return WriteItem(MetadataIndex(name, torch.Size(piece.starts)), WriteItemType.SHARD, tensor_data=data)


def _read_facts(name: str) -> ReadItem:
    index, nothing = MetadataIndex(name), torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.starts), torch.Size(piece.sizes))


def names_of(metadata: Metadata, prefix: str) -> Sequence[str]:
    """Return the names of entries below a prefix, without it."""
    return [name.removeprefix(prefix) for name in metadata.state_dict_metadata if name.startswith(prefix)]
