"""Small modules of every shape of graph that people write: each an `nn.Module` and the call that is made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Forward = Callable[..., Any]
SHAPES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]] = {}


class Graph(nn.Module):
    """A module of a function and the layers that it uses."""

    def __init__(self, run: Forward, **members: Any) -> None:
        super().__init__()
        self.run = [run]
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on the module and its inputs."""
        return self.run[0](self, *args, **kwargs)


def x(*shape: int, seed: int = 0) -> Tensor:
    """Return a random input, by default [6, 5, 12]."""
    return torch.randn(shape or (6, 5, 12), generator=torch.Generator().manual_seed(seed))


def shape(name: str, *args: Any, **members: Callable[[], Any]) -> Callable[[Forward], Forward]:
    """Register a forward under a name, with its inputs and makers of its members."""

    def register(run: Forward) -> Forward:
        SHAPES[name] = lambda: (Graph(run, **{key: make() for key, make in members.items()}), args or (x(),), {})
        return run

    return register


def linear(n: int = 12, m: int = 12, bias: bool = True) -> Callable[[], nn.Linear]:
    return lambda: nn.Linear(n, m, bias=bias)


def weight(*sizes: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(sizes) / 3)


def frozen() -> nn.Linear:
    return nn.Linear(12, 12).requires_grad_(False)


# Residuals and branches


@shape("three linears between residuals", a=linear(), b=linear(12, 20), c=linear(20))
def _(m: Any, x: Tensor) -> Tensor:
    return x + m.c(F.gelu(m.b(F.relu(m.a(x)))))


@shape("one linear between residuals", a=linear(), b=linear(), c=linear())
def _(m: Any, x: Tensor) -> Tensor:
    for layer in (m.a, m.b, m.c):
        x = x + layer(x)
    return x


@shape("parallel residuals", norm=lambda: nn.LayerNorm(12), a=linear(), b=linear(12, 30), c=linear(30))
def _(m: Any, x: Tensor) -> Tensor:
    h = m.norm(x)
    return x + m.a(h) + m.c(F.silu(m.b(h)))


@shape("five linears in a row", a=linear(12, 7), b=linear(7, 9), c=linear(9, 11), d=linear(11, 5), e=linear(5, 3))
def _(m: Any, x: Tensor) -> Tensor:
    return m.e(m.d(m.c(m.b(m.a(x)).tanh()).tanh()))


# Fused and separate projections


@shape("gate and up by chunk", up=linear(12, 40), down=linear(20))
def _(m: Any, x: Tensor) -> Tensor:
    gate, up = m.up(x).chunk(2, dim=-1)
    return m.down(F.silu(gate) * up)


@shape("gate and up by split", up=linear(12, 36), down=linear(12))
def _(m: Any, x: Tensor) -> Tensor:
    gate, up = m.up(x).split([24, 12], dim=-1)
    return m.down(gate[..., 12:] * gate[..., :12] + up)


@shape("qkv by narrow", qkv=linear(12, 36), out=linear())
def _(m: Any, x: Tensor) -> Tensor:
    parts = [m.qkv(x).narrow(-1, 12 * i, 12).view(6, 5, 3, 4).transpose(1, 2) for i in range(3)]
    return m.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(6, 5, 12))


@shape("qkv by slices", qkv=linear(12, 36), out=linear())
def _(m: Any, x: Tensor) -> Tensor:
    h = m.qkv(x)
    q, k, v = (h[..., i * 12 : i * 12 + 12].unflatten(-1, (4, 3)).transpose(1, 2) for i in range(3))
    return m.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@shape("qkv of heads of three parts", qkv=linear(12, 36), out=linear())
def _(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).view(6, 5, 4, 3, 3).permute(3, 0, 2, 1, 4)
    return m.out((torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).reshape(6, 5, -1))


@shape("interleaved gate", up=linear(12, 24), down=linear())
def _(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return m.down(torch.sigmoid(h[..., ::2]) * h[..., 1::2])


@shape("rows and columns merged", a=linear(60, 24), b=linear(24, 60))
def _(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x.flatten(1)).relu()).view(6, 5, 12) + x


# Weights


@shape("a weight used twice", a=linear())
def _(m: Any, x: Tensor) -> Tensor:
    return m.a(F.relu(m.a(x))) + F.linear(x, m.a.weight.t())


@shape("tied embedding and head", torch.arange(30).view(6, 5) % 17, wte=lambda: nn.Embedding(17, 12), a=linear())
def _(m: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(m.a(m.wte(ids)), m.wte.weight).flatten(0, 1), ids.flatten())


@shape("frozen and unused parameters", a=linear(), b=frozen, unused=linear(), alone=weight())
def _(m: Any, x: Tensor) -> Tensor:
    return m.a(m.b(x).relu())


