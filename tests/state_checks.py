"""What each of 8 gloo ranks checks of checkpoints. A function runs on every rank at once and takes its rank."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import torch
import torch.distributed as dist

import partir
from partir import initial_values
from partir.errors import CheckpointError, PartirError
from partir.initial_values import InitialValues
from partir.runtime import safetensors_files
from tests.largest import CPU, Largest
from tests.state_model import Block, adamw, batches, made, parallel, same_bits, set_buffers, shared_folder, train, whole_state

FOLDER = "state_checks"
STEPS = 8
SAVED = 3


def check_saved_on_one_mesh_loads_on_others(rank: int) -> None:
    """(2,2,2) -> (4,1,2), data 2 x (1,2,2) and one device: the same bits, and the losses of the run that never stopped."""
    folder = shared_folder(FOLDER)
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    data = batches(STEPS)
    model, optimizer = parallel((2, 2, 2), 0)
    torch.manual_seed(5)
    train(model, optimizer, data[:SAVED])
    partir.save_checkpoint(model, optimizer, folder / "step_3", step=SAVED, extra={"order": [3, 1, 2]})
    expected = whole_state(model, optimizer)
    later = partir.save_checkpoint(model, optimizer, folder / "step_4", step=SAVED + 1, asynchronous=True)
    losses = train(model, optimizer, data[SAVED:])
    partir.save_checkpoint(model, optimizer, folder / "step_8", step=STEPS, extra={"losses": losses})
    assert later.done() and later.wait() == folder / "step_4"
    assert partir.latest_checkpoint(folder) == folder / "step_8"
    for mesh, name in (((4, 1, 2), "step_3"), ((2, 1, 2, 2), "step_4")):
        other, restarted = parallel(mesh, 1 + rank)
        found = partir.load_checkpoint(other, restarted, folder / name)
        assert (found.extra, found.calls, found.seed) == ({"order": [3, 1, 2]} if name == "step_3" else {}, SAVED, 5)
        assert same_bits(whole_state(other, restarted), expected), mesh
        assert close(train(other, restarted, data[SAVED:]), losses), mesh
    check_plain_twin(folder / "step_3", expected, losses)


def check_plain_twin(path: Any, expected: Any, losses: list[float]) -> None:
    eager = made(9)
    optimizer = adamw(eager)
    found = partir.load_checkpoint(eager, optimizer, path)
    assert same_bits(whole_state(eager, optimizer), expected)
    with partir.same_randomness(found.seed, found.calls):
        assert close(train(eager, optimizer, batches(STEPS)[found.step :]), losses)


def check_diagonal_and_back(rank: int) -> None:
    """One device -> diagonal vectors on 8 ranks, before the first compile and after, -> one device."""
    folder = shared_folder("diagonal")
    eager = made(4)
    optimizer = adamw(eager)
    train(eager.eval(), optimizer, batches(2))
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        partir.save_checkpoint(eager, optimizer, folder / "plain", step=2)
    dist.barrier()
    expected = whole_state(eager, optimizer)
    model, other = parallel((2, 2, 2), 5, vectors="diagonal")
    partir.load_checkpoint(model, other, folder / "plain")
    assert same_bits(whole_state(model, other), expected)
    late = partir.parallelize(made(6), (2, 2, 2))
    partir.load_checkpoint(late, None, folder / "plain")
    assert all(torch.equal(partir.full_tensor(p), expected[name]) for name, p in late.named_parameters())
    partir.save_checkpoint(model, other, folder / "diagonal", step=2)
    twin = made(7)
    restarted = adamw(twin)
    partir.load_checkpoint(twin, restarted, folder / "diagonal")
    assert same_bits(whole_state(twin, restarted), expected)


def check_a_refused_checkpoint_is_refused_everywhere(rank: int) -> None:
    """One rank's copy of a file is damaged, as seen by the ranks that read it: all raise, and nothing is loaded."""
    folder = shared_folder("refused")
    model, optimizer = parallel((2, 2, 2), 0)
    train(model, optimizer, batches(1))
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    partir.save_checkpoint(model, optimizer, folder / "step_1", step=1)
    assert "exists: a checkpoint is never overwritten" in refused(lambda: partir.save_checkpoint(model, optimizer, folder / "step_1"))
    before = whole_state(model, optimizer)
    if rank == 0:
        file = folder / "step_1" / "__5_0.distcp"
        file.write_bytes(file.read_bytes()[:-7])
    dist.barrier()
    assert "__5_0.distcp is damaged" in refused(lambda: partir.load_checkpoint(model, optimizer, folder / "step_1"))
    assert same_bits(whole_state(model, optimizer), before)
    train(model, optimizer, batches(1))


def refused(call: Any) -> str:
    try:
        call()
    except PartirError as error:
        return str(error)
    raise CheckpointError("no error")


def close(actual: list[float], expected: list[float]) -> bool:
    return len(actual) == len(expected) and all(abs(a - e) < 1e-10 * abs(e) for a, e in zip(actual, expected))


def check_built_on_meta(rank: int) -> None:
    """Shards of a meta model are those of one process with the same seed; rank 0's seed counts; no rank makes a whole tensor."""
    initial_values.CHUNK = 64
    torch.manual_seed(21 + rank)
    with torch.device("meta"):
        model = Block(words=96, hidden=48)
    late = copy.deepcopy(model)
    with Largest() as seen:
        model = partir.parallelize(model, (2, 2, 2), batches(1)[0], initialize=set_buffers)
    assert seen.bytes <= max(144 * 48 * 4 // 8, 64 * 8) + 64 * 8, seen.bytes
    with torch.device("meta"):
        twin = Block(words=96, hidden=48)
    values = InitialValues(twin, 21, set_buffers)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(partir.full_tensor(p), values.whole(q, CPU)), name
    torch.manual_seed(21)
    late = partir.parallelize(late, (2, 2, 2), initialize=set_buffers)
    optimizer = adamw(late)
    assert "no values yet" in refused(lambda: partir.save_checkpoint(late, optimizer, shared_folder("meta")))
    train(late, optimizer, batches(1))
    train(model, other := adamw(model), batches(1))
    assert same_bits(whole_state(late, optimizer), whole_state(model, other))


def check_safetensors(rank: int) -> None:
    """8 ranks write what one process reads, and read it back; a rank's largest tensor is its shard or a chunk."""
    folder = shared_folder("safetensors")
    safetensors_files.MOST_BYTES = 2000
    model, _ = parallel((2, 2, 2), 0)
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    partir.save_safetensors(model, folder, file_bytes=9000)
    eager = made(1)
    partir.load_safetensors(eager, folder)
    assert all(torch.equal(partir.full_tensor(p), q) for p, q in zip(model.parameters(), eager.parameters(), strict=True))
    other, _ = parallel((4, 1, 2), 2, vectors="balanced")
    with Largest() as seen:
        partir.load_safetensors(other, folder)
    assert seen.bytes <= 72 * 24 * 8 // 8, seen.bytes
    assert all(torch.equal(partir.full_tensor(p), q) for p, q in zip(other.parameters(), eager.parameters(), strict=True))
    if rank == 0:
        (folder / "model-00002-of-00003.safetensors").write_bytes(b"nothing")
    dist.barrier()
    assert "model-00002-of-00003.safetensors is damaged" in refused(lambda: partir.load_safetensors(other, folder))
    assert all(torch.equal(partir.full_tensor(p), q) for p, q in zip(other.parameters(), eager.parameters(), strict=True))
