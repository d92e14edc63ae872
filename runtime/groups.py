"""Process groups: one for each distinct set of ranks, shared by every model of this process.

`torch.distributed` orders a group by rank. A group over `z.x` is row-major over z, then x, which may be another
order: `Group.order` says which row of a message belongs to which member.

torch.distributed owns the groups: here they are held weakly, so that `destroy_process_group` ends their threads and connections
even while a parallelized model lives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch.distributed.device_mesh import DeviceMesh

from partir.errors import RankError
from partir.layout import Layout
from partir.mesh import Mesh
from partir.runtime.torch_dtensor import backend_of, dist, hold_groups_by_name, set_timeout

PARAMETER_AXES = ("data", "y", "z", "x")
# Members of a group ask for it at the same time, so one that does not come within this has died.
MEETING = timedelta(seconds=30)


@dataclass(frozen=True)
class Group:
    """The ranks that differ only along some axes, as one of them sees them.

    Args:
        held: a weak reference to torch's group, None for a group of one.
        ranks: members, row-major over the axes in the order asked for.
        index: this rank's place among them.
        order: for each member its row in a message of the process group; empty when it is the same.
    """

    held: Callable[[], Any] | None
    ranks: tuple[int, ...]
    index: int
    order: tuple[int, ...] = ()

    @property
    def process_group(self) -> Any:
        """Torch's group.

        Raises:
            RankError: it was destroyed.
        """
        found = None if self.held is None else self.held()
        if found is None:
            raise RankError(f"the process group of ranks {list(self.ranks)} was destroyed: parallelize the model again, on every rank.")
        return found

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def by_rank(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Reorder one tensor a member into the rows of a message."""
        if not self.order:
            return list(pieces)
        rows = [pieces[0]] * len(pieces)
        for member, row in enumerate(self.order):
            rows[row] = pieces[member]
        return rows

    def by_member(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Reorder the rows of a message, `[size, ...]`, into one tensor a member."""
        return [rows[row] for row in self.order] if self.order else list(rows.unbind(0))


# One dict for each default group, so that groups go when torch.distributed is shut down and begun anew.
_made: WeakKeyDictionary[Any, WeakValueDictionary[tuple[Any, ...], Any]] = WeakKeyDictionary()


_redistribute = logging.getLogger("torch.distributed.tensor._redistribute")


def _is_no_advice_to_flatten(entry: logging.LogRecord) -> bool:
    """Drop torch's advice to flatten the parameters' DeviceMesh: that gives rows in a wrong order."""
    return "flatten mesh dimensions" not in entry.getMessage()


class Groups:
    """Groups over a mesh's axes for one rank.

    Every rank asks for the same groups in the same order: making one waits for its members.

    Args:
        mesh: the ranks, row-major over the default group.
        device: where the program runs; its backend moves the data.
        timeout: the longest that any wait may take.
    """

    def __init__(self, mesh: Mesh, device: torch.device, timeout: timedelta | None = None) -> None:
        self.mesh = mesh
        self.device = device
        self.rank = dist.get_rank()
        self.timeout = timeout or _default_timeout(device)
        self._groups: dict[tuple[str, ...], Group] = {}
        self._device_meshes: dict[tuple[str, ...], DeviceMesh] = {}
        _redistribute.addFilter(_is_no_advice_to_flatten)

    def over(self, axes: Sequence[str]) -> Group:
        """Return this rank's group over ``axes``, row-major in their order."""
        key = tuple(axes)
        if key not in self._groups:
            ranks = self.mesh.group(self.rank, key)
            ordered = sorted(ranks)
            order = () if ordered == list(ranks) else tuple(ordered.index(rank) for rank in ranks)
            made = ref(self._process_group(ranks)) if len(ranks) > 1 else None
            self._groups[key] = Group(made, ranks, ranks.index(self.rank), order)
        return self._groups[key]

    def control(self, purpose: str = "") -> Group:
        """Return the group of all ranks whose messages stay on the CPU; what another purpose sends does not come between."""
        ranks = tuple(range(self.mesh.size))
        if len(ranks) == 1:
            return Group(None, ranks, self.rank)
        return Group(ref(self._process_group(ranks, "gloo", self._time_to_meet(), purpose)), ranks, self.rank)

    def device_mesh(self, layout: Layout | None = None) -> DeviceMesh:
        """Return the DeviceMesh on which ``layout`` is plain `Shard` placements; by default the parameters' one."""
        names = _mesh_order(self.mesh, layout)
        if names not in self._device_meshes:
            self._device_meshes[names] = self._make_device_mesh(names)
        return self._device_meshes[names]

    def _time_to_meet(self) -> timedelta:
        """Return how long to wait for all ranks: where the default group could not meet, scripts may come long after one another."""
        return MEETING if "gloo" in str(dist.get_backend_config()) else self.timeout

    def hang_up(self) -> None:
        """Close this rank's connections, so that nobody waits for it; its groups are made anew when asked for.

        gloo has no abort, but a receive whose wait runs out closes the connection.
        """
        made = _made.get(dist.group.WORLD) if dist.is_initialized() else None
        left = [] if made is None else list(made.items())
        if made is not None:
            made.clear()
        for key, process_group in left:
            if self.device.type == "cpu" or key[1] == "gloo":
                _close_pairs(process_group)
        self._groups.clear()

    def _make_device_mesh(self, names: tuple[str, ...]) -> DeviceMesh:
        ranks = torch.arange(self.mesh.size, dtype=torch.int).view(self.mesh.sizes)
        ranks = ranks.permute([self.mesh.names.index(name) for name in names]).contiguous()
        members = [self._process_group(self.mesh.group(self.rank, (name,))) for name in names]
        device_mesh = DeviceMesh.from_group(members, self.device.type, ranks, mesh_dim_names=names)
        hold_groups_by_name(device_mesh)
        return device_mesh

    def _process_group(self, ranks: Sequence[int], backend: str | None = None, meeting: timedelta = MEETING, purpose: str = "") -> Any:
        made = _made.setdefault(dist.group.WORLD, WeakValueDictionary())
        key = (tuple(sorted(ranks)), backend, self.timeout, purpose)
        found = made.get(key)
        if found is None:
            limit = min(meeting, self.timeout)
            found = dist.new_group(sorted(ranks), timeout=limit, backend=backend, use_local_synchronization=True)
            set_timeout(found, self.timeout)
            made[key] = found
        return found


def _close_pairs(process_group: Any) -> None:
    nothing = torch.empty(1)
    for row in range(process_group.size()):
        if row != process_group.rank():
            try:
                process_group.recv([nothing], row, 0).wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue


def backend_name(process_group: Any, device: torch.device) -> str:
    """Return the backend ("gloo", "nccl") that moves a device's tensors in a group."""
    return str(backend_of(process_group, device).name())


def _default_timeout(device: torch.device) -> timedelta:
    """Return the timeout that the user gave to `init_process_group`."""
    options = getattr(backend_of(dist.group.WORLD, device), "options", None)
    return getattr(options, "_timeout", dist.default_pg_timeout)


def _mesh_order(mesh: Mesh, layout: Layout | None) -> tuple[str, ...]:
    """Order the mesh's axes so that each dim's axes appear major to minor, near the parameters' order."""
    left = [axis for axis in PARAMETER_AXES if axis in mesh.names]
    before: set[tuple[str, str]] = set()
    for dim in layout.dims if layout else ():
        before.update(zip(dim.all_axes, dim.all_axes[1:]))
    order: list[str] = []
    while left:
        free = [axis for axis in left if not any(minor == axis and major in left for major, minor in before)]
        order.append((free or left)[0])
        left.remove(order[-1])
    return tuple(order)
