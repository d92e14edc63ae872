"""A Llama in plain PyTorch: RMSNorm, rotary positions, grouped-query attention, SwiGLU, untied head.

Shape suffixes:  B batch   S sequence   D hidden   H heads   G key/value heads   K hidden of one head
                 F MLP hidden   V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama. `block_size` is the longest sequence, `theta` the base of the rotary frequencies."""

    vocab_size: int = 256
    block_size: int = 128
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    hidden: int = 256
    mlp_hidden: int = 768
    theta: float = 10000.0
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.num_heads):
            raise ValueError(f"hidden {self.hidden} is not divisible by 2 * num_heads {self.num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}")


def rotary_tables(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Return cosines and sines `[S, K]` of each position's angles, the same for both halves of K."""
    K = config.hidden // config.num_heads
    positions_S = torch.arange(config.block_size, dtype=torch.float64)
    frequencies = config.theta ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)
    angles_SK = torch.outer(positions_S, frequencies).repeat(1, 2)
    dtype = torch.get_default_dtype()
    return angles_SK.cos().to(dtype), angles_SK.sin().to(dtype)


def rotate(x_BHSK: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
    """Turn each pair (k, k + K/2) by its position's angle, in real arithmetic."""
    first, second = x_BHSK.chunk(2, dim=-1)
    return x_BHSK * cos_SK + torch.cat((-second, first), dim=-1) * sin_SK


class Attention(nn.Module):
    """Causal self-attention in which H / G query heads share a key and value head: `[B, S, D] -> [B, S, D]`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        head = config.hidden // config.num_heads
        self.query = nn.Linear(config.hidden, config.num_heads * head, bias=False)
        self.key = nn.Linear(config.hidden, config.num_kv_heads * head, bias=False)
        self.value = nn.Linear(config.hidden, config.num_kv_heads * head, bias=False)
        self.proj = nn.Linear(config.num_heads * head, config.hidden, bias=False)

    def repeat(self, t_BGSK: Tensor) -> Tensor:
        """`[B, G, S, K] -> [B, H, S, K]`: each key/value head serves H / G neighbouring query heads."""
        B, G, S, K = t_BGSK.shape
        copies = self.num_heads // G
        return t_BGSK[:, :, None].expand(B, G, copies, S, K).reshape(B, self.num_heads, S, K)

    def forward(self, x_BSD: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
        B, S, D = x_BSD.shape
        K = D // self.num_heads
        q_BHSK = self.query(x_BSD).view(B, S, self.num_heads, K).transpose(1, 2)
        k_BGSK = self.key(x_BSD).view(B, S, self.num_kv_heads, K).transpose(1, 2)
        v_BGSK = self.value(x_BSD).view(B, S, self.num_kv_heads, K).transpose(1, 2)
        q_BHSK = rotate(q_BHSK, cos_SK, sin_SK)
        k_BHSK = self.repeat(rotate(k_BGSK, cos_SK, sin_SK))
        v_BHSK = self.repeat(v_BGSK)
        y_BHSK = F.scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSK, is_causal=True)
        return self.proj(y_BHSK.transpose(1, 2).reshape(B, S, D))


class MLP(nn.Module):
    """SwiGLU: `[B, S, D] -> [B, S, F] -> [B, S, D]`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.mlp_hidden, bias=False)
        self.up = nn.Linear(config.hidden, config.mlp_hidden, bias=False)
        self.down = nn.Linear(config.mlp_hidden, config.hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSF = F.silu(self.gate(x_BSD)) * self.up(x_BSD)
        return self.down(h_BSF)


class Block(nn.Module):
    """One pre-norm layer: attention, then MLP, each added to the residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden, eps=config.eps)
        self.attn = Attention(config)
        self.norm2 = nn.RMSNorm(config.hidden, eps=config.eps)
        self.mlp = MLP(config)

    def forward(self, x_BSD: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attn(self.norm1(x_BSD), cos_SK, sin_SK)
        return x_BSD + self.mlp(self.norm2(x_BSD))


class Llama(nn.Module):
    """A causal language model.

    `model(ids)`, ids `[B, S]`, returns the logits `[B, S, V]`. `model(ids, labels)` returns the mean cross entropy,
    0-d: labels are aligned with the ids and shifted inside, as in Hugging Face models, so that training is
    `model(ids, labels=ids)`. A label of -100 does not count.
    """

    cos_SK: Tensor
    sin_SK: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.eps)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        cos_SK, sin_SK = rotary_tables(config)
        self.register_buffer("cos_SK", cos_SK, persistent=False)
        self.register_buffer("sin_SK", sin_SK, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters and fill the rotary tables; call it after `to_empty` on a model made on meta."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
        for table, values in zip((self.cos_SK, self.sin_SK), rotary_tables(self.config), strict=True):
            table.copy_(values)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        S = ids.shape[1]
        if S > self.config.block_size:
            raise ValueError(f"a sequence of {S} is longer than block_size {self.config.block_size}")
        x_BSD = self.token_embedding(ids)
        cos_SK, sin_SK = self.cos_SK[:S], self.sin_SK[:S]
        for block in self.blocks:
            x_BSD = block(x_BSD, cos_SK, sin_SK)
        logits_BSV = self.head(self.norm(x_BSD))
        if labels is None:
            return logits_BSV
        targets_BS = F.pad(labels, (0, 1), value=-100)[:, 1:]  # position s predicts token s + 1
        return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())
