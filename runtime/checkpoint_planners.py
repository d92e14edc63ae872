"""How torch.distributed.checkpoint writes and reads blocks: each box of a block is one item, at its place in the original tensor."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from partir.pieces import Block, Piece

Entries = dict[str, Any]
"""By flat name a Block, or what is no tensor."""


class BlockSavePlanner(DefaultSavePlanner):
    """Plans one write for each box of each block.

    Args:
        paths: for each name its place in a nested dict, which torch's own readers give back.
    """

    def __init__(self, paths: Mapping[str, tuple[Any, ...]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._paths = dict(paths)
        self._entries: Entries = {}
        self._boxes: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def set_up_planner(self, state_dict: Entries, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self._entries, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for name, entry in self._entries.items():
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
            return self._entries[index.fqn]
        return self._boxes[index.fqn, tuple(index.offset)].contiguous()


class BlockLoadPlanner(DefaultLoadPlanner):
    """Plans the reads that fill each block; what is no tensor replaces its entry."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._entries: Entries = {}
        self._boxes: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def set_up_planner(self, state_dict: Entries, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._entries, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, entry in self._entries.items():
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
        self._entries[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _write_item(name: str, block: Block, piece: Piece) -> WriteItem:
    properties = TensorProperties(dtype=block.tensor.dtype)
    data = TensorWriteData(_chunk(piece), properties, torch.Size(block.shape))
    return WriteItem(MetadataIndex(name, torch.Size(piece.starts)), WriteItemType.SHARD, tensor_data=data)


def _read_facts(name: str) -> ReadItem:
    index, nothing = MetadataIndex(name), torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.starts), torch.Size(piece.sizes))
