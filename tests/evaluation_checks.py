"""What each gloo rank checks of evaluation: generation in inference mode comes first, training after it."""

from __future__ import annotations

import copy
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

import partir
from partir.errors import PartirError
from partir.module import parallelized
from tests.distributed_checks import everyone_has, relative
from tests.generation import greedy, model_to_generate, prompt
from tests.module_checks import error_of

MESHES = {4: (2, 2, 1), 8: (2, 2, 2)}


def check_generation_in_inference_mode_and_training_after_it(rank: int) -> None:
    """Parameters are laid out in the first call, in inference mode; they are trained in the next."""
    twin = model_to_generate()
    model = partir.parallelize(copy.deepcopy(twin), MESHES[dist.get_world_size()])
    with torch.inference_mode(), partir.length_buckets(model, sizes=[12]):
        found, logits = greedy(model, prompt(), 6)
        expected, own = greedy(twin, prompt(), 6)
        assert torch.equal(found, expected) and everyone_has(found)
        assert relative(logits, own) < 1e-12
        message = error_of(PartirError, lambda: model(prompt().repeat(1, 3)))
        assert "longer than sizes=(12,)" in message
    assert len(parallelized(model).programs()) == 1
    ids = prompt()
    loss, expected_loss = model(ids, labels=ids), twin(ids, labels=ids)
    assert relative(loss.detach(), expected_loss.detach()) < 1e-12
    loss.backward()
    expected_loss.backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert not p.is_inference()
        assert relative(cast(Tensor, partir.full_gradient(p)), cast(Tensor, q.grad), 1e-8) < 1e-10, name
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
