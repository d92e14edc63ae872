"""16-bit parameters, compute and reduce dtypes, autocast, GradScaler: beside one device that casts the same."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call

import partir
from examples.models.gpt import GPT, GPTConfig
from partir.errors import TraceError
from partir.passes.write_casts import write_casts
from partir.runtime.transport import check_reducible

MESHES = [(2, 2, 2), (2, 2, 1, 2)]
IDS = torch.randint(0, 48, (8, 8), generator=torch.Generator().manual_seed(1))


def make(dtype: torch.dtype = torch.float32) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=48, block_size=8, num_layers=1, num_heads=4, hidden=32)).to(dtype)


def gradients(model: nn.Module, loss: Tensor, scale: float = 1.0) -> list[Tensor]:
    return [gradient.double() for gradient in torch.autograd.grad(loss * scale, list(model.parameters()))]


def distance(actual: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - e).norm() / e.norm()) for a, e in zip(actual, expected, strict=True))


def cast_by_hand(model: GPT, dtype: torch.dtype) -> Tensor:
    """One device with the same casts: parameters to the dtype of computation, gradients back."""
    casts: dict[int, Tensor] = {}
    state = {name: casts.setdefault(id(p), p.to(dtype)) for name, p in model.named_parameters(remove_duplicate=False)}
    return functional_call(model, state, (IDS,), {"labels": IDS}, tie_weights=False)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize("mesh", MESHES[:1])
def test_16_bit_parameters(dtype: torch.dtype, tolerance: float, mesh: tuple[int, ...]) -> None:
    model, twin = make(dtype), make(dtype)
    partir.parallelize(model, mesh)
    loss, expected = model(IDS, labels=IDS), twin(IDS, labels=IDS)
    assert loss.dtype == dtype and abs(float(loss.detach() - expected.detach())) < 8 * tolerance
    assert distance(gradients(model, loss), gradients(twin, expected)) < tolerance


def test_a_mean_over_many_losses_does_not_overflow_float16() -> None:
    """Losses that add up to more than float16 holds (on a CPU torch itself returns infinity), and the cube of a norm's root."""
    torch.manual_seed(0)
    x, target = torch.randn(128 * 64, 8).half() * 10, torch.randint(0, 8, (128 * 64,))
    model = nn.Sequential(nn.Linear(8, 8)).half()
    expected = F.cross_entropy(copy.deepcopy(model)(x).float(), target)
    loss = partir.parallelize(_Loss(model), (2, 2, 2))(x, target)
    assert torch.isfinite(loss) and abs(float(loss.detach() - expected.detach())) < 2e-2
    norm = nn.LayerNorm(16).half()
    small = (torch.randn(8, 16) * 1e-3).half().requires_grad_()
    other = small.detach().clone().requires_grad_()
    partir.parallelize(wrapped := nn.Sequential(copy.deepcopy(norm)), (1, 1, 4))
    wrapped(small).square().sum().backward()
    norm(other).square().sum().backward()
    assert small.grad is not None and other.grad is not None
    assert torch.isfinite(small.grad).all() and float((small.grad - other.grad).abs().max() / other.grad.abs().max()) < 0.1


class _Loss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.inner(x), target)


@pytest.mark.parametrize(
    ("master", "compute", "tolerance"), [(torch.float64, torch.float32, 2e-5), (torch.float32, torch.bfloat16, 4e-2)]
)
@pytest.mark.parametrize("mesh", MESHES[1:])
def test_master_weights_with_another_compute_dtype(
    master: torch.dtype, compute: torch.dtype, tolerance: float, mesh: tuple[int, ...]
) -> None:
    model, twin = make(master), make(master)
    partir.parallelize(model, mesh, compute_dtype=compute)
    loss, expected = model(IDS, labels=IDS), cast_by_hand(twin, compute)
    assert loss.dtype == compute and abs(float(loss.detach() - expected.detach())) < tolerance
    loss.backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {master}
    found = [p.grad.double() for p in model.parameters() if p.grad is not None]
    assert distance(found, gradients(twin, expected)) < tolerance
    assert distance(found, gradients(twin, twin(IDS, labels=IDS))) > 1e-9  # it was not computed in the masters' dtype


