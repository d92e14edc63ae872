"""Checkpoints in one process: between meshes and one device, crash safety, bad input by its text."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import partir
from partir.errors import CheckpointError
from partir.layout import Layout
from partir.mesh import Mesh
from partir.pieces import Piece, pieces, split_pieces
from partir.runtime import checkpoint as folder_of
from tests.state_model import Block, adamw, batches, made, parallel, same_bits, train, whole_state

STEPS = 6


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[float]]:
    """Return a folder with a checkpoint after 3 steps on (2,2,2), the state then, and the losses of the 3 steps after it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model, optimizer = parallel((2, 2, 2), 0)
    torch.manual_seed(5)
    train(model, optimizer, batches(3))
    partir.save_checkpoint(model, optimizer, folder / "step_3", step=3, extra={"order": [2, 1], "rng": torch.get_rng_state()})
    state = whole_state(model, optimizer)
    return folder, state, train(model, optimizer, batches(STEPS)[3:])


@pytest.mark.parametrize("mesh", [(4, 1, 2), (1, 1, 1), (2, 1, 2, 2), (1, 3, 1)])
def test_goes_on_on_another_mesh_as_if_never_stopped(saved: Any, mesh: Any) -> None:
    folder, state, losses = saved
    model, optimizer = parallel(mesh, 8)
    found = partir.load_checkpoint(model, optimizer, partir.latest_checkpoint(folder) or "")
    assert same_bits(whole_state(model, optimizer), state)
    assert (found.step, found.calls, found.seed, found.extra["order"]) == (3, 3, 5, [2, 1])
    assert train(model, optimizer, batches(STEPS)[3:]) == pytest.approx(losses, rel=1e-10)


def test_goes_on_on_one_device_and_back(saved: Any, tmp_path: Path) -> None:
    folder, state, losses = saved
    eager = made(8)
    optimizer = adamw(eager)
    found = partir.load_checkpoint(eager, optimizer, folder / "step_3")
    assert same_bits(whole_state(eager, optimizer), state)
    with partir.same_randomness(found.seed, found.calls):
        first = train(eager, optimizer, batches(4)[3:])
    partir.save_checkpoint(eager, optimizer, tmp_path / "eager", step=4, calls=4)
    model, other = parallel((2, 2, 2), 9)
    partir.load_checkpoint(model, other, tmp_path / "eager")
    assert first + train(model, other, batches(STEPS)[4:]) == pytest.approx(losses, rel=1e-10)


def test_without_the_seed_dropout_would_differ(saved: Any) -> None:
    folder, _, losses = saved
    model, optimizer = parallel((2, 2, 2), 8)
    torch.manual_seed(6)
    partir.load_checkpoint(model, optimizer, folder / "step_3", restore_seed=False)
    assert torch.initial_seed() == 6
    assert train(model, optimizer, batches(4)[3:])[0] != pytest.approx(losses[0], rel=1e-4)


