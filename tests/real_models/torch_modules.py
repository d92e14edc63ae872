"""Modules of torch itself, and models in the styles that people write with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.real_models.case import Built, Case, Sizes, mask, tokens


def vectors(s: Sizes, length: int = 0, seed: int = 0) -> Tensor:
    """Return random activations [batch, length or sequence, hidden]."""
    return torch.randn(s.batch, length or s.sequence, s.hidden, generator=torch.Generator().manual_seed(seed))


def transformer(s: Sizes, attention: str) -> Built:
    model = nn.Transformer(s.hidden, s.heads, 1, 1, s.wide, dropout=0.0, batch_first=True)
    call = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(5).double(), "tgt_is_causal": True,
        "src_key_padding_mask": mask(s) == 0, "memory_key_padding_mask": mask(s) == 0,
    }  # fmt: skip
    return model, (vectors(s), vectors(s, 5, 1)), call


def encoder(masked: bool, norm_first: bool = False) -> Callable[[Sizes, str], Built]:
    """Return a builder of a TransformerEncoder; its fast path runs in evaluation without gradients."""

    def build(s: Sizes, attention: str) -> Built:
        options = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first, "activation": "gelu"}
        layer = nn.TransformerEncoderLayer(s.hidden, s.heads, s.wide, **options)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return model, (vectors(s),), {"src_key_padding_mask": mask(s) == 0} if masked else {}

    return build


def nested(s: Sizes, attention: str) -> Built:
    model, args, _ = encoder(False)(s, attention)
    assert isinstance(model, nn.TransformerEncoder)
    return nn.TransformerEncoder(model.layers[0], 1), args, {"src_key_padding_mask": mask(s) == 0}  # pyright: ignore[reportArgumentType]


def multihead(**call: Any) -> Callable[[Sizes, str], Built]:
    """Return a builder of MultiheadAttention; a callable argument gets the sizes."""

    def build(s: Sizes, attention: str) -> Built:
        x = vectors(s)
        made = {key: value(s) if callable(value) else value for key, value in call.items()}
        return nn.MultiheadAttention(s.hidden, s.heads, batch_first=True), (x, x, x), made

    return build


class Recurrent(nn.Module):
    """A language model of an LSTM or GRU."""

    def __init__(self, kind: str, s: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(s.vocabulary, s.hidden)
        self.recurrent = getattr(nn, kind)(s.hidden, s.hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(s.hidden, s.vocabulary)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the next token."""
        logits = self.head(self.recurrent(self.embedding(ids))[0])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class ComplexRotary(nn.Module):
    """Attention whose rotary embedding multiplies complex numbers."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.heads, self.head = s.heads, s.hidden // s.heads
        self.qkv = nn.Linear(s.hidden, 3 * s.hidden, bias=False)
        self.out = nn.Linear(s.hidden, s.hidden, bias=False)
        angles = torch.outer(torch.arange(s.sequence), 100.0 ** (-torch.arange(0, self.head, 2) / self.head))
        self.register_buffer("angles", angles)

    def rotate(self, x: Tensor) -> Tensor:
        """Turn pairs of x [batch, sequence, heads, head] by their place."""
        turns = torch.polar(torch.ones_like(self.angles), self.angles)  # pyright: ignore[reportArgumentType]
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns.unsqueeze(1)).flatten(3).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        """Return attention of x [batch, sequence, hidden]."""
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, self.head).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (self.rotate(q), self.rotate(k), v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class EinsumAttention(nn.Module):
    """Attention in einsums over a weight of four dims."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        head = s.hidden // s.heads
        self.qkv = nn.Parameter(torch.randn(3, s.heads, s.hidden, head) / 4)
        self.out = nn.Parameter(torch.randn(s.heads, head, s.hidden) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return attention of x [batch, sequence, hidden]."""
        q, k, v = torch.einsum("bsd,phde->pbhse", x, self.qkv)
        weights = torch.einsum("bhqe,bhke->bhqk", q, k).softmax(-1)
        return torch.einsum("bhqk,bhke,hed->bqd", weights, v, self.out)


def recurrent(kind: str) -> Callable[[Sizes, str], Built]:
    """Return a builder of a recurrent language model."""
    return lambda s, _: (Recurrent(kind, s), (tokens(s),), {"labels": tokens(s)})


def _causal(s: Sizes) -> Tensor:
    return torch.ones(s.sequence, s.sequence).triu(1).bool()


def _padding(s: Sizes) -> Tensor:
    return mask(s) == 0


CASES = {
    "nn.Transformer": Case(transformer),
    "nn.TransformerEncoder": Case(encoder(False)),
    "nn.TransformerEncoder (norm first, padding)": Case(encoder(True, norm_first=True)),
    "nn.TransformerEncoder (nested tensors)": Case(nested),
    "nn.MultiheadAttention": Case(multihead(need_weights=False)),
    "nn.MultiheadAttention (weights, padding)": Case(multihead(need_weights=True, key_padding_mask=_padding)),
    "nn.MultiheadAttention (weights of heads)": Case(multihead(need_weights=True, average_attn_weights=False, attn_mask=_causal)),
    "nn.MultiheadAttention (both masks)": Case(multihead(need_weights=False, attn_mask=_causal, key_padding_mask=_padding)),
    "nn.MultiheadAttention (causal)": Case(multihead(need_weights=False, is_causal=True, attn_mask=_causal)),
    "nn.LSTM language model": Case(recurrent("LSTM")),
    "nn.GRU language model": Case(recurrent("GRU")),
    "nn.RNN language model": Case(recurrent("RNN")),
    "complex rotary attention": Case(lambda s, _: (ComplexRotary(s), (vectors(s),), {})),
    "einsum attention": Case(lambda s, _: (EinsumAttention(s), (vectors(s),), {})),
}
