"""GPT compiled once for several meshes, in the server from which the ranks are forked: 8 ranks need not do it 8 times."""

from __future__ import annotations

from typing import Any

import torch

from partir.errors import PartirError
from partir.mesh import Mesh
from partir.options import Options
from partir.passes import pipeline
from tests.gpt_on_tokens import make_gpt, tokens

MESHES = ((8, 1, 1), (1, 8, 1), (1, 1, 8), (4, 2, 1))


def _compile(sizes: tuple[int, ...]) -> Any:
    ids = tokens()
    try:
        return pipeline.compile_program(make_gpt(), (ids,), {"labels": ids}, Mesh.parse(sizes), Options())
    except PartirError as error:
        return error


torch.set_num_threads(1)
COMPILED = {sizes: _compile(sizes) for sizes in MESHES}


def _compile_model(name: str) -> Any:
    from tests.test_equivalence import reference

    model, inputs, _ = reference(name)
    try:
        return pipeline.compile_program(model, (), inputs, Mesh.parse((2, 2, 2)), Options())
    except PartirError as error:
        return error


MODELS_COMPILED = {name: _compile_model(name) for name in ("bert", "llama", "hf_gpt2")}
