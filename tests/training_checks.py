"""What each of 8 gloo ranks checks of training: norms, blocks of a batch, precision, accumulation."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor

import partir
from partir.errors import RankError
from partir.runtime.parameters import full_gradient
from tests.compiled_ahead import FLOAT32, KINDS, compiled_ahead
from tests.distributed_checks import everyone_has, relative
from tests.gpt_on_tokens import make_gpt, tokens
from tests.kinds import Kinds, few_ids
from tests.module_checks import error_of

ORDERS = (2.0, math.inf, 1.0, 3.0, 0.0, -math.inf)


def check_norms_of_every_kind_of_parameter(rank: int) -> None:
    for sizes, vectors in KINDS:
        model = Kinds().double()
        twin = copy.deepcopy(model)
        twin(few_ids()).backward()
        with compiled_ahead():
            partir.parallelize(model, sizes, vectors=vectors)
            model(few_ids()).backward()
        for order in ORDERS:
            expected = nn.utils.get_total_norm([q.grad for q in twin.parameters() if q.grad is not None], order)
            norm = partir.clip_grad_norm_(model, 1e9, order)
            assert everyone_has(norm) and not isinstance(norm, DTensor) and norm.dtype == torch.float64
            assert relative(norm, expected) < 1e-12, (sizes, vectors, order, norm, expected)
            if vectors == "balanced" and order > 0 and (order == 2 or len(sizes) == 3):  # with four axes torch takes seconds for each
                torchs: Any = nn.utils.clip_grad_norm_(model.parameters(), 1e9, order)
                assert relative(torchs.full_tensor(), expected) < 1e-12, (sizes, order, torchs, expected)
        norm = cast(Any, model).clip_grad_norm_(0.1)
        assert relative(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.1)) < 1e-12
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                assert relative(cast(Tensor, full_gradient(p)), q.grad, 1e-9) < 1e-10, (sizes, name)
        _check_a_norm_that_is_not_finite(model)


def _check_a_norm_that_is_not_finite(model: nn.Module) -> None:
    """One rank's infinity is an error on every rank."""
    grad = cast(DTensor, model.get_parameter("qkv.weight").grad)
    if dist.get_rank() == 3:
        grad.to_local()[0, 0] = math.inf
    message = error_of(RuntimeError, lambda: partir.clip_grad_norm_(model, 1.0, error_if_nonfinite=True))
    assert "is non-finite, so it cannot be clipped" in message


def check_a_rank_passes_only_its_samples(rank: int) -> None:
    """Blocks of the batch give the loss and gradients of the whole batch; replicas that differ are an error."""
    model, twin, ids = make_gpt(), make_gpt(), tokens()
    with compiled_ahead():
        partir.parallelize(model, (2, 2, 2, 1), (ids,), {"labels": ids.clone()})
    samples = partir.batch_slice(model)
    assert samples == slice(2 * (rank // 2 % 2 + 2 * (rank // 4)), 2 * (rank // 2 % 2 + 2 * (rank // 4)) + 2)
    own = ids[samples]
    loss = model(partir.from_local_batch(model, own), labels=partir.from_local_batch(model, own.clone()))
    expected = twin(ids, labels=ids)
    loss.backward()
    expected.backward()
    assert everyone_has(loss.detach()) and relative(loss.detach(), expected.detach()) < 1e-12
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert relative(cast(Tensor, full_gradient(p)), cast(Tensor, q.grad), 1e-9) < 1e-10, name
    parts = partir.micro_batches(partir.from_local_batch(model, own), 2)
    assert [part.shape for part in parts] == [(4, 8)] * 2 and isinstance(parts[0], DTensor)
    shorter = partir.from_local_batch(model, own[:1] + int(rank == 3))
    message = error_of(RankError, lambda: model(shorter, labels=shorter))
    assert "ids: ranks 2 and 3 hold the same block of a DTensor input, and its contents differ" in message


def check_accumulation_and_precision(rank: int) -> None:
    """Master weights, sums in float64 and accumulation at once, diagonal vectors too: gradients of one device with the same casts."""
    model = Kinds().double()
    twin = copy.deepcopy(model).float()
    with compiled_ahead():
        partir.parallelize(model, (2, 2, 2), **FLOAT32)
        model(few_ids()[:4])
    with partir.accumulate(model):
        for part in partir.micro_batches(few_ids(), 2):
            loss = model(part) / 2
            assert loss.dtype == torch.float32 and everyone_has(loss.detach())
            loss.backward()
    twin(few_ids()).backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None and p.grad is not None:
            assert p.grad.dtype == torch.float64
            assert relative(cast(Tensor, full_gradient(p)), q.grad.double(), 1e-3) < 1e-4, name


def check_grad_scaler(rank: int) -> None:
    """DTensor gradients are unscaled; one rank's infinity is a step that no rank takes; autocast is part of the signature."""
    with compiled_ahead():
        model = partir.parallelize(Kinds(), (2, 2, 2))
        with torch.autocast("cpu", torch.float16):
            loss = model(few_ids())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    twin = Kinds()
    with torch.autocast("cpu", torch.float16):
        twin(few_ids()).backward()
    norm = partir.clip_grad_norm_(model, 1e9)
    assert relative(norm, nn.utils.get_total_norm([q.grad for q in twin.parameters() if q.grad is not None])) < 2e-2
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**8
    optimizer.zero_grad()
    scaler.scale(model(few_ids())).backward()
    grad = cast(DTensor, model.qkv.weight.grad)
    if rank == 5:
        grad.to_local()[0, 0] = math.inf
    before = cast(DTensor, model.qkv.weight).to_local().clone()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**7
    assert torch.equal(cast(DTensor, model.qkv.weight).to_local(), before)


class Logits(nn.Module):
    """A small model whose largest values are sums between ranks: the logits of a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(256, 16), nn.Linear(16, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.table(ids)).flatten(0, 1), ids.flatten())


def check_the_predicted_peak_where_gloo_adds_up(rank: int) -> None:
    ids = torch.randint(0, 256, (16, 64), generator=torch.Generator().manual_seed(0))
    predicted = float(partir.plan(Logits(), (2, 1, 4), ids).cost().peak_memory())
    model = partir.parallelize(Logits(), (2, 1, 4), ids)
    model(ids).backward()
    model.zero_grad()
    gc.collect()
    blocks = [cast(DTensor, p).to_local() for p in model.parameters()]
    tracker = MemTracker()
    tracker.track_external(*blocks)
    with tracker:
        model(ids).backward()
    peak = max(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())
    measured = peak + 2 * sum(block.nbytes for block in blocks)  # AdamW's moments
    assert 0.9 < measured / predicted < 1.1, (measured, predicted)
