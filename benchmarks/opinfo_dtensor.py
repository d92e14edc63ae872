"""Run one call of an op through torch's DTensor, split in the same way, on ranks that are threads of this process."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.opinfo import Sample, Split
from benchmarks.opinfo_trial import Expected, Outcome, difference, gradients_of, known_gradients
from partir.passes.structure import flatten

SECONDS = 30.0
COPIES = ("aten::clone", "aten::_to_copy", "aten::cat", "aten::detach", "aten::copy_", "aten::empty", "aten::new_empty")


class _LocalWork(TorchDispatchMode):
    """Notes whether an op that computes reads a tensor of the size of one block: then not all was gathered first."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block
        self.in_blocks = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        schema = func._schema
        views = any(result.alias_info is not None for result in schema.returns)
        computes = schema.name.startswith("aten::") and not views and schema.name not in COPIES
        if computes and any(isinstance(arg, Tensor) and arg.numel() == self.block for arg in flatten(args)[0]):
            self.in_blocks = True
        return func(*args, **(kwargs or {}))


def try_dtensor(sample: Sample, expected: Expected, split: Split) -> Outcome:
    """Return what one split showed; share is 1.0 where everything was gathered first, else one rank's part of the split tensor."""
    outcomes = run_ranks(split.count, lambda rank: _try_on_rank(sample, expected, split))
    failed = next((outcome for outcome in outcomes if outcome is None or outcome.verdict != "right"), outcomes[0])
    return Outcome("refused", "it did not end") if failed is None else failed


def _try_on_rank(sample: Sample, expected: Expected, split: Split) -> Outcome:
    mesh = init_device_mesh("cpu", (split.count,))

    def distribute(number: int, tensor: Tensor) -> DTensor:
        placement = Shard(split.dim) if number == split.tensor else Replicate()
        made = distribute_tensor(tensor.detach().clone(), mesh, [placement], src_data_rank=None)
        return cast(DTensor, made.requires_grad_(tensor.requires_grad))

    leaves = tuple(distribute(number, tensor) for number, tensor in enumerate(sample.tensors))
    work = _LocalWork(sample.tensors[split.tensor].numel() // split.count)
    try:
        with work:
            results = flatten(sample.call(*leaves), merge=True)[0]
        cotangents = [
            distribute_tensor(given, mesh, [Replicate()], src_data_rank=None) if isinstance(result, DTensor) else given
            for result, given in zip(results, expected.cotangents, strict=True)
        ]
        wholes = [_whole(result) for result in results]
        needed = [place for place, result in enumerate(results) if expected.results[place].requires_grad and result.requires_grad]
        found = gradients_of([results[place] for place in needed], leaves, [cotangents[place] for place in needed])
        gradients = [None if gradient is None else _whole(gradient) for gradient in found]
    except Exception as error:  # whatever DTensor raises
        return Outcome("refused", f"{type(error).__name__}: {error}")
    problem = difference(expected.results, wholes, "result")
    problem = problem or difference(*known_gradients(expected.gradients, gradients, sample.tensors), "gradient")
    if problem is not None:
        return Outcome("wrong", f"{split}: {problem}")
    return Outcome("right", "", 1 / split.count if work.in_blocks else 1.0)


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def run_ranks(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Return what `work(rank)` returns on each of `count` ranks, which are threads; None from one that did not end."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # pyright: ignore
    threaded._install_threaded_pg()  # pyright: ignore[reportPrivateUsage]
    store, found = cast(Any, dist).HashStore(), dict[int, Any]()

    def run(rank: int) -> None:
        dist.init_process_group(backend="threaded", rank=rank, world_size=count, store=store)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[rank] = work(rank)
        except BaseException as error:  # wakes the ranks that wait for this one
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    threaded.ProcessLocalGroup.reset()
    threaded._uninstall_threaded_pg()  # pyright: ignore[reportPrivateUsage]
    torch._C._distributed_c10d._set_thread_isolation_mode(False)  # pyright: ignore
    return [found.get(rank) for rank in range(count)]
