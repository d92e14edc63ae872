"""Models built on meta: their own init functions, the same values on every mesh, and never more than a shard at once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import partir
from partir import initial_values
from partir.blocks import shard
from partir.errors import CheckpointError, PartirError
from partir.initial_values import InitialValues
from partir.layout import Layout
from partir.mesh import Mesh
from partir.options import Options
from partir.passes.pipeline import compile_program
from partir.runtime.initial_blocks import stand_in
from tests.largest import CPU, Largest
from tests.state_model import Block, batches, made, set_buffers

MESH = Mesh.parse((2, 2, 2))


class Inits(nn.Module):
    """One parameter for each kind of init."""

    def __init__(self) -> None:
        super().__init__()
        names = ("uniform", "normal", "truncated", "xavier", "kaiming", "filled", "tail", "data", "orthogonal", "sparse")
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.empty(24, 16)))

    def reset_parameters(self) -> None:
        p = dict(self.named_parameters())
        nn.init.uniform_(p["uniform"], 2, 5)
        nn.init.normal_(p["normal"], 1.0, 0.1)
        nn.init.trunc_normal_(p["truncated"], std=0.5, a=-0.4, b=0.6)
        nn.init.xavier_uniform_(p["xavier"])
        nn.init.kaiming_normal_(p["kaiming"])
        nn.init.constant_(p["filled"], 3.0)
        nn.init.ones_(p["tail"])
        with torch.no_grad():
            p["tail"][::2, 3:5].zero_()
            p["tail"].view(-1).mul_(2)
        p["data"].data.exponential_(2.0).clamp_(max=1.0)
        nn.init.orthogonal_(p["orthogonal"])
        nn.init.sparse_(p["sparse"], 0.5)


def on_meta(build: Any) -> Any:
    with torch.device("meta"):
        return build()


def values_of(model: nn.Module, seed: int = 7) -> InitialValues:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return InitialValues(model, seed)


@pytest.mark.parametrize("text", ["f32[24@y.x, 16@z]", "f32[(3*8@y)@x, 16@z]", "f32[24@z, 16]"])
@pytest.mark.parametrize("chunk", [initial_values.CHUNK, 37])
def test_a_block_is_that_of_the_whole(text: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, layout = on_meta(Inits), Layout.parse(text)
    values = values_of(model)
    whole = {name: values.whole(p, CPU) for name, p in model.named_parameters()}
    monkeypatch.setattr(initial_values, "CHUNK", chunk)
    for name, p in model.named_parameters():
        for rank in (0, 3, 6):
            assert torch.equal(values.block(p, layout, MESH, rank, CPU), shard(whole[name], layout, MESH, rank)), name


def test_each_kind_is_what_torch_makes() -> None:
    model = on_meta(Inits)
    values = values_of(model)
    found = {name: values.whole(p, CPU) for name, p in model.named_parameters()}
    eager = Inits()
    torch.manual_seed(0)
    eager.reset_parameters()
    for name, p in ((name, p.detach()) for name, p in eager.named_parameters()):
        assert float(found[name].mean()) == pytest.approx(float(p.mean()), abs=0.05 * (1 + float(p.std()))), name
        assert float(found[name].std()) == pytest.approx(float(p.std()), rel=0.15, abs=1e-6), name
    assert torch.equal(found["tail"], eager.tail.detach()) and torch.equal(found["filled"], eager.filled.detach())  # pyright: ignore
    assert -0.4 <= float(found["truncated"].min()) and float(found["truncated"].max()) <= 0.6
    torch.testing.assert_close(found["orthogonal"].T @ found["orthogonal"], torch.eye(16), atol=1e-5, rtol=0)
    assert bool(((found["sparse"] == 0).sum(0) == 12).all())
    assert not torch.equal(found["normal"], values_of(model, seed=8).whole(model.normal, CPU))


def test_what_is_not_elementwise_is_noticed() -> None:
    with pytest.warns(UserWarning, match="the init of orthogonal, sparse is not elementwise, so each rank makes that tensor whole"):
        InitialValues(on_meta(Inits), 0)


def test_torchs_own_modules() -> None:
    build = lambda: nn.Sequential(  # noqa: E731
        nn.Embedding(6, 4, padding_idx=2), nn.LSTM(4, 4), nn.MultiheadAttention(4, 2), nn.Conv2d(2, 4, 3), nn.BatchNorm1d(4)
    )
    model = on_meta(build)
    values = values_of(model)
    assert bool((values.whole(model[0].weight, CPU)[2] == 0).all())
    assert torch.equal(values.whole(model[4].running_var, CPU), torch.ones(4))
    assert int(values.whole(model[4].num_batches_tracked, CPU)) == 0
    assert float(values.whole(model[2].out_proj.bias, CPU).abs().max()) == 0


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 2, 2)])
def test_the_same_on_every_mesh(mesh: Any) -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 5)))
    model[0].weight.requires_grad_(False)
    torch.manual_seed(11)
    model = partir.parallelize(model, mesh, torch.randn(8, 8))
    torch.manual_seed(11)
    expected = values_of(twin := on_meta(lambda: nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 5))), 11)
    assert all(torch.equal(p, expected.whole(q, CPU)) for p, q in zip(model.parameters(), twin.parameters()))
    assert not model[0].weight.requires_grad and model[2].weight.requires_grad
    model(torch.randn(8, 8)).sum().backward()


def test_no_rank_makes_more_than_a_shard_and_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parameter of a compiled model, on each of 8 ranks; a negative control makes it whole."""
    monkeypatch.setattr(initial_values, "CHUNK", 64)
    build = lambda: Block(words=96, hidden=48)  # noqa: E731
    program = compile_program(build(), batches(1)[0], {}, MESH, Options()).program
    model = on_meta(build)
    values = InitialValues(model, 3, set_buffers)
    largest_shard = 0
    with Largest() as seen:
        for rank in range(8):
            for slot in program.inputs:
                if slot.kind == "parameter":
                    p = model.get_parameter(slot.name)
                    assert stand_in(p, CPU, Mesh).untyped_storage().nbytes() == 4  # pyright: ignore
                    block = values.block(p, slot.layout.strip(MESH), MESH, rank, CPU)
                    largest_shard = max(largest_shard, block.nbytes)
    assert largest_shard == 144 * 48 * 4 // 8
    assert seen.bytes <= largest_shard + 64 * 8
    with Largest() as control:
        values.whole(model.qkv.weight, CPU)
    assert control.bytes == 8 * largest_shard


