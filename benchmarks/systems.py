"""One GPT under each system: DDP, FSDP2, DTensor tensor parallelism, FSDP2 x tensor parallelism, partir."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from examples.models.gpt import GPT, GPTConfig


@dataclass
class System:
    """A model in training: `step` takes the global batch, passes on its share (index, of how many), and updates."""

    name: str
    model: nn.Module
    share: tuple[int, int] = (0, 1)
    context: Callable[[], Any] = contextlib.nullcontext
    record: Callable[[], Any] = contextlib.nullcontext

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, ids: Tensor) -> Tensor:
        """Train on ids `[B, S]`; return this rank's loss."""
        index, count = self.share
        ids = ids.chunk(count)[index]
        with self.context():
            loss = self.model(ids, labels=ids)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def make_model(config: GPTConfig) -> GPT:
    """Return the same model on every rank and for every system."""
    torch.manual_seed(0)
    return GPT(config)


def build_single(config: GPTConfig) -> System:
    return System("one process", make_model(config))


def build_ddp(config: GPTConfig) -> System:
    model = DistributedDataParallel(make_model(config), gradient_as_bucket_view=True)
    return System("DDP", model, (dist.get_rank(), dist.get_world_size()))


def shard_fully(model: GPT, mesh: DeviceMesh) -> GPT:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # pyright: ignore[reportReturnType]


def build_fsdp(config: GPTConfig) -> System:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return System("FSDP2", shard_fully(make_model(config), mesh), (mesh.get_rank(), mesh.size()))


def split_heads(model: GPT, ranks: int) -> None:
    """Order the fused QKV rows so that an eighth of them is whole heads of q, k and v, and tell the module."""
    for block in model.blocks:
        attn: Any = block.attn
        attn.num_heads //= ranks
        rows = torch.arange(attn.qkv.out_features).view(3, ranks, -1).transpose(0, 1).flatten()
        attn.qkv.weight.data = attn.qkv.weight.data[rows]
        attn.qkv.bias.data = attn.qkv.bias.data[rows]


def split_tensors(model: GPT, mesh: DeviceMesh) -> GPT:
    """Apply torch's own tensor parallelism, with sequence parallelism between the blocks."""
    split_heads(model, mesh.size())
    layer = {
        "norm1": SequenceParallel(),
        "attn": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "attn.qkv": ColwiseParallel(),
        "attn.proj": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.fc1": ColwiseParallel(),
        "mlp.fc2": RowwiseParallel(output_layouts=Shard(1)),
    }
    plan = {f"blocks.{i}.{name}": style for i in range(len(model.blocks)) for name, style in layer.items()}
    plan["token_embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    plan["position_embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    plan["norm"] = SequenceParallel()
    plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, plan)
    model.head.weight = model.token_embedding.weight
    return model


def build_tensor_parallel(config: GPTConfig) -> System:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return System("DTensor TP + SP", split_tensors(make_model(config), mesh), context=loss_parallel)


def build_fsdp_tensor_parallel(config: GPTConfig) -> System:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    data = mesh["data"]
    model = shard_fully(split_tensors(make_model(config), mesh["tensor"]), data)
    return System("FSDP2 x TP", model, (data.get_local_rank(), data.size()), loss_parallel)


def build_partir(config: GPTConfig, mesh: tuple[int, ...], memory: str) -> System:
    import partir

    model = partir.parallelize(make_model(config), mesh=mesh, memory=memory)
    return System(f"partir {','.join(map(str, mesh))} {memory}", model, record=partir.record_communication)


PEERS: dict[str, Callable[[GPTConfig], System]] = {
    "ddp": build_ddp,
    "fsdp": build_fsdp,
    "tp": build_tensor_parallel,
    "fsdp-tp": build_fsdp_tensor_parallel,
}