def test_a_later_change_does_not_reach_an_asynchronous_save(tmp_path: Path) -> None:
    model, optimizer = parallel((2, 1, 1), 0)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    state = whole_state(model, optimizer)
    extra: dict[str, Any] = {"place": torch.tensor([24]), "seen": [1], "schedule": {"last": 5}}
    saving = partir.save_checkpoint(model, optimizer, tmp_path / "step_0", extra=extra, asynchronous=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    extra["place"].add_(1)
    extra["seen"].append(2)
    extra["schedule"].update(last=6)
    optimizer.param_groups[0]["lr"].fill_(9)
    assert saving.wait() == tmp_path / "step_0" and saving.done()
    found = partir.load_checkpoint(model, optimizer, tmp_path / "step_0")
    assert same_bits(whole_state(model, optimizer), state)
    assert found.extra == {"place": torch.tensor([24]), "seen": [1], "schedule": {"last": 5}}
    assert optimizer.param_groups[0]["lr"] == 0.5


class MasterWeights(torch.optim.SGD):
    """Keeps a float32 copy of each parameter."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            master = self.state[parameter].setdefault("master", parameter.detach().float())
            master.sub_(parameter.grad.float(), alpha=1e-3)
            parameter.data.copy_(master)


def test_state_of_another_dtype_than_its_parameter(tmp_path: Path) -> None:
    models = [partir.parallelize(torch.nn.Linear(8, 6).bfloat16(), mesh) for mesh in ((2, 1, 1), (1, 2, 1))]
    optimizers = [MasterWeights(model.parameters(), lr=1.0) for model in models]
    models[0](torch.randn(4, 8).bfloat16()).sum().backward()
    optimizers[0].step()
    partir.save_checkpoint(models[0], optimizers[0], tmp_path / "step_1")
    partir.load_checkpoint(models[1], optimizers[1], tmp_path / "step_1")
    saved, loaded = ([t["master"] for t in optimizer.state.values()] for optimizer in optimizers)
    assert all(a.dtype == b.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(saved, loaded, strict=True))


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = partir.parallelize(torch.nn.Linear(8, 6), (2, 1, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    partir.save_checkpoint(model, optimizer, tmp_path / "step_1")
    with pytest.raises(CheckpointError, match=r"of another optimizer than SGD: it has the options amsgrad, betas.* and not .*momentum"):
        partir.load_checkpoint(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "step_1")
    partir.load_checkpoint(model, torch.optim.AdamW(model.parameters()), tmp_path / "step_1")


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    for step in (1, 2):
        partir.save_checkpoint(model, None, tmp_path / f"step_{step}", step=step)
    (tmp_path / "step_2" / "checkpoint.json").write_text("{")
    with pytest.warns(UserWarning, match="passed over: .*step_2.*is damaged"):
        assert partir.latest_checkpoint(tmp_path) == tmp_path / "step_1"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be made"):
        partir.save_checkpoint(torch.nn.Linear(2, 2), None, tmp_path / "file" / "step_1")


def test_torch_reads_it_too(saved: Any, tmp_path: Path) -> None:
    folder, state, _ = saved
    dcp_to_torch_save(str(folder / "step_3"), str(tmp_path / "whole.pt"))
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    names = [name for name, _ in made(0).named_parameters()]
    assert all(torch.equal(whole["model"][name], state[name]) for name in names)
    assert all(torch.equal(whole["optimizer"]["state"][name]["exp_avg"], state[f"{name}.exp_avg"]) for name in names)


@pytest.mark.parametrize("text", ["f32[(3*8@y)@x, 4@z]", "f32[8@y.x] on y=z", "f32[24@y.z.x]", "f32[8@z.x, 4@y]", "f32[]"])
@pytest.mark.parametrize("most", [16, 64, 1 << 20])
def test_pieces_cover_a_tensor_once(text: str, most: int) -> None:
    mesh, layout = Mesh.parse((2, 2, 2)), Layout.parse(text)
    found = {piece.starts: piece.sizes for rank in range(8) for piece in split_pieces(pieces(layout, mesh, rank), 4, most)}
    seen = torch.zeros(layout.shape)
    for starts, sizes in found.items():
        seen[tuple(slice(start, start + size) for start, size in zip(starts, sizes))] += 1
    assert bool((seen == 1).all())
    assert all(torch.Size(sizes).numel() * 4 <= most for sizes in found.values())


def test_an_unfinished_save_is_not_seen_and_the_next_one_clears_it(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved[0]
    shutil.copytree(folder, tmp_path / "run")
    model, optimizer = parallel((1, 1, 1), 0)

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(folder_of, "sync_folder", fail)
        with pytest.raises(CheckpointError, match=r"step_4 was not saved; earlier checkpoints are as they were.*disk full"):
            partir.save_checkpoint(model, optimizer, tmp_path / "run" / "step_4", step=4)
        late = partir.save_checkpoint(model, optimizer, tmp_path / "run" / "step_5", step=5, asynchronous=True)
        with pytest.raises(CheckpointError, match=r"step_5 was not saved"):
            late.wait()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".step_4.unfinished", ".step_5.unfinished", "step_3"]
    assert partir.latest_checkpoint(tmp_path / "run") == tmp_path / "run" / "step_3"
    partir.save_checkpoint(model, optimizer, tmp_path / "run" / "step_4", step=4)
    assert partir.latest_checkpoint(tmp_path / "run") == tmp_path / "run" / "step_4"


def change_bytes(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


DAMAGE: list[tuple[str, Callable[[Path], Any], str]] = [
    ("__0_0.distcp", change_bytes, "is damaged: it has"),
    ("__0_0.distcp", lambda file: os.truncate(file, 100), "is damaged: it has 100 bytes"),
    ("__0_0.distcp", Path.unlink, "is missing: the checkpoint is damaged"),
    (".metadata", change_bytes, "is damaged"),
    ("checkpoint.json", lambda file: file.write_text("{"), "is damaged"),
    ("checkpoint.json", Path.unlink, "is no complete checkpoint"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGE)
def test_a_damaged_file_is_named_and_nothing_is_loaded(saved: Any, tmp_path: Path, name: str, damage: Any, message: str) -> None:
    path = tmp_path / "step_3"
    shutil.copytree(saved[0] / "step_3", path)
    damage(path / name)
    model = made(8)
    optimizer = adamw(model)
    before = whole_state(model, optimizer)
    with pytest.raises(CheckpointError, match=message) as raised:
        partir.load_checkpoint(model, optimizer, path)
    assert name in str(raised.value)
    assert same_bits(whole_state(model, optimizer), before)


def test_another_models_checkpoint_lists_names(saved: Any) -> None:
    path = saved[0] / "step_3"
    wider = Block(hidden=32).double()
    wider.extra = nn.Linear(2, 2)  # pyright: ignore
    with pytest.raises(CheckpointError) as raised:
        partir.load_checkpoint(wider, None, path)
    text = str(raised.value)
    assert "step_3 is not of this Block; nothing was loaded." in text
    assert "qkv.weight: saved float64 [72, 24], the model has float64 [96, 32]" in text
    assert "missing (2): extra.weight, extra.bias" in text
    with pytest.raises(CheckpointError, match=r"words.weight: saved float64 \[37, 24\], the model has float32"):
        partir.load_checkpoint(Block(), None, path)
    smaller = made(0)
    del smaller.norm
    with pytest.raises(CheckpointError, match=r"strict=False leaves out(.|\n)*unexpected \(2\): norm.weight, norm.bias"):
        partir.load_checkpoint(smaller, None, path)
    assert partir.load_checkpoint(smaller, None, path, strict=False).unexpected == ("norm.weight", "norm.bias")


def test_tied_here_and_untied_there(saved: Any, tmp_path: Path) -> None:
    untied = made(3)
    untied.head.weight = nn.Parameter(untied.head.weight.detach() + 1)
    partir.save_checkpoint(untied, None, tmp_path / "untied")
    with pytest.raises(CheckpointError, match="words.weight and head.weight are one parameter here, words.weight and head.weight are two"):
        partir.load_checkpoint(made(0), None, tmp_path / "untied")
    partir.load_checkpoint(untied, None, saved[0] / "step_3")
    assert torch.equal(untied.head.weight, untied.words.weight)


def test_an_optimizer_of_other_parameters(saved: Any, tmp_path: Path) -> None:
    path, model = saved[0] / "step_3", made(0)
    before = {name: p.clone() for name, p in model.named_parameters()}
    some = torch.optim.AdamW([p for name, p in model.named_parameters() if name != "norm.bias"])
    with pytest.raises(CheckpointError, match=r"is of other parameters; nothing was loaded.\n    unexpected \(1\): norm.bias"):
        partir.load_checkpoint(model, some, path)
    groups = torch.optim.AdamW([{"params": [p for p in model.parameters() if p.dim() == n]} for n in (1, 2)])
    with pytest.raises(CheckpointError, match="group them as they were"):
        partir.load_checkpoint(model, groups, path)
    strange = torch.optim.AdamW(made(0).parameters())
    with pytest.raises(CheckpointError, match="holds 7 parameters that are not the model's"):
        partir.load_checkpoint(model, strange, path)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    partir.save_checkpoint(model, None, tmp_path / "alone")
    with pytest.raises(CheckpointError, match="holds no optimizer state; pass None"):
        partir.load_checkpoint(model, adamw(model), tmp_path / "alone")


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    model = made(0)
    for name in (".hidden", "there"):
        (tmp_path / "there").mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match="does not begin with a dot|exists: a checkpoint is never overwritten"):
            partir.save_checkpoint(model, None, tmp_path / name)


def test_extra_is_data(tmp_path: Path) -> None:
    model = made(0)
    with pytest.raises(CheckpointError, match="use dicts, lists, numbers, texts and tensors"):
        partir.save_checkpoint(model, None, tmp_path / "step_1", extra={"model": model})
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_is_readable(saved: Any) -> None:
    found = json.loads((saved[0] / "step_3" / "checkpoint.json").read_text())
    assert found["step"] == 3 and sorted(found["files"]) == [".metadata", "__0_0.distcp"]


def test_one_piece_of_a_whole() -> None:
    assert pieces(Layout.parse("f32[4, 2]"), Mesh.parse((1, 1, 1)), 0) == [Piece((0, 0), (4, 2), (slice(0, 4), slice(0, 2)))]
