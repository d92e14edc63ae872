"""What the runtime takes from torch.distributed that torch leaves untyped or private: cast here and nowhere else."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

# `torch.distributed` has partly unknown types throughout.
dist: Any = cast(Any, torch.distributed)


def default_store() -> Any:
    """Return the store that `init_process_group` made."""
    return dist.distributed_c10d._get_default_store()


def backend_of(process_group: Any, device: torch.device) -> Any:
    """Return what moves a device's tensors in a group."""
    return process_group._get_backend(device)


def hold_groups_by_name(device_mesh: DeviceMesh) -> None:
    """Let a DeviceMesh find its groups by name, so that they end with `destroy_process_group` and not with the last DTensor.

    torch reads what is cleared here only while torch.compile traces.
    """
    cast(Any, device_mesh)._pg_registry.clear()


def set_timeout(process_group: Any, timeout: timedelta) -> None:
    """Give a group another timeout than the one it was made with."""
    dist.distributed_c10d._set_pg_timeout(timeout, process_group)


def make_spec(shape: tuple[int, ...], dtype: torch.dtype, device_mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensorSpec:
    """Return torch's description of a contiguous tensor laid out by placements."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(device_mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))


def make_dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Wrap a block, without a check and outside autograd."""
    return cast(Any, DTensor)(local, spec, requires_grad=False)


def local_of(t: Tensor) -> Tensor:
    """Return the block of a DTensor, or a plain tensor itself."""
    return cast(Any, t)._local_tensor if isinstance(t, DTensor) else t


def spec_of(t: Tensor) -> DTensorSpec | None:
    """Return the description of a DTensor, None for a plain tensor."""
    return cast(Any, t)._spec if isinstance(t, DTensor) else None


def lay_again(t: DTensor, local: Tensor, spec: DTensorSpec) -> None:
    """Give a DTensor another block and description; it stays the same object, with its hooks and its optimizer."""
    loose = cast(Any, t)
    loose._local_tensor = local
    loose._spec = spec


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return the dict that holds a module's own parameters."""
    return cast(Any, module)._parameters
