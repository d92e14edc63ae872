"""What each of 4 gloo ranks checks of failures that leave every process alive: the same error everywhere, then a new start."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partir import parallelize, save_checkpoint
from partir.errors import NonFiniteError, RankError
from partir.module import parallelized

MESH = (2, 2, 1)
FAILS = 2


class Checked(nn.Module):
    """Two linears with an op between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.special.erfcx(self.first(x))).square().mean()


def made() -> nn.Module:
    return parallelize(Checked(), MESH, torch.ones(8, 16))


def error_within(seconds: float, call: Callable[[], Any]) -> Exception:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        assert time.monotonic() - began < seconds, f"{time.monotonic() - began:.1f} s: {error}"
        return error
    raise AssertionError("no error")


def refusing(*_: Any, **__: Any) -> Any:
    raise MemoryError("no room for 3 more bytes")


def check_a_rank_that_raises_in_the_forward(rank: int) -> None:
    model = made()
    model(torch.ones(8, 16))
    if rank == FAILS:
        _break(model, "forward")
    error = error_within(30, lambda: model(torch.ones(8, 16)))
    _check_told(rank, error, "the forward of call 2")
    again = error_within(1, lambda: model(torch.ones(8, 16)))
    assert isinstance(again, RankError) and "parallelize the model again, on every rank" in str(again), again


def check_a_rank_that_raises_in_the_backward(rank: int) -> None:
    model = made()
    model(torch.ones(8, 16)).backward()
    if rank == FAILS:
        _break(model, "backward")
    loss = model(torch.ones(8, 16))
    _check_told(rank, error_within(30, loss.backward), "the backward of call 2")


def _break(model: nn.Module, stage: str) -> None:
    """Let the first message of this rank's program run out of memory: the others wait for it."""
    (entry,) = parallelized(model)._programs.values()  # pyright: ignore[reportPrivateUsage]
    module = getattr(entry.run, stage)
    node = next(node for node in module.graph.nodes if node.meta.get("message") == "start")
    node.target, node.name = refusing, "broken"
    module.recompile()


def _check_told(rank: int, error: Exception, where: str) -> None:
    if rank == FAILS:
        assert isinstance(error, MemoryError) and str(error) == "no room for 3 more bytes"
        notes = getattr(error, "__notes__", [])
        assert not hasattr(error, "add_note") or f"rank {FAILS} raised this in {where} at %broken" in "".join(notes), notes
        return
    text = str(error)
    assert isinstance(error, RankError), text
    assert f"rank {rank} stopped at " in text and "of call 2" in text, text
    assert f"rank {FAILS} raised MemoryError: no room for 3 more bytes" in text and f"in {where} at %broken = " in text, text
    assert "failing_ranks.py:" in text, text


class Differs(nn.Module):
    """A model that is not the same on every rank, in what no signature shows."""

    def __init__(self, depth: int, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.depths = [depth]
        self.scale = [torch.full((16,), scale)]

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.depths[0]):
            x = self.linear(x) * self.scale[0]
        return x.mean()


def check_ranks_that_differ(rank: int) -> None:
    """Another program, constant or plan is an error on every rank, and the ranks go on."""
    text = str(error_within(30, lambda: parallelize(Differs(2 if rank == FAILS else 1, 1.0), MESH, torch.ones(8, 16))))
    assert "the compiled program differs between ranks: rank 2 from the others" in text and len(text) < 3000, text
    model = made()
    model.depth = 2 if rank == FAILS else 1  # pyright: ignore
    text = str(error_within(30, lambda: model(torch.ones(8, 16))))
    assert "the signature of a call differs between ranks: rank 2 from the others" in text, text
    assert "depth 2" in text and "depth 1" in text, text
    model.depth, model.settings = 1, {"rank": rank, "device": torch.device("cuda", rank)}  # pyright: ignore
    model(torch.ones(8, 16)).backward()
    session = parallelized(model).session(model)
    assert session is not None
    session.agreement.compare("devices", f"cuda:{rank} device(type='cuda', index={rank})")  # each rank has its own
    text = str(error_within(30, lambda: parallelize(Differs(1, float(rank == FAILS)), MESH, torch.ones(8, 16))))
    assert "a tensor that is an attribute of the model, and no buffer, differs between ranks: rank 2 from the others" in text, text
    pin = {"linear.weight": "f[out@x.y, in]"} if rank == FAILS else None
    text = str(error_within(30, lambda: parallelize(Differs(1, 1.0), MESH, torch.ones(8, 16), pin=pin)))
    assert "the model to parallelize differs between ranks: rank 2" in text and "f[out@x.y, in]" in text, text
    model = parallelize(Differs(1, 1.0), MESH, torch.ones(8, 16))
    text = str(error_within(30, lambda: model(torch.ones(4 if rank == FAILS else 8, 16))))
    assert "the signature of a call differs between ranks: rank 2 from the others" in text and "[4, 16]" in text, text
    model(torch.ones(8, 16)).backward()


class Logs(nn.Module):
    """The mean logarithm of a linear's output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)
        nn.init.eye_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.linear(x)).mean()


def check_a_loss_that_is_nan(rank: int) -> None:
    """Every rank names itself, the call, the node, its line, and the rank where it was made; then they go on."""
    model = parallelize(Logs(), MESH, check_finite="nodes")
    x = torch.ones(8, 16)
    model(x + 1).backward()
    x[7, 3] = -2.0
    error = error_within(30, lambda: model(x))
    text = str(error)
    assert isinstance(error, NonFiniteError) and f"rank {rank}, call 2: the loss output[0] is nan. %log = aten.log.default" in text, text
    assert "failing_ranks.py:" in text and re.search(r"makes 1 nan of 32 values on rank [23] of %\w+: values from -2 to 1\.", text), text
    assert torch.isfinite(model(x.abs()))


def check_a_rank_that_saves_alone(rank: int) -> None:
    """The others go on to the next call: all are told so at once."""
    model = made()
    model(torch.ones(8, 16))
    folder = Path(tempfile.gettempdir(), f"partir_saves_alone_{os.getpid()}")
    error = error_within(30, lambda: save_checkpoint(model, None, folder) if rank == 0 else model(torch.ones(8, 16)))
    text = str(error)
    assert isinstance(error, RankError) and "differs between ranks: rank 0 from the others" in text, text
    assert "rank 0: the saving of a checkpoint" in text and "ranks 1, 2, 3: the signature of a call" in text, text
    assert not folder.exists()


def check_nothing_is_left(rank: int) -> None:
    """`destroy_process_group` ends every thread and connection, a parallelized model alive or not; a call says so afterwards."""
    model = made()
    model(torch.ones(8, 16)).backward()
    assert not multiprocessing.active_children()
    dist.destroy_process_group()
    gc.collect()
    left = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    assert not [name for name in left if "gloo" in name], left
    # The model keeps a connection to the store, through which it would say why it stops; rank 0 keeps the store.
    assert len(_sockets()) <= (10 if rank == 0 else 1), _sockets()
    call: Callable[[], Any] = functools.partial(model, torch.ones(8, 16))
    text = str(error_within(5, call))
    assert "was destroyed: parallelize the model again" in text, text
    del model, call
    gc.collect()
    assert not _sockets(), _sockets()


def _sockets() -> list[str]:
    return [link for link in map(_link, os.listdir("/proc/self/fd")) if link.startswith("socket:")]


def _link(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
