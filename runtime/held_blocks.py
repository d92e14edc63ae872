"""What this process holds of a model's tensors and of an optimizer's state, as blocks of the original tensors."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from partir.errors import CheckpointError
from partir.layout import Layout
from partir.mesh import Mesh
from partir.pieces import Block, Piece, pieces, split_pieces
from partir.runtime.initial_blocks import awaits_values
from partir.runtime.torch_dtensor import dist, local_of, make_dtensor, make_spec, spec_of


def held_block(t: Tensor, like: Tensor | None = None) -> Block:
    """Return the block of a tensor that this process holds: of a plain tensor all of it.

    Args:
        t: a parameter, a buffer, or with `like` an optimizer's state.
        like: the parameter whose layout `t` has.
    """
    if t.is_meta or awaits_values(t):
        raise CheckpointError(
            "the model was built on meta and has no values yet: give parallelize the mesh and example_inputs=, so that it compiles first."
        )
    if not isinstance(t, DTensor):
        return Block.whole(t.detach())
    layout, local = _layout_of(t if like is None else like), local_of(t).detach()
    if layout is None:
        return Block.whole(local)
    return Block.of(local, layout, mesh_of(t.device_mesh), dist.get_rank())


def holders(t: Tensor) -> list[tuple[int, Piece]]:
    """Return the pieces of a tensor, each once, with the lowest rank that holds it."""
    layout = _layout_of(t)
    if not isinstance(t, DTensor) or layout is None:
        return [(0, piece) for piece in Block.whole(torch.empty(t.shape, dtype=t.dtype, device="meta")).pieces]
    found: dict[tuple[int, ...], tuple[int, Piece]] = {}
    mesh = mesh_of(t.device_mesh)
    for rank in range(mesh.size):
        for piece in split_pieces(pieces(layout, mesh, rank), t.element_size()):
            found.setdefault(piece.starts, (rank, piece))
    return list(found.values())


def empty_state(parameter: Tensor, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Block]:
    """Return room for an optimizer's state of a parameter, and the block of it to fill.

    What has the parameter's shape is laid out as it is; torch's optimizers count steps in a plain tensor.
    """
    if key == "step" or shape != tuple(parameter.shape):
        made = torch.empty(shape, dtype=dtype)
        return made, Block.whole(made)
    made = torch.empty_like(local_of(parameter), dtype=dtype, requires_grad=False)
    if isinstance(parameter, DTensor):
        spec = cast(Any, spec_of(parameter))
        made = make_dtensor(made, _with_dtype(spec, dtype))
    return made, held_block(made, like=parameter)


def check_elementwise(name: str, key: str, value: Tensor, parameter: Tensor) -> None:
    """Refuse state of a distributed parameter that has another shape: nothing says where its blocks lie.

    Raises:
        CheckpointError: it has.
    """
    if isinstance(value, DTensor) and value.shape != parameter.shape:
        raise CheckpointError(
            f"the optimizer's {key!r} of {name} has shape {list(value.shape)}, the parameter {list(parameter.shape)}: "
            "only state of a parameter's own shape, and plain tensors, can be saved from a mesh."
        )


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """Return the mesh of distributed parameters."""
    return Mesh.parse(dict(zip(cast("tuple[str, ...]", device_mesh.mesh_dim_names), device_mesh.shape)))


def _layout_of(parameter: Tensor) -> Layout | None:
    return cast("Layout | None", getattr(parameter, "partir_layout", None))


def _with_dtype(spec: Any, dtype: torch.dtype) -> Any:
    return make_spec(tuple(spec.tensor_meta.shape), dtype, spec.mesh, spec.placements)
