"""What each of 8 gloo ranks checks of a parallelized module."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from examples.models.gpt import GPT
from partir import clip_grad_norm_
from partir.api import full_state_dict, parallelize
from partir.errors import MeshError, PartirError, RankError
from partir.module import parallelized
from partir.runtime.parameters import (
    full_gradient,
    full_tensor,
    load_optimizer_state_dict,
    optimizer_state_dict,
)
from tests.compiled_ahead import GPT_MESHES, compiled_ahead
from tests.distributed_checks import everyone_has, relative
from tests.gpt_on_tokens import make_gpt, make_odd_gpt, odd_tokens, tokens

STEPS = 2


class TwoLinears(nn.Module):
    """Two linears, with a loss on request."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 16)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.second(torch.relu(self.first(x))) * scale


def train_beside(sizes: tuple[int, ...], clip: Callable[..., Any] = clip_grad_norm_) -> tuple[GPT, GPT, Any]:
    """Train a GPT and its twin on one device for a few steps; compare losses, gradients and parameters."""
    model, twin, ids = make_gpt(), make_gpt(), tokens()
    model = parallelize(model, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    other = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    objects = list(model.parameters())
    for step in range(STEPS):
        loss, expected = model(ids, labels=ids), twin(ids, labels=ids)
        assert everyone_has(loss.detach())
        assert relative(loss.detach(), expected.detach()) < 1e-12
        loss.backward()
        expected.backward()
        largest = max(float(cast(Tensor, q.grad).abs().max()) for q in twin.parameters())
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert relative(cast(Tensor, full_gradient(p)), cast(Tensor, q.grad), 1e-6 * largest) < 1e-10, (name, step)
        norm = clip(model if clip is clip_grad_norm_ else model.parameters(), 0.5)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        assert relative(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.5)) < 1e-12
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    assert all(p is q for p, q in zip(model.parameters(), objects, strict=True))
    _check_bytes_of_adamw(model, optimizer)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert relative(full_tensor(p), q.detach()) < 1e-9
    return model, twin, (optimizer, other)


def _check_bytes_of_adamw(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A rank holds 1/8 of every matrix and of both its moments, in storages of just that size."""
    for name, p in model.named_parameters():
        if p.dim() < 2:
            continue
        moments = optimizer.state[p]
        for what, t in (("parameter", p), ("exp_avg", moments["exp_avg"]), ("exp_avg_sq", moments["exp_avg_sq"])):
            held = cast(DTensor, t).to_local().untyped_storage().nbytes()
            assert held * 8 == p.numel() * p.element_size(), (name, what, held)


def check_odd_sizes(rank: int) -> None:
    """Sizes that no axis divides; logits leave as a DTensor whose last block is shorter."""
    model, twin, ids = make_odd_gpt(), make_odd_gpt(), odd_tokens()
    with compiled_ahead():
        model = parallelize(model, (2, 4, 1), outputs="sharded")
        logits, expected = model(ids), twin(ids)
    assert isinstance(logits, DTensor) and logits.shape == expected.shape
    assert logits.to_local().shape[-1] == (10, 10, 10, 7)[rank % 4]
    assert relative(logits.full_tensor().detach(), expected.detach()) < 1e-12
    cotangent = torch.randn(3, 7, 37, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    logits.full_tensor().backward(cotangent)
    expected.backward(cotangent)
    for (name, p), q in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert relative(cast(Tensor, full_gradient(p)), cast(Tensor, q[1].grad)) < 1e-10, name


def check_gpt_222(rank: int) -> None:
    """Train, then leave and enter through state dicts, another signature (which every rank compiles), a copy."""
    with compiled_ahead():
        model, twin, (optimizer, other) = train_beside((2, 2, 2), nn.utils.clip_grad_norm_)
    assert isinstance(model, GPT) and list(model.state_dict()) == list(twin.state_dict())
    saved = {name: cast(DTensor, t).full_tensor() for name, t in model.state_dict().items()}
    for name, t in twin.state_dict().items():
        assert relative(saved[name], t) < 1e-9, name
    qkv = cast(DTensor, model.get_parameter("blocks.0.attn.qkv.weight"))
    assert relative(qkv.full_tensor().detach(), twin.get_parameter("blocks.0.attn.qkv.weight").detach()) > 0.1
    assert sorted(full_state_dict(model)) == (sorted(twin.state_dict()) if rank == 0 else [])
    _check_loads(model, twin)
    moments = optimizer_state_dict(model, optimizer)["state"]
    for index, expected in other.state_dict()["state"].items():
        assert relative(moments[index]["exp_avg"].full_tensor(), expected["exp_avg"], 1e-6) < 1e-9
    load_optimizer_state_dict(model, optimizer, other.state_dict())
    model.eval()
    twin.eval()
    with torch.no_grad():
        logits = model(tokens())
        assert not isinstance(logits, DTensor) and relative(logits, twin(tokens())) < 1e-9
        assert relative(copy.deepcopy(model)(tokens()), logits) == 0.0
    assert len(parallelized(model)._programs) == 2  # pyright: ignore[reportPrivateUsage]


def _check_loads(model: GPT, twin: GPT) -> None:
    """Load the twin's whole tensors, and our own DTensors, in the original order."""
    target = {name: t * 2 for name, t in twin.state_dict().items()}
    model.load_state_dict(target)
    for name, p in model.named_parameters():
        assert torch.equal(full_tensor(p), target[name]), name
    model.load_state_dict({name: cast(DTensor, t) * 0.5 for name, t in model.state_dict().items()})
    for name, p in model.named_parameters():
        assert torch.equal(full_tensor(p), twin.get_parameter(name)), name


def check_gpt_on_other_meshes(rank: int) -> None:
    """As above, programs compiled ahead; that every rank compiles the same is what the check above shows."""
    for sizes in GPT_MESHES:
        with compiled_ahead():
            train_beside(sizes)


def check_bad_input(rank: int) -> None:
    """Each mistake is an error on every rank, and the module works afterwards."""
    assert "world size 8 does not fit mesh (x=2, y=2, z=1) of 4 ranks" in error_of(
        MeshError, lambda: parallelize(TwoLinears(), (2, 2, 1))
    )
    message = error_of(RankError, lambda: parallelize(TwoLinears(), (2, 2, 2), memory="fast" if rank == 1 else "low"))
    assert "model to parallelize differs between ranks: rank 1 from the others" in message
    model = parallelize(TwoLinears(), (2, 2, 2))
    error_of(PartirError, lambda: parallelize(model, (2, 2, 2)))
    short = torch.ones(8 if rank == 6 else 16, 16)
    message = error_of(RankError, lambda: model(short))
    assert "rank 6 from the others" in message and "[8, 16]" in message and "[16, 16]" in message
    other = torch.ones(16, 16) + (rank == 2)
    assert "contents of the inputs differs between ranks: rank 2" in error_of(RankError, lambda: model(other))
    x = torch.ones(16, 16)
    before = model(x)
    # Rank 6 would run the program that it has; the others would compile.
    message = error_of(RankError, lambda: model(x if rank == 6 else torch.ones(32, 16)))
    assert "rank 6 from the others" in message
    message = error_of(Exception, lambda: model(x.to("meta") if rank == 0 else x))
    assert "rank 0 from the others" in message
    assert torch.equal(model(x), before)
    with_seed = full_tensor(model.first.weight)
    assert everyone_has(with_seed)


def check_inputs_and_outputs_as_dtensors(rank: int) -> None:
    """A DTensor input is taken as it is, its gradient comes back as it; sharded outputs are DTensors."""
    torch.manual_seed(3)
    model = TwoLinears().double()
    twin = copy.deepcopy(model)
    parallelize(model, (2, 2, 2), outputs="sharded")
    session = parallelized(model).session(model)
    assert session is not None
    x = torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).requires_grad_()
    whole = x.detach().clone().requires_grad_()
    y = model(whole)
    assert isinstance(y, DTensor) and y.to_local().numel() * 8 == y.numel()
    expected = twin(x)
    assert relative(y.full_tensor(), expected) < 1e-12
    expected.sin().sum().backward()
    y.sin().sum().backward()
    assert whole.grad is not None and relative(whole.grad, cast(Tensor, x.grad)) < 1e-10
    again = cast(DTensor, DTensor.from_local(y.to_local().detach(), y.device_mesh, y.placements).requires_grad_())
    z = model(again)
    other = expected.detach().requires_grad_()
    twin(other).sin().sum().backward()
    z.sin().sum().backward()
    assert isinstance(again.grad, DTensor) and again.grad.placements == again.placements
    assert relative(again.grad.full_tensor(), cast(Tensor, other.grad)) < 1e-10