def test_the_dtype_of_every_collective_is_in_the_plan() -> None:
    plain = partir.plan(make(), (2, 2, 2), IDS, {"labels": IDS})
    plan = partir.plan(make(), (2, 2, 2), IDS, {"labels": IDS}, compute_dtype=torch.bfloat16)
    wide = partir.plan(make(), (2, 2, 2), IDS, {"labels": IDS}, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert {c.dtype for c in plain.collectives} == {"f32"}
    sums = ("reduce_scatter", "reduce_scatter_bucket")
    for name in ("blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight", "token_embedding.weight"):
        of = [[c for c in p.collectives if name in c.reason] for p in (plain, plan, wide)]
        assert [[c.op for c in found] for found in of] == [["all_gather", "all_gather", "reduce_scatter"]] * 3, name
        assert [c.dtype for c in of[1]] == ["bf16"] * 3 and [2 * c.bytes for c in of[1]] == [c.bytes for c in of[0]], name
        assert [c.dtype for c in of[2]] == ["bf16", "bf16", "f32"] and of[2][2].bytes == of[0][2].bytes, name
    assert {c.dtype for c in wide.collectives if c.op in sums} == {"f32"}
    assert {c.dtype for c in wide.collectives if c.op.startswith("all_gather")} == {"bf16"}
    assert "bf16" in plan.report() and str(plan.program.input("norm.weight").layout).startswith("f32[")
    layouts = {name: str(plain.layouts[name]) for name, _ in make().named_parameters()}
    assert {name: str(plan.layouts[name]) for name in layouts} == layouts


def test_the_bytes_of_a_plan_are_those_that_move() -> None:
    model = make()
    plan = partir.plan(model, (2, 2, 2), IDS, {"labels": IDS}, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    partir.parallelize(model, (2, 2, 2), compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with partir.record_communication() as log:
        model(IDS, labels=IDS).backward()
    assert {log.bytes(rank=rank) for rank in range(8)} == {plan.bytes()}
    symbolic = plan.cost()
    assert symbolic.value(symbolic.bytes()) == plan.bytes()


@pytest.mark.parametrize(("reduce_dtype", "expected"), [(None, 256.0), (torch.float32, 263.0)])
def test_sums_between_ranks_in_float32(reduce_dtype: torch.dtype | None, expected: float) -> None:
    """8 ranks add 256 and seven times 1: bfloat16 has no 257."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    x = torch.ones(8, 8)
    x[0] = 256.0
    model = partir.parallelize(Product(), (8, 1, 1), compute_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, pin={"x": "f[n@x, h]"})
    model(x).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.dtype == torch.float32
    assert model.weight.grad.tolist() == [expected] * 8


def test_autocast_around_the_call() -> None:
    """The casts are one device's, with a program of their own; the gathers of weights move bfloat16."""
    model, twin = make(), make()
    partir.parallelize(model, (2, 2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        loss, expected = model(IDS, labels=IDS), twin(IDS, labels=IDS)
        plan = partir.plan(make(), (2, 2, 2), IDS, {"labels": IDS})
    assert loss.dtype == expected.dtype == torch.float32 and abs(float(loss.detach() - expected.detach())) < 1e-3
    assert distance(gradients(model, loss), gradients(twin, expected)) < 2e-2
    assert [c.dtype for c in plan.collectives if c.reason == "blocks.0.mlp.fc1.weight for linear_2"] == ["bf16"]
    loss, expected = model(IDS, labels=IDS), twin(IDS, labels=IDS)
    assert abs(float(loss.detach() - expected.detach())) < 1e-6
    assert distance(gradients(model, loss), gradients(twin, expected)) < 1e-4


class Inside(nn.Module):
    """Autocast on and off inside forward, around ops that it makes narrow, wide and alike."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.a(x)
            h = torch.cat([h, x], -1).chunk(2, -1)[0]
            with torch.autocast("cpu", enabled=False):
                h = self.b(h.float())
            h = F.mse_loss(h @ self.a.weight, x)
        return h


@pytest.mark.parametrize("around", [nullcontext(), torch.autocast("cpu", torch.float16)])
def test_autocast_inside_forward(around: AbstractContextManager[Any]) -> None:
    torch.manual_seed(0)
    model = Inside()
    twin, x = copy.deepcopy(model), torch.randn(8, 16)
    partir.parallelize(model, (2, 2, 2))
    with around:
        loss, expected = model(x), twin(x)
    assert loss.dtype == expected.dtype and abs(float(loss.detach() - expected.detach())) < 1e-3
    assert distance(gradients(model, loss), gradients(twin, expected)) < 1e-2


def test_grad_scaler() -> None:
    """Scaled steps in float16 as on one device, and a step with an infinite gradient is left out."""
    model, twin = make(), make()
    partir.parallelize(model, (2, 2, 2), compute_dtype=torch.float16)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    for scale in (1.0, 1e30):
        before = [p.detach().clone() for p in model.parameters()]
        for each, scaler, optimizer in zip((model, twin), scalers, optimizers):
            loss = each(IDS, labels=IDS) if each is model else cast_by_hand(twin, torch.float16)
            scaler.scale(loss.float() * scale).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (2.0**10 if scale == 1.0 else 2.0**9)
        moved = max(float((p.detach() - b).abs().max()) for p, b in zip(model.parameters(), before))
        assert (moved > 0) == (scale == 1.0)
    assert max(float((p - q).abs().max()) for p, q in zip(model.parameters(), twin.parameters())) < 1e-3


def test_bad_input() -> None:
    with pytest.raises(partir.PartirError, match=r"compute_dtype=torch.int8 is not understood: .* choose from torch.bfloat16"):
        partir.parallelize(make(), (2, 2, 2), compute_dtype=torch.int8)
    with pytest.raises(partir.PartirError, match="reduce_dtype='fp32' is not understood"):
        partir.plan(make(), (2, 2, 2), IDS, reduce_dtype="fp32")  # pyright: ignore[reportArgumentType]
    with pytest.raises(partir.PartirError, match=r"%d = all_reduce\(axis=x\) .* nccl cannot add up torch.float8_e4m3fn"):
        check_reducible("nccl", torch.float8_e4m3fn, "%d = all_reduce(axis=x) of the backward", "gpt.py:3")
    check_reducible("nccl", torch.bfloat16, "%d", "gpt.py:3")


def test_a_call_whose_casts_cannot_be_read() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    product = graph.call_function(torch.ops.aten.mm.default, (x, w))
    for node, shape in ((x, (8, 4)), (w, (5, 8)), (product, (8, 8))):  # 4 columns meet 5 rows: mm refuses
        node.meta["val"] = torch.empty(shape, device="meta")
    product.meta["autocast"] = (("cpu", torch.bfloat16),)
    with pytest.raises(TraceError, match=r"what autocast casts for `aten.mm.default` cannot be read.*\(.*\)\. Call it under"):
        write_casts(graph)
