"""safetensors in Hugging Face's layout: the same bits there and back, only slices read, bad files by their text."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import partir
from partir.blocks import shard
from partir.errors import CheckpointError
from partir.layout import Layout
from partir.mesh import Mesh
from partir.pieces import Block as HeldBlock
from partir.runtime import safetensors_files
from partir.runtime.safetensors_files import entries, read_blocks
from tests.largest import Largest
from tests.state_model import Block, made


@pytest.mark.parametrize("file_bytes", [1 << 30, 9000])
def test_there_and_back(tmp_path: Path, file_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_files, "MOST_BYTES", 600)
    model = partir.parallelize(made(0), (2, 2, 2))
    partir.save_safetensors(model, tmp_path / "out", file_bytes=file_bytes)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["model.safetensors"] if file_bytes > 9000 else len(names) == 4 and names[-1] == "model.safetensors.index.json"
    found = {name: t for file in names if file.endswith("s") for name, t in load_file(tmp_path / "out" / file).items()}
    assert sorted(found) == sorted(name for name in model.state_dict() if name != "head.weight")
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in found.items())
    twin = partir.parallelize(made(1), (1, 2, 1))
    assert partir.load_safetensors(twin, tmp_path / "out") == ([], [])
    assert all(torch.equal(p, q) for p, q in zip(twin.parameters(), model.parameters(), strict=True))


def test_the_index_says_which_file_counts(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, tmp_path / "a.safetensors")
    save_file({"weight": torch.full((2, 2), 9.0)}, tmp_path / "b.safetensors")
    index = {"weight": "a.safetensors", "bias": "a.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    model = nn.Linear(2, 2)
    partir.load_safetensors(model, tmp_path)
    assert model.weight.tolist() == [[1, 1], [1, 1]]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**index, "other": "b.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"b.safetensors does not hold other, which .*index.json has there"):
        partir.load_safetensors(model, tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    model = nn.BatchNorm1d(4).to(dtype)
    partir.save_safetensors(model, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found["weight"].dtype == dtype and found["num_batches_tracked"].dtype == torch.int64
    partir.load_safetensors(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"mismatched \(4\): weight: saved .*16|mismatched \(4\): weight: saved float32"):
        partir.load_safetensors(nn.BatchNorm1d(4).double(), tmp_path)


def test_hugging_face_reads_it_and_is_read(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=37, n_positions=16, bos_token_id=0, eos_token_id=0)
    model: Any = GPT2LMHeadModel(config)
    partir.save_safetensors(model, tmp_path / "ours")
    config.save_pretrained(tmp_path / "ours")
    again: Any = GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in model.state_dict().items())
    model.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    other: Any = GPT2LMHeadModel(config)
    assert partir.load_safetensors(other, tmp_path / "theirs") == ([], [])
    assert all(torch.equal(t, other.state_dict()[name]) for name, t in model.state_dict().items())
    base = other.transformer
    partir.load_safetensors(base, tmp_path / "theirs", rename=lambda name: name.removeprefix("transformer."))
    assert torch.equal(base.wte.weight, model.transformer.wte.weight)


@pytest.mark.parametrize("text", ["f32[96@y.x, 32@z]", "f32[(3*32@y)@x, 32@z]", "f32[96@z.x, 32@y]"])
def test_a_rank_reads_its_block_only(tmp_path: Path, text: str) -> None:
    """The block is right on each rank, and no tensor is larger than it; reading the whole is the negative control."""
    mesh, layout = Mesh.parse((2, 2, 2)), Layout.parse(text)
    whole = torch.randn(96, 32)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    found = entries(tmp_path)["w"]
    for rank in range(8):
        block = torch.empty(layout.local_shape(mesh))
        with Largest() as seen:
            read_blocks({"w": [(found, HeldBlock.of(block, layout, mesh, rank))]})
        assert torch.equal(block, shard(whole, layout, mesh, rank))
        assert seen.bytes <= block.nbytes
    with Largest() as control:
        load_file(tmp_path / "model.safetensors")["w"].clone()
    assert control.bytes == whole.nbytes


def test_names_that_do_not_meet(tmp_path: Path) -> None:
    model = made(0)
    state: dict[str, Tensor] = {name: t.clone() for name, t in model.state_dict().items() if name != "head.weight"}
    save_file({**{name: t for name, t in state.items() if name != "norm.bias"}, "else": torch.ones(2)}, tmp_path / "model.safetensors")
    before = model.qkv.weight.clone()
    with pytest.raises(CheckpointError, match=r"missing \(1\): norm.bias\n    unexpected \(1\): else"):
        partir.load_safetensors(model, tmp_path)
    assert torch.equal(model.qkv.weight, before)
    assert partir.load_safetensors(model, tmp_path / "model.safetensors", strict=False) == (["norm.bias"], ["else"])
    with pytest.raises(CheckpointError, match=r"qkv.weight: saved float64 \[72, 24\], the model has float64 \[96, 32\]"):
        partir.load_safetensors(Block(hidden=32).double(), tmp_path, strict=False)
    under_head = {**{name: t for name, t in state.items() if name != "words.weight"}, "head.weight": state["words.weight"]}
    save_file(under_head, tmp_path / "other.safetensors")
    assert partir.load_safetensors(made(1), tmp_path / "other.safetensors") == ([], [])


def test_damaged_files_are_named(tmp_path: Path) -> None:
    model = made(0)
    partir.save_safetensors(model, tmp_path / "a", file_bytes=9000)
    second = tmp_path / "a" / "model-00002-of-00003.safetensors"
    kept = second.read_bytes()
    for damage in (lambda: os.truncate(second, 3000), lambda: second.write_bytes(b"\xff" * 40), second.unlink):
        damage()
        with pytest.raises(CheckpointError, match="model-00002-of-00003.safetensors is (damaged|missing)"):
            partir.load_safetensors(model, tmp_path / "a")
    second.write_bytes(kept)
    (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps({"weights": {}}))
    with pytest.raises(CheckpointError, match="index.json is damaged: KeyError"):
        partir.load_safetensors(model, tmp_path / "a")
    with pytest.raises(CheckpointError, match="is neither a safetensors file nor a folder with model.safetensors"):
        partir.load_safetensors(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"index.json exists: choose another folder"):
        partir.save_safetensors(model, tmp_path / "a")
