"""Which elements of a tensor a view of it is, and whether several views are all of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Region:
    """A box of a tensor: for each dim (start, stop, step)."""

    runs: tuple[tuple[int, int, int], ...]

    def holds(self, places: Sequence[Tensor]) -> Tensor:
        """Return which elements, given by their index in each dim, lie in it."""
        inside = torch.ones_like(places[0], dtype=torch.bool)
        for place, (start, stop, step) in zip(places, self.runs):
            inside &= (place >= start) & (place < stop) & ((place - start) % step == 0)
        return inside


def region_of(view: Tensor, t: Tensor) -> Region | None:
    """Return which box of a contiguous tensor a view of it is; None where it is none."""
    if not t.is_contiguous() or t.numel() == 0:
        return None
    if view.is_contiguous() and view.numel() == t.numel() and view.storage_offset() == t.storage_offset():
        return Region(tuple((0, int(n), 1) for n in t.shape))
    left = int(view.storage_offset()) - int(t.storage_offset())
    strides = [(int(stride), int(size)) for stride, size in zip(view.stride(), view.shape)]
    runs: list[tuple[int, int, int]] = []
    for size, stride in zip(t.shape, t.stride()):
        start, left = divmod(left, stride)
        own = [(step // stride, n) for step, n in strides if n > 1 and stride <= step < stride * size and step % stride == 0]
        if len(own) > 1:
            return None
        step, count = own[0] if own else (1, 1)
        runs.append((start, start + (count - 1) * step + 1, step))
    inside = all(stop <= size for (_, stop, _), size in zip(runs, t.shape))
    covered = math.prod(len(range(*run)) for run in runs) == view.numel()
    return Region(tuple(runs)) if inside and covered else None


def cover(views: Sequence[Tensor], t: Tensor) -> bool:
    """Return whether views of a tensor's storage are together all of the tensor."""
    if t.numel() == 0 or any(_is_all(view, t) for view in views):
        return True
    regions = [region_of(view, t) for view in views]
    if all(region is not None for region in regions):
        return _fill(cast("list[Region]", regions), tuple(t.shape))
    marks = torch.zeros(t.untyped_storage().nbytes() // t.element_size(), dtype=torch.bool)
    for view in views:
        _look(marks, view).fill_(True)
    return bool(_look(marks, t).all())


def _is_all(view: Tensor, t: Tensor) -> bool:
    return view.numel() == t.numel() and view.storage_offset() == t.storage_offset() and _is_dense(view)


def _is_dense(view: Tensor) -> bool:
    """Return whether the elements of a view lie in memory one behind the other, in whatever order."""
    reach = 1
    for stride, size in sorted((int(stride), int(size)) for stride, size in zip(view.stride(), view.shape) if size > 1):
        if stride != reach:
            return False
        reach *= size
    return True


def _look(marks: Tensor, view: Tensor) -> Tensor:
    return marks.as_strided(view.shape, view.stride(), view.storage_offset())


def _fill(regions: Sequence[Region], shape: Sequence[int]) -> bool:
    """Return whether boxes fill a shape, in cells between the places where a box begins or ends."""
    cuts = [_cuts([region.runs[dim] for region in regions], size) for dim, size in enumerate(shape)]
    cells = np.zeros([len(cut) for cut in cuts], dtype=bool)
    for region in regions:
        cells[np.ix_(*(_cells(cut, run) for cut, run in zip(cuts, region.runs)))] = True
    return bool(cells.all())


def _cuts(runs: Sequence[tuple[int, int, int]], size: int) -> Any:
    found = {0}
    for start, stop, step in runs:
        found.update((start, stop) if step == 1 else (cut for place in range(start, stop, step) for cut in (place, place + 1)))
    return np.array(sorted(found - {size}))


def _cells(cuts: Any, run: tuple[int, int, int]) -> Any:
    start, stop, step = run
    if step == 1:
        return np.arange(np.searchsorted(cuts, start), np.searchsorted(cuts, stop))
    return np.searchsorted(cuts, np.arange(start, stop, step))