@shape("scalars and tiny parameters", a=linear(), scale=weight(), one=weight(1), two=weight(2), three=weight(3, 1))
def _(m: Any, x: Tensor) -> Tensor:
    y = m.a(x) * m.scale + m.one
    return (y.unflatten(-1, (6, 2)) * m.two).flatten(-2).unflatten(0, (2, 3)) * m.three.unsqueeze(-1)


@shape("stacked weights", w=weight(3, 12, 12))
def _(m: Any, x: Tensor) -> Tensor:
    for part in m.w:
        x = torch.tanh(x @ part)
    return x


@shape("a weight made of others", a=weight(12, 4), b=weight(4, 12))
def _(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.a @ m.b) + F.linear(x, torch.cat([m.a, m.b.t(), m.a], dim=1))


# In-place ops and constants


@shape("in-place ops", a=linear())
def _(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.add_(1.0).mul_(0.5)
    h[:, 0] = 0.0
    h[..., 3:7] += x[..., 3:7]
    return h.clamp_(max=2.0) + x.clone().relu_()


@shape("masked fill in place", a=linear())
def _(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).clone()
    h.masked_fill_(x > 0.5, -1.0)
    h[x < -0.5] = 2.0
    return h


@shape("constants made in forward", a=linear())
def _(m: Any, x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1], device=x.device)
    triangle = torch.full((5, 5), float("-inf"), dtype=x.dtype).triu(1)
    scores = (m.a(x) @ x.mT + triangle).softmax(-1)
    zeros, ones = x.new_zeros(5, 12), torch.ones(12, dtype=x.dtype)
    return scores.tril() @ (x + zeros) * ones + places[:, None] * torch.eye(5, 12, dtype=x.dtype)


@shape("a buffer that counts", a=linear(), steps=lambda: torch.zeros(()), seen=lambda: torch.zeros(12))
def _(m: Any, x: Tensor) -> Tensor:
    m.steps += 1
    m.seen.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
    return m.a(x) * m.steps + m.seen


@shape("boolean masks", a=linear())
def _(m: Any, x: Tensor) -> Tensor:
    keep = (x > 0) & ~(x > 1.0) | (x < -1)
    rows = keep.any(-1, keepdim=True).logical_not()
    return torch.where(rows, m.a(x), m.a(x).masked_fill(keep, 0.0)) * keep.sum(-1, keepdim=True)


# Indexing


@shape("gather and scatter", x(), torch.arange(60).view(6, 5, 2) % 12, a=linear())
def _(m: Any, x: Tensor, at: Tensor) -> Tensor:
    h = m.a(x)
    taken = h.gather(-1, at)
    return torch.zeros_like(h).scatter(-1, at, taken) + h.scatter_add(-1, at, taken * 2)


@shape("index put and take", x(), torch.tensor([3, 0, 4]), a=linear())
def _(m: Any, x: Tensor, at: Tensor) -> Tensor:
    h = m.a(x)
    h = h.index_put((torch.arange(3), at), x[:3, 0], accumulate=True)
    return h[:, at] + h[torch.arange(6), torch.arange(6) % 5].unsqueeze(1) + h.index_select(1, at)


@shape("index add and copy", x(), torch.tensor([5, 0, 3]), a=linear())
def _(m: Any, x: Tensor, at: Tensor) -> Tensor:
    h = m.a(x)
    return h.index_add(0, at, x[:3]) + h.index_copy(0, at, x[3:]) + h.index_fill(0, at, 0.5)


@shape("cumsum, sort, topk, argmax", a=linear())
def _(m: Any, x: Tensor) -> Any:
    h = m.a(x)
    values, order = h.sort(dim=-1)
    best, where = h.topk(3, dim=-1)
    return h.cumsum(1) + values, best, where, order.argmax(-1), h.argmax(), h.max(-1).values, h.median(dim=-1).values