def test_a_tied_parameter_stays_one_and_training_works() -> None:
    model = partir.parallelize(on_meta(Block).double(), (2, 2, 2), batches(1)[0], initialize=set_buffers)
    assert model.head.weight is model.words.weight
    model(*batches(1)[0]).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_hugging_face_rotary_buffers_and_weights() -> None:
    config: Any = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=37,
        use_cache=False,
    )
    model = on_meta(lambda: LlamaForCausalLM(config))
    ids = torch.randint(37, (4, 8))
    model = partir.parallelize(model, (2, 2, 1), ids)
    eager: Any = LlamaForCausalLM(config)
    eager.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(ids).logits, eager(ids).logits, atol=1e-5, rtol=1e-5)
    assert float(model.model.layers[0].mlp.up_proj.weight.detach().std()) == pytest.approx(config.initializer_range, rel=0.1)


class NanoStyle(nn.Module):
    """Its class has `_init_weights`, as many GPTs have, and inits nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_init_weights_of_a_class_is_applied() -> None:
    model = partir.parallelize(on_meta(NanoStyle), (1, 2, 1), torch.randn(4, 4))
    assert bool((model.layer.weight == 0.5).all()) and not bool((model.layer.bias == 0.5).any())


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.mask * self.gain  # pyright: ignore


def test_what_no_init_function_sets_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(PartirError, match="Masked was built on meta, and its init functions do not set all of gain, mask: what __init__"):
        partir.parallelize(on_meta(Masked), (1, 2, 1))

    def initialize(model: Any) -> None:
        model.gain.fill_(1)
        model.mask.copy_(torch.tril(torch.ones(4, 4)))

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = partir.parallelize(on_meta(Masked), (1, 2, 1), torch.randn(4, 4), initialize=initialize)
    assert torch.equal(model.mask, torch.tril(torch.ones(4, 4)))


def test_bad_models_on_meta() -> None:
    mixed = on_meta(lambda: nn.Linear(4, 4))
    mixed.bias = nn.Parameter(torch.ones(4))
    with pytest.raises(PartirError, match=r"1 parameters are on meta and 1 have values \(bias\)"):
        partir.parallelize(mixed, (1, 1, 1))
    with pytest.raises(PartirError, match="Linear has values, so initialize= is not for it"):
        partir.parallelize(nn.Linear(4, 4), (1, 1, 1), initialize=lambda model: None)

    class Reads(nn.Linear):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            if not self.weight.is_meta and float(self.weight.detach().max()) > 0:
                nn.init.zeros_(self.weight)

    with pytest.raises(PartirError, match=r"Reads.reset_parameters reads values of tensors"):
        partir.parallelize(on_meta(lambda: Reads(4, 4)), (1, 1, 1))

    class Own(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.normal_(self.weight, generator=torch.Generator())
            nn.init.zeros_(self.bias)

    with pytest.raises(PartirError, match="draws from a generator of its own"):
        partir.parallelize(on_meta(lambda: Own(4, 4)), (1, 1, 1))


def test_a_model_on_meta_has_nothing_to_save(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match="built on meta and has no values yet: give parallelize the mesh and example_inputs"):
        partir.save_checkpoint(on_meta(Block), None, tmp_path / "step_0")
    assert made(0).words.weight.is_floating_point()
