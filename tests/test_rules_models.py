"""Every op of the models that partir is for has a rule that binds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from examples.models.bert import BERT, BERTConfig
from examples.models.gpt import GPT, GPTConfig
from examples.models.llama import Llama, LlamaConfig
from partir import rules

LEFT_TO_DECOMPOSITION = {"aten.native_dropout.default",
    "aten.cross_entropy_loss.default",
    "aten._assert_tensor_metadata.default",
}


class HuggingFaceGPT2(nn.Module):
    """GPT2LMHeadModel that returns plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.GPT2Config(
            vocab_size=96, n_embd=32, n_layer=1, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0
        )
        self.model = transformers.GPT2LMHeadModel(config)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        found = self.model(input_ids=ids, labels=labels, use_cache=False)
        return found.loss, found.logits


MODELS = {
    "gpt": lambda: GPT(GPTConfig(num_layers=1, hidden=32, num_heads=4, dropout=0.1)),
    "bert": lambda: BERT(BERTConfig(num_layers=1, hidden=32, num_heads=4, dropout=0.1)),
    "llama": lambda: Llama(LlamaConfig(num_layers=1, hidden=32, num_heads=4, num_kv_heads=2, mlp_hidden=64)),
    "hugging face gpt2": HuggingFaceGPT2,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("decomposed", [False, True], ids=["exported", "decomposed"])
@pytest.mark.parametrize("name", MODELS)
def test_every_op_binds(name: str, decomposed: bool) -> None:
    torch.set_num_threads(1)
    ids = torch.randint(0, 96, (4, 16))
    model = MODELS[name]()
    program = torch.export.export(model, (ids,), {"labels": ids.clone()}, strict=False)
    if decomposed:
        program = program.run_decompositions()
    bound = 0
    for node in program.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if str(node.target) in LEFT_TO_DECOMPOSITION:
            continue
        rule = rules.find(node.target)
        assert rule is not None, f"{node.target} has no rule"
        args, kwargs = (torch.fx.map_arg(part, lambda n: n.meta["val"]) for part in (node.args, node.kwargs))
        rule.bind(args, kwargs, node.meta["val"])
        bound += 1
    assert bound > 20
