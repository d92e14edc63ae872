"""Programs compiled once, in the server from which the ranks are forked: 8 ranks on two cores need not do it 8 times.

That every rank compiles the same is what the checks show that do not ask for this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Hashable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partir.errors import PartirError
from partir.mesh import Mesh
from partir.options import Options
from partir.passes import pipeline
from partir.precision import autocast_text
from tests.gpt_on_tokens import make_gpt, make_odd_gpt, odd_tokens, tokens
from tests.kinds import Kinds, few_ids

compile_program = pipeline.compile_program
_known: dict[Hashable, Any] = {}


def _key(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh, options: Options) -> Hashable:
    """Return all that a program depends on."""
    held = [(name, t.shape, t.dtype, t.requires_grad) for name, t in [*model.named_parameters(), *model.named_buffers()]]
    given = tree_map(lambda one: (one.shape, one.dtype, one.requires_grad) if isinstance(one, Tensor) else one, (args, kwargs))
    return repr((type(model).__qualname__, model.training, held, given, mesh, options, torch.is_grad_enabled(), autocast_text()))


def _ahead(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: tuple[int, ...], **options: Any) -> None:
    mesh, chosen = Mesh.parse(sizes), Options(**options)
    try:
        found = compile_program(model, args, kwargs, mesh, chosen)
    except PartirError as error:
        found = error
    _known[_key(model, args, kwargs, mesh, chosen)] = found


@contextlib.contextmanager
def compiled_ahead() -> Generator[None]:
    """Take the programs that were compiled ahead; fails where none was for any of the compilations inside."""
    compile_ahead()
    taken: list[Any] = []

    def recall(*call: Any) -> Any:
        *given, parameter_layouts, input_layouts = call
        found = None if parameter_layouts or input_layouts else _known.get(_key(*given))
        if found is None:
            return compile_program(*call)
        taken.append(found)
        if isinstance(found, Exception):
            raise found
        return found

    with mock.patch.object(pipeline, "compile_program", recall):
        yield
    assert taken, "no program was compiled ahead for what was compiled here"


GPT_MESHES = ((8, 1, 1), (1, 8, 1), (1, 1, 8), (4, 2, 1))
KINDS: tuple[tuple[tuple[int, ...], str], ...] = (((2, 2, 2), "diagonal"), ((2, 4, 1), "balanced"), ((2, 2, 1, 2), "balanced"))
FLOAT32: dict[str, Any] = {"vectors": "diagonal", "compute_dtype": torch.float32, "reduce_dtype": torch.float64}
MODELS = ("bert", "llama", "hf_gpt2")


def compile_ahead() -> None:
    """Compile what checks ask for, unless it is there."""
    if _known:
        return
    ids = tokens()
    for sizes in (*GPT_MESHES, (2, 2, 2), (2, 2, 2, 1)):
        _ahead(make_gpt(), (ids,), {"labels": ids}, sizes)
    _ahead(make_odd_gpt(), (odd_tokens(),), {}, (2, 4, 1), outputs="sharded")
    for sizes, vectors in KINDS:
        _ahead(Kinds().double(), (few_ids(),), {}, sizes, vectors=vectors)
    _ahead(Kinds().double(), (few_ids()[:4],), {}, (2, 2, 2), **FLOAT32)
    with torch.autocast("cpu", torch.float16):
        _ahead(Kinds(), (few_ids(),), {}, (2, 2, 2))
    from tests.test_equivalence import reference

    for name in MODELS:
        model, inputs, _ = reference(name)
        _ahead(model, (), inputs, (2, 2, 2))