class Dropped(nn.Module):
    """One norm, one linear, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(self.norm(x)), 0.5, self.training)


def check_diagonal_vectors_and_dropout(rank: int) -> None:
    """Vectors on the diagonal train under an ordinary optimizer; random numbers are rank 0's, whatever this rank's seed."""
    torch.manual_seed(0)
    model = Dropped().double()
    whole = copy.deepcopy(model)
    parallelize(model, (2, 2, 2), vectors="diagonal", outputs="whole")
    x = torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for call in range(2):
        y = model(x)
        assert everyone_has(y.detach()) and 0.3 < float((y == 0).double().mean()) < 0.7
        y.square().mean().backward()
        expected = [full_tensor(p).clone().requires_grad_() for p in model.parameters()]
        kept = (y != 0).detach()
        twin = torch.func.functional_call(whole.eval(), dict(zip(dict(whole.named_parameters()), expected)), (x,)) * kept * 2
        twin.square().mean().backward()
        assert relative(y.detach(), twin.detach()) < 1e-12
        for (name, p), q in zip(model.named_parameters(), expected, strict=True):
            assert relative(cast(Tensor, full_gradient(p)), cast(Tensor, q.grad)) < 1e-10, (name, call)
        norm = cast(Any, nn.utils.clip_grad_norm_(model.parameters(), 100.0))
        assert relative(norm.full_tensor(), nn.utils.get_total_norm([cast(Tensor, q.grad) for q in expected])) < 1e-12
        optimizer.step()
        optimizer.zero_grad()
    held = [name for name, p in model.named_parameters() if p.dim() == 1 and cast(DTensor, p).to_local().numel() == 0]
    place = parallelized(model).mesh.coordinate(rank)
    assert bool(held) == (place["y"] != place["z"]), held


def check_a_changed_parameter_is_noticed(rank: int) -> None:
    model = parallelize(TwoLinears(), (2, 2, 2))
    y = model(torch.ones(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    y.sum().backward(retain_graph=True)
    optimizer.step()
    try:
        y.sum().backward()
    except PartirError as error:
        assert "was changed between forward and backward" in str(error)
        return
    raise AssertionError("not noticed")


def check_torch_save_of_the_module(rank: int) -> None:
    model = parallelize(TwoLinears(), (2, 2, 2), torch.ones(16, 16))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = torch.ones(16, 16)
    assert relative(loaded(x).detach(), model(x).detach()) < 1e-6


def error_of(kind: type[Exception], call: Any) -> str:
    try:
        call()
    except kind as error:
        dist.barrier()
        return str(error)
    raise AssertionError(f"rank {dist.get_rank()}: no {kind.__name__}")
