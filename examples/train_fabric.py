"""Train a GPT with Lightning Fabric: its strategy for models that split themselves calls `partir.parallelize` as it is.

    pip install lightning-fabric
    torchrun --nproc-per-node 4 examples/train_fabric.py
"""

from __future__ import annotations

import os

import torch
from lightning_fabric import Fabric  # pyright: ignore[reportMissingImports]
from lightning_fabric.strategies import ModelParallelStrategy  # pyright: ignore[reportMissingImports]
from models.gpt import GPT, GPTConfig

import partir

MESH = (2, 2, 1)


def main() -> None:
    # Fabric's own mesh is for its data loaders: one batch for all ranks.
    split = {"data_parallel_size": 1, "tensor_parallel_size": int(os.environ["WORLD_SIZE"])}
    strategy = ModelParallelStrategy(lambda model, device_mesh: partir.parallelize(model, mesh=MESH), **split)
    fabric = Fabric(accelerator="auto", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup_module(GPT(GPTConfig(block_size=16, num_layers=1, num_heads=4, hidden=32)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    ids = torch.randint(256, (8, 16), generator=torch.Generator().manual_seed(0))
    for step in range(4):
        loss = model(ids, labels=ids)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        fabric.print(f"step {step}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
