"""Generation by repeated calls: the tokens of one device, a few compilations, errors where padding is not exact."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import partir
from partir.errors import PaddingError, PartirError
from partir.module import parallelized
from tests.generation import greedy, model_to_generate, prompt

NEW = 32


def num_programs(model: nn.Module) -> int:
    return len(parallelized(model).programs())


@pytest.mark.parametrize("mesh", [(2, 2, 1), *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ((2, 1, 2, 1), (1, 2, 2)))])
def test_32_tokens_with_three_compilations(mesh: tuple[int, ...]) -> None:
    """Equal tokens, and logits at every step."""
    twin = model_to_generate()
    expected, logits = greedy(twin, prompt(), NEW)
    model = partir.parallelize(copy.deepcopy(twin), mesh)
    with partir.length_buckets(model):
        found, own = greedy(model, prompt(), NEW)
    assert torch.equal(found, expected)
    assert float((own - logits).abs().max()) < 1e-12
    assert num_programs(model) <= 3
    assert {program.backward for program in parallelized(model).programs()} == {None}


def test_sizes_of_ones_own_in_inference_mode_and_training_after_it() -> None:
    twin = model_to_generate()
    model = partir.parallelize(copy.deepcopy(twin), (2, 2, 1))
    ids = prompt()
    with torch.inference_mode(), partir.length_buckets(model, sizes=[8, 12]):
        for length in (1, 4, 8, 11):  # shorter ones than the proof's are traced themselves
            longer = ids.repeat(1, 3)[:, :length]
            assert float((model(longer) - twin(longer)).abs().max()) < 1e-12
        assert num_programs(model) == 2
        with pytest.raises(PartirError, match=r"a call of length 15 is longer than sizes=\(8, 12\)"):
            model(ids.repeat(1, 3))
    longer = ids.repeat(1, 2)
    model(longer, labels=longer).backward()
    twin(longer, labels=longer).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert float((cast(Tensor, p.grad) - cast(Tensor, q.grad)).abs().max()) < 1e-12


class Bidirectional(nn.Module):
    """A transformer layer in which every position reads every other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_what_is_not_exact_is_an_error_and_the_model_stays_usable() -> None:
    twin = Bidirectional().double().eval()
    model = partir.parallelize(copy.deepcopy(twin), (2, 1, 1))
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    message = r"Bidirectional cannot be padded to 16: .*\(layer.self_attn\): scaled_dot_product"
    with torch.no_grad():
        with partir.length_buckets(model), pytest.raises(PaddingError, match=message):
            model(x)
        assert float((model(x) - twin(x)).abs().max()) < 1e-12


def test_bad_input() -> None:
    model = partir.parallelize(model_to_generate(), (2, 1, 1))
    with partir.length_buckets(model), pytest.raises(PartirError, match="gradients are recorded"):
        model(prompt())
    with pytest.raises(PartirError, match="each is a number of positions, 4 or more"), partir.length_buckets(model, sizes=[2, 16]):
        pass
    with pytest.raises(PartirError, match="is not parallelized"), partir.length_buckets(model_to_generate()):
        pass
    blocks = partir.parallelize(model_to_generate(), (2, 1, 1), outputs="sharded")
    with pytest.raises(PartirError, match='outputs="sharded" leaves blocks'), partir.length_buckets(blocks):
        pass
    with torch.no_grad(), partir.length_buckets(model, dim=2), pytest.raises(PartirError, match="no input has a dim 2"):
        model(prompt())


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_generate_of_hugging_face(kind: str) -> None:
    """Greedy, a prompt padded on the left among the batch; without a cache, whose lengths would grow too."""
    twin: Any = hugging_face(kind)
    model = partir.parallelize(copy.deepcopy(twin), (2, 2, 1))
    ids = torch.randint(1, 46, (2, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    asked = {"max_new_tokens": NEW, "do_sample": False, "use_cache": False, "logits_to_keep": 0, "pad_token_id": 0}
    with partir.length_buckets(model, mask="attention_mask"):
        assert torch.equal(model.generate(ids, attention_mask=mask, **asked), twin.generate(ids, attention_mask=mask, **asked))
        assert num_programs(model) == 3
        short = {**asked, "max_new_tokens": 3}
        assert torch.equal(model.generate(ids, **short), twin.generate(ids, **short))
        assert num_programs(model) == 3
        with pytest.raises(PaddingError, match="slice: its result at a position may depend on later positions"):
            model.generate(ids, **{**short, "logits_to_keep": 1})


def hugging_face(kind: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    same: Any = {"vocab_size": 48, "bos_token_id": 0, "eos_token_id": 47}
    made: Any = {
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**same, n_positions=64, n_embd=16, n_layer=1, n_head=2)),
        "llama": lambda: LlamaForCausalLM(
            LlamaConfig(**same, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
        ),
    }[kind]()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made.double().eval()
