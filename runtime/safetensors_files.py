"""safetensors files, read by slices and written by chunks: no process holds more than its blocks and one chunk.

    one file        model.safetensors
    sharded         model-00001-of-00002.safetensors ..., and model.safetensors.index.json that says which tensor is where
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from partir.errors import CheckpointError
from partir.pieces import MOST_BYTES, Block, Piece
from partir.runtime.checkpoint import sync_folder
from partir.runtime.torch_dtensor import dist

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor in a file.

    Args:
        file: the file.
        shape: of the tensor.
        dtype: its torch dtype.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def entries(path: Path) -> dict[str, Entry]:
    """Return what a file, or a folder in Hugging Face's layout, holds, by name. Of a sharded folder the index says which file counts.

    Raises:
        CheckpointError: a file is missing or damaged, or lacks what the index has in it; the message names it.
    """
    index = _index(path)
    if index is None:
        return _entries_of(_single(path))
    found: dict[str, Entry] = {}
    for file in sorted(set(index.values())):
        held = _entries_of(file)
        for name in (name for name, place in index.items() if place == file):
            if name not in held:
                raise CheckpointError(f"{file} does not hold {name}, which {path / INDEX} has there.")
            found[name] = held[name]
    return found


def _entries_of(file: Path) -> dict[str, Entry]:
    with _opened(file) as opened:
        parts = {name: opened.get_slice(name) for name in opened.keys()}
        return {name: Entry(file, tuple(part.get_shape()), _dtype(part.get_dtype(), name, file)) for name, part in parts.items()}


def read_blocks(wanted: Mapping[str, Sequence[tuple[Entry, Block]]]) -> None:
    """Fill blocks by name, reading of each tensor only what the block holds.

    Raises:
        CheckpointError: a file cannot be read; the message names it.
    """
    by_file: dict[Path, list[tuple[str, Block]]] = {}
    for name, listed in wanted.items():
        for entry, block in listed:
            by_file.setdefault(entry.file, []).append((name, block))
    for file, blocks in by_file.items():
        with _opened(file) as opened:
            for name, block in blocks:
                _fill(opened, name, block)


def _fill(opened: Any, name: str, block: Block) -> None:
    for piece in block.pieces:
        if not piece.sizes:
            block.view(piece).copy_(opened.get_tensor(name))
        elif math.prod(piece.sizes):
            box = tuple(slice(start, start + size) for start, size in zip(piece.starts, piece.sizes))
            block.view(piece).copy_(opened.get_slice(name)[box])


def _index(path: Path) -> dict[str, Path] | None:
    """Return the file of each tensor, where a folder has an index."""
    if path.is_file() or not (path / INDEX).is_file():
        return None
    try:
        places = cast("dict[str, str]", json.loads((path / INDEX).read_text())["weight_map"])
        return {name: path / place for name, place in places.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path / INDEX} is damaged: {type(error).__name__}: {error}") from error


def _single(path: Path) -> Path:
    if path.is_file():
        return path
    if (path / SINGLE).is_file():
        return path / SINGLE
    raise CheckpointError(f"{path} is neither a safetensors file nor a folder with {SINGLE} or {INDEX}.")


class _Opened:
    """A safetensors file; what goes wrong in it names it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.opened: Any = None

    def __enter__(self) -> Any:
        if not self.file.is_file():
            raise CheckpointError(f"{self.file} is missing.")
        self.opened = self._guard(lambda: safetensors_open()(str(self.file), framework="pt"))
        return self.opened.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.opened.__exit__(None, None, None)
        if error is not None and not isinstance(error, CheckpointError) and isinstance(error, Exception):
            raise CheckpointError(f"{self.file} is damaged or cannot be read: {type(error).__name__}: {error}") from error

    def _guard(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            raise CheckpointError(f"{self.file} is damaged: {type(error).__name__}: {error}") from error


def _opened(file: Path) -> _Opened:
    return _Opened(file)


def safetensors_open() -> Any:
    """Return `safetensors.safe_open`.

    Raises:
        CheckpointError: safetensors is not installed.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise CheckpointError("reading safetensors files needs the package safetensors: pip install 'partir[safetensors]'.") from error
    return safe_open


def _dtype(name: str, tensor: str, file: Path) -> torch.dtype:
    if name not in DTYPES:
        raise CheckpointError(f"{file}: {tensor} has dtype {name}, which is not understood; known: {', '.join(DTYPES)}.")
    return DTYPES[name]


@dataclass(frozen=True)
class Outgoing:
    """A tensor to write.

    Args:
        name: in the file.
        block: what this process holds of it.
        holders: each piece of it with the rank that sends it.
    """

    name: str
    block: Block
    holders: Sequence[tuple[int, Piece]]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.block.shape) * self.block.tensor.element_size()


def write_files(folder: Path, tensors: Sequence[Outgoing], most_bytes: int, rank: int, group: Any) -> None:
    """Write tensors in Hugging Face's layout: rank 0 writes, a chunk at a time, what the others send.

    Args:
        most_bytes: of one file; a tensor that is larger has a file of its own.
        group: of all ranks on the CPU; None in one process.
    """
    files = _distributed_over_files(tensors, most_bytes)
    names = [SINGLE] if len(files) == 1 else [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
    for name, listed in zip(names, files):
        chunks = (chunk for tensor in listed for chunk in _chunks(tensor, rank, group))
        if rank == 0:
            _write_file(folder / name, listed, chunks)
        else:
            for _ in chunks:
                pass
    if rank == 0 and len(files) > 1:
        places = {tensor.name: name for name, listed in zip(names, files) for tensor in listed}
        index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)}, "weight_map": places}
        _write_whole(folder / INDEX, json.dumps(index, indent=2))
    if rank == 0:
        sync_folder(folder)


def _distributed_over_files(tensors: Sequence[Outgoing], most_bytes: int) -> list[list[Outgoing]]:
    files: list[list[Outgoing]] = [[]]
    size = 0
    for tensor in tensors:
        if files[-1] and size + tensor.nbytes > most_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.nbytes
    return files


def _write_file(file: Path, tensors: Sequence[Outgoing], chunks: Iterator[Tensor | None]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        where = [offset, offset + tensor.nbytes]
        header[tensor.name] = {"dtype": NAMES[tensor.block.tensor.dtype], "shape": list(tensor.block.shape), "data_offsets": where}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = file.with_name(f".{file.name}.unfinished")
    with unfinished.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for chunk in chunks:
            stream.write(cast(Tensor, chunk).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())
    os.rename(unfinished, file)


def _write_whole(file: Path, text: str) -> None:
    unfinished = file.with_name(f".{file.name}.unfinished")
    unfinished.write_text(text)
    os.rename(unfinished, file)


def _chunks(tensor: Outgoing, rank: int, group: Any) -> Iterator[Tensor | None]:
    """Yield a tensor's bytes, some rows at a time: on rank 0 as uint8 `[n]`, None elsewhere."""
    shape, dtype = tensor.block.shape, tensor.block.tensor.dtype
    if not math.prod(shape):
        return
    rows = shape[0] if shape else 1
    step = max(1, MOST_BYTES // max(1, tensor.nbytes // rows))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        chunk = torch.empty((stop - start, *shape[1:]), dtype=dtype) if rank == 0 else None
        for holder, piece in tensor.holders:
            _move(tensor, holder, piece, (start, stop), rank, group, chunk)
        yield None if chunk is None else chunk.view(-1).view(torch.uint8)


def _move(tensor: Outgoing, holder: int, piece: Piece, rows: tuple[int, int], rank: int, group: Any, chunk: Tensor | None) -> None:
    """Bring the rows of a piece from its holder into rank 0's chunk."""
    first = piece.starts[0] if piece.starts else 0
    size = piece.sizes[0] if piece.sizes else 1
    low, high = max(rows[0], first), min(rows[1], first + size)
    if low >= high or rank not in (0, holder):
        return
    place = None
    if chunk is not None:
        box = [slice(start, start + size) for start, size in zip(piece.starts, piece.sizes)]
        place = chunk[(slice(low - rows[0], high - rows[0]), *box[1:])]
    if rank == holder:
        held = tensor.block.view(piece)
        held = (held[low - first : high - first] if piece.sizes else held.view(1)).detach().cpu().contiguous()
        if place is None:
            dist.send(held.view(-1).view(torch.uint8), 0, group=group)
        else:
            place.copy_(held)
        return
    received = torch.empty(cast(Tensor, place).shape, dtype=tensor.block.tensor.dtype)
    dist.recv(received.view(-1).view(torch.uint8), holder, group=group)
    cast(Tensor, place).copy_(received)
