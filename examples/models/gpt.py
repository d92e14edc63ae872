"""A GPT in plain PyTorch: pre-norm, fused QKV, learned positions, tied embedding, dropout.

Shape suffixes:  B batch   S sequence   D hidden   H heads   K hidden of one head   F MLP hidden   V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. `block_size` is the longest sequence."""

    vocab_size: int = 256
    block_size: int = 128
    num_layers: int = 4
    num_heads: int = 8
    hidden: int = 256
    dropout: float = 0.0
    bias: bool = True

    def __post_init__(self) -> None:
        if self.hidden % self.num_heads:
            raise ValueError(f"hidden {self.hidden} is not divisible by num_heads {self.num_heads}")


class Attention(nn.Module):
    """Causal self-attention with one fused QKV linear: `[B, S, D] -> [B, S, D]`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_size = config.hidden // config.num_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=config.bias)
        self.proj = nn.Linear(config.hidden, config.hidden, bias=config.bias)
        self.proj_dropout = nn.Dropout(config.dropout)

    def forward(self, x_BSD: Tensor) -> Tensor:
        B, S, _ = x_BSD.shape
        q_BHSK, k_BHSK, v_BHSK = (
            t_BSD.view(B, S, self.num_heads, self.head_size).transpose(1, 2)
            for t_BSD in self.qkv(x_BSD).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y_BHSK = F.scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSK, dropout_p=dropout, is_causal=True)
        y_BSD = y_BHSK.transpose(1, 2).flatten(2)
        return self.proj_dropout(self.proj(y_BSD))


class MLP(nn.Module):
    """Linear, GELU, linear: `[B, S, D] -> [B, S, F] -> [B, S, D]`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden, 4 * config.hidden, bias=config.bias)
        self.fc2 = nn.Linear(4 * config.hidden, config.hidden, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSF = F.gelu(self.fc1(x_BSD))
        return self.dropout(self.fc2(h_BSF))


class Block(nn.Module):
    """One pre-norm layer: attention, then MLP, each added to the residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden, bias=config.bias)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attn(self.norm1(x_BSD))
        return x_BSD + self.mlp(self.norm2(x_BSD))


class GPT(nn.Module):
    """A causal language model.

    `model(ids)`, ids `[B, S]`, returns the logits `[B, S, V]`. `model(ids, labels)` returns the mean cross entropy,
    0-d: labels are aligned with the ids and shifted inside, as in Hugging Face models, so that training is
    `model(ids, labels=ids)`. A label of -100 does not count.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.position_embedding = nn.Embedding(config.block_size, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden, bias=config.bias)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Tie the head and draw the parameters, as GPT-2 does; call it after `to_empty` on a model made on meta."""
        self.head.weight = self.token_embedding.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        for name, parameter in self.named_parameters():
            if name.endswith(("proj.weight", "fc2.weight")):  # each adds to the residual
                nn.init.normal_(parameter, std=0.02 / (2 * self.config.num_layers) ** 0.5)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        S = ids.shape[1]
        if S > self.config.block_size:
            raise ValueError(f"a sequence of {S} is longer than block_size {self.config.block_size}")
        positions_S = torch.arange(S, device=ids.device)
        x_BSD = self.dropout(self.token_embedding(ids) + self.position_embedding(positions_S))
        for block in self.blocks:
            x_BSD = block(x_BSD)
        logits_BSV = self.head(self.norm(x_BSD))
        if labels is None:
            return logits_BSV
        targets_BS = F.pad(labels, (0, 1), value=-100)[:, 1:]  # position s predicts token s + 1
        return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())