@shape("roll, flip, cat, pad, stack", a=linear())
def _(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h = torch.roll(h, 1, 1) + h.flip(1) + torch.roll(h, (2, -3), (0, 2))
    h = torch.cat([h, x[:, :2]], dim=1)
    return torch.stack([F.pad(h, (1, 2, 0, 1)), F.pad(h, (2, 1, 1, 0), value=0.3)], dim=1)


@shape("repeat and tile", a=linear())
def _(m: Any, x: Tensor) -> Tensor:
    return m.a(x).repeat(1, 2, 1) + x.repeat_interleave(2, dim=1) + x.tile(2, 1) + x[:, :1].expand(-1, 10, -1)


# Convolutions and pooling


@shape("conv1d", conv=lambda: nn.Conv1d(5, 6, 3, padding=1), deep=lambda: nn.Conv1d(6, 6, 3, groups=6, padding=1))
def _(m: Any, x: Tensor) -> Tensor:
    return F.avg_pool1d(m.deep(F.gelu(m.conv(x))), 2)


@shape("conv2d and pooling", x(6, 3, 8, 8), conv=lambda: nn.Conv2d(3, 6, 3, stride=1, padding=1), head=linear(6, 5))
def _(m: Any, x: Tensor) -> Tensor:
    h = F.max_pool2d(m.conv(x).relu(), 2)
    return m.head(F.adaptive_avg_pool2d(F.avg_pool2d(h, 2), 1).flatten(1))


@shape("batch norm and group norm", x(6, 4, 8, 8), b=lambda: nn.BatchNorm2d(4), g=lambda: nn.GroupNorm(2, 4))
def _(m: Any, x: Tensor) -> Tensor:
    return m.g(m.b(x).relu())


@shape("transposed convolution and upsampling", x(4, 3, 4, 4), up=lambda: nn.ConvTranspose2d(3, 4, 2, stride=2))
def _(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    return F.interpolate(h, scale_factor=2, mode="nearest") + F.interpolate(h, size=(16, 16), mode="bilinear")


# Products


@shape("einsum", a=weight(4, 12, 3), b=weight(4, 3, 12))
def _(m: Any, x: Tensor) -> Tensor:
    return torch.einsum("bshd,hde->bse", torch.einsum("bse,hed->bshd", x, m.a), m.b)


@shape("broadcast matmul", w=weight(3, 1, 12, 7), v=weight(12))
def _(m: Any, x: Tensor) -> Tensor:
    return (x.unsqueeze(1).unsqueeze(1) @ m.w).sum(2) + (x @ m.v).view(6, 1, 5, 1)


@shape("outer and batched products", a=linear())
def _(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return torch.bmm(h, x.mT) + torch.outer(h[0, :, 0], h[1, :, 1]) + torch.baddbmm(h[..., :5], h, h.mT, beta=0.5)


# Dtypes, structures, outputs


@shape("dtype casts", a=linear())
def _(m: Any, x: Tensor) -> Any:
    h = m.a(x).float()
    return h.to(x.dtype) + (h > 0).to(x.dtype), (h > 0).sum(-1), h.type_as(x).long() + 1


@shape("several outputs", a=linear(), b=linear(12, 5))
def _(m: Any, x: Tensor) -> Any:
    h = m.a(x)
    return {"loss": h.square().mean(), "parts": [m.b(h), (h, None)], "n": 3, "same": h}


def nested(m: Any, batch: dict[str, Any], *, scale: float = 1.0, mask: Tensor | None = None) -> Any:
    h = m.a(batch["x"][0]) * scale + batch["x"][1]
    return h if mask is None else h * mask


SHAPES["nested containers, None and numbers"] = lambda: (
    Graph(nested, a=nn.Linear(12, 12)), ({"x": [x(), x(5, 12, seed=1)], "other": None},), {"scale": 0.5, "mask": None},
)  # fmt: skip


@shape("gradients of inputs", x().requires_grad_(), a=linear())
def _(m: Any, x: Tensor) -> Tensor:
    return m.a(x).sin() * x


@shape("detach and no_grad", a=linear(), b=linear())
def _(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.b(x)
    h = m.a(x)
    return F.mse_loss(h, target) + (h.detach() * h).sum() + F.smooth_l1_loss(h, x)


@shape("losses", a=linear(12, 7), b=linear())
def _(m: Any, x: Tensor) -> Tensor:
    rows = m.a(x).flatten(0, 1)
    classes = torch.arange(30) % 7
    total = F.cross_entropy(rows, classes, label_smoothing=0.1) + F.nll_loss(F.log_softmax(rows, -1), classes)
    total = total + F.binary_cross_entropy_with_logits(m.b(x), (x > 0).to(x.dtype)) + F.l1_loss(m.b(x), x)
    return total + F.kl_div(F.log_softmax(rows, -1), F.softmax(rows.detach() * 2, -1), reduction="batchmean")


@shape("complex numbers", a=linear())
def _(m: Any, x: Tensor) -> Tensor:
    z = torch.view_as_complex(m.a(x).view(6, 5, 6, 2).contiguous())
    turned = z * torch.polar(torch.ones(6, dtype=x.dtype), torch.arange(6, dtype=x.dtype)) * z.conj()
    return torch.view_as_real(turned).flatten(2) + z.abs().repeat(1, 1, 2)


@shape("norms", a=linear(), r=lambda: nn.RMSNorm(12), n=lambda: nn.LayerNorm([5, 12]))
def _(m: Any, x: Tensor) -> Tensor:
    h = m.n(m.r(m.a(x)))
    return F.normalize(h, dim=-1) + h / h.norm(dim=-1, keepdim=True) + (h - h.mean(1, keepdim=True)) / (h.std(1, keepdim=True) + 1)


@shape("a row and a column alone", x(1, 12), a=linear(12, 1), b=linear(1, 12))
def _(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x)).squeeze(0)
