"""Draw what moves in three language models on 64 ranks, as docs/pictures.md shows it: no weights, no ranks, no GPU.

python -m examples.pictures --out docs/pictures      # svg needs the program dot; html none
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import partir
from examples.models.gpt import GPT, GPTConfig
from examples.models.llama import Llama, LlamaConfig

BATCH, SEQUENCE = 16, 64


def hf_gpt2() -> nn.Module:
    """Return Hugging Face's GPT-2, as small as the others."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=256, n_positions=128, n_embd=256, n_layer=4, n_head=8, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(GPTConfig()),
    "llama": lambda: Llama(LlamaConfig()),
    "hf_gpt2": hf_gpt2,
}


def plan_of(name: str, mesh: tuple[int, ...]) -> partir.Plan:
    """Return the plan of a training step of one of the models, built on the meta device."""
    with torch.device("meta"):
        model = MODELS[name]()
        ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    named: dict[str, Tensor] = {"input_ids": ids} if name.startswith("hf") else {"ids": ids}
    return partir.plan(model, mesh, example_kwargs={**named, "labels": ids})


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"), help="a folder, made if need be")
    parser.add_argument("--mesh", type=int, nargs="+", default=[4, 4, 4], help="ranks along x, y and z")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--suffixes", nargs="+", default=[".svg", ".html"], help="kinds of files")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        plan = plan_of(name, tuple(options.mesh))
        for suffix in options.suffixes:
            path = options.out / f"{name}{suffix}"
            plan.draw(path)
            print(f"{path}  {path.stat().st_size:,} bytes  {plan!r}")


if __name__ == "__main__":
    main()
