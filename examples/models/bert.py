"""A BERT in plain PyTorch: post-norm, padding mask, token types, masked-language loss.

Shape suffixes:  B batch   S sequence   D hidden   H heads   K hidden of one head   F MLP hidden   V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class BERTConfig:
    """Sizes of a BERT. `block_size` is the longest sequence."""

    vocab_size: int = 256
    block_size: int = 128
    num_types: int = 2
    num_layers: int = 4
    num_heads: int = 8
    hidden: int = 256
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.hidden % self.num_heads:
            raise ValueError(f"hidden {self.hidden} is not divisible by num_heads {self.num_heads}")


class Embeddings(nn.Module):
    """Sum of token, position and type embeddings, normalised: `[B, S] -> [B, S, D]`."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.position_embedding = nn.Embedding(config.block_size, config.hidden)
        self.type_embedding = nn.Embedding(config.num_types, config.hidden)
        self.norm = nn.LayerNorm(config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor, types_BS: Tensor) -> Tensor:
        positions_S = torch.arange(ids.shape[1], device=ids.device)
        x_BSD = self.token_embedding(ids) + self.position_embedding(positions_S) + self.type_embedding(types_BS)
        return self.dropout(self.norm(x_BSD))


class Attention(nn.Module):
    """Self-attention that does not look at padding: `[B, S, D] -> [B, S, D]`."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.query = nn.Linear(config.hidden, config.hidden)
        self.key = nn.Linear(config.hidden, config.hidden)
        self.value = nn.Linear(config.hidden, config.hidden)
        self.proj = nn.Linear(config.hidden, config.hidden)

    def heads(self, t_BSD: Tensor) -> Tensor:
        """`[B, S, D] -> [B, H, S, K]`."""
        B, S, D = t_BSD.shape
        return t_BSD.view(B, S, self.num_heads, D // self.num_heads).transpose(1, 2)

    def forward(self, x_BSD: Tensor, mask_B11S: Tensor | None) -> Tensor:
        q_BHSK = self.heads(self.query(x_BSD))
        k_BHSK = self.heads(self.key(x_BSD))
        v_BHSK = self.heads(self.value(x_BSD))
        dropout = self.dropout if self.training else 0.0
        y_BHSK = F.scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSK, attn_mask=mask_B11S, dropout_p=dropout)
        return self.proj(y_BHSK.transpose(1, 2).reshape(x_BSD.shape))


class MLP(nn.Module):
    """Linear, GELU, linear: `[B, S, D] -> [B, S, F] -> [B, S, D]`."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden, 4 * config.hidden)
        self.fc2 = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x_BSD)))


class Block(nn.Module):
    """One post-norm layer: attention, then MLP, the residual normalised after each."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.attn = Attention(config)
        self.norm1 = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BSD: Tensor, mask_B11S: Tensor | None) -> Tensor:
        x_BSD = self.norm1(x_BSD + self.dropout(self.attn(x_BSD, mask_B11S)))
        return self.norm2(x_BSD + self.dropout(self.mlp(x_BSD)))


class Head(nn.Module):
    """The masked-language head: dense, GELU, norm and a decoder: `[B, S, D] -> [B, S, V]`."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.norm = nn.LayerNorm(config.hidden)
        self.decoder = nn.Linear(config.hidden, config.vocab_size)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.decoder(self.norm(F.gelu(self.dense(x_BSD))))


class BERT(nn.Module):
    """A masked language model.

    `model(ids)`, ids `[B, S]`, returns the logits `[B, S, V]`; with `labels` `[B, S]` the mean cross entropy, 0-d,
    over the positions whose label is not -100. `attention_mask` `[B, S]` is 1 for a token and 0 for padding;
    `token_types` `[B, S]` says which segment a token is in (0 when not given).
    """

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = Head(config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Tie the decoder and draw the parameters, as BERT does; call it after `to_empty` on a model made on meta."""
        self.head.decoder.weight = self.embeddings.token_embedding.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor | None = None,
        token_types: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        if ids.shape[1] > self.config.block_size:
            raise ValueError(f"a sequence of {ids.shape[1]} is longer than block_size {self.config.block_size}")
        types_BS = torch.zeros_like(ids) if token_types is None else token_types
        mask_B11S = None if attention_mask is None else attention_mask[:, None, None, :] != 0
        x_BSD = self.embeddings(ids, types_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD, mask_B11S)
        logits_BSV = self.head(x_BSD)
        if labels is None:
            return logits_BSV
        return F.cross_entropy(logits_BSV.flatten(0, 1), labels.flatten(), ignore_index=-100)
