"""Random numbers of one rank's block: the same on every mesh (`ByIndex`), or of each block's own generator (`ByBlock`).

Both are a function of (seed, call, site) and of where the block lies, so that a second run of an op draws the same; ranks
that hold the same block draw the same. The site is the number of the op among those of its model that draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from partir.layout import DTYPES, Layout
from partir.local_ops import PadNumbers, coordinate, global_index
from partir.mesh import current_mesh

# splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014,
# with the finaliser's constants of variant 13 (D. Stafford). As signed 64-bit numbers.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
MANTISSA_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
BITS = 53


class Numbers(Protocol):
    """Draws tensors of one block's local shape; a second draw of the same kind is the same."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the op's result."""
        ...

    def bits(self) -> Tensor:
        """Return `BITS` fair bits an element, as int64."""
        ...

    def uniform(self, dtype: torch.dtype) -> Tensor:
        """Return uniform numbers in [0, 1)."""
        ...

    def normal(self, dtype: torch.dtype) -> Tensor:
        """Return standard normal numbers."""
        ...

    def chosen(self, probability: float) -> Tensor:
        """Return a bool tensor, each element True with the same probability."""
        ...


@dataclass(frozen=True)
class _Drawn:
    """What is drawn.

    Args:
        seed: int64 `[2]`: (seed, call).
        site: number of the op; sites are independent.
        layout: of the result; pending sums and types change nothing.
        device: of the result.
    """

    seed: Tensor
    site: int
    layout: Layout
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the op's result."""
        return DTYPES[self.layout.dtype]


@dataclass(frozen=True)
class ByIndex(_Drawn):
    """Numbers that are a function of (seed, call, site, global element index).

    Args:
        pads: of the dims, as `local_ops.global_index` takes them: a copy in a pad draws what its original draws.
    """

    pads: PadNumbers = ()

    def bits(self, stream: int = 0) -> Tensor:
        """Return the leading bits of a splitmix64 sequence, one for each (seed, call, site, stream)."""
        key = _key(self.seed, 2 * self.site + stream)
        return _shift(_mix(key + (self._index() + 1) * GOLDEN), 64 - BITS)

    def _index(self) -> Tensor:
        return global_index(self.layout, self.device, self.pads)

    def uniform(self, dtype: torch.dtype) -> Tensor:
        """Return uniform numbers in [0, 1); a narrower dtype gets the leading bits of the same number."""
        kept = MANTISSA_BITS[_float(dtype)]
        return (self.bits() >> (BITS - kept)).to(dtype) * 2.0**-kept

    def normal(self, dtype: torch.dtype) -> Tensor:
        """Return standard normal numbers, by Box and Muller's method in float64."""
        radius = (self.bits() + 1).double() * 2.0**-BITS
        angle = self.bits(stream=1).double() * 2.0**-BITS
        return (torch.sqrt(-2 * torch.log(radius)) * torch.cos(2 * math.pi * angle)).to(_float(dtype))

    def chosen(self, probability: float) -> Tensor:
        """Return where uniform < probability, the same in every dtype."""
        return self.bits() < math.ceil(_probability(probability) * 2**BITS)


@dataclass(frozen=True)
class AtIndex(ByIndex):
    """Numbers of some elements only.

    Args:
        index: int64 `[n]`, the global indices of the elements.
    """

    index: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def _index(self) -> Tensor:
        return self.index


@dataclass(frozen=True)
class ByBlock(_Drawn):
    """Numbers of torch's own generator, seeded by (seed, call, site) and by which of its blocks a rank holds.

    Ranks that hold different blocks have different seeds, always; those that hold the same block have the same.

    The seed is on the CPU, so that nothing waits for a device.
    """

    def bits(self) -> Tensor:
        """Return `BITS` fair bits an element, as int64."""
        return self._generate("bits", torch.int64)

    def uniform(self, dtype: torch.dtype) -> Tensor:
        """Return uniform numbers in [0, 1)."""
        return self._generate("uniform", _float(dtype))

    def normal(self, dtype: torch.dtype) -> Tensor:
        """Return standard normal numbers."""
        return self._generate("normal", _float(dtype))

    def chosen(self, probability: float) -> Tensor:
        """Return a bool tensor, each element True with the same probability."""
        return self._generate("chosen", torch.bool, _probability(probability))

    def _generate(self, kind: str, dtype: torch.dtype, probability: float = 0.0) -> Tensor:
        # The place only flips low bits of the key: a CPU generator is seeded by the low 32, and no two places may share them.
        place = coordinate(self.layout.split_axes, self.seed.device)
        shape = self.layout.local_shape(current_mesh())
        return cast(Any, generate)(_key(self.seed, self.site) ^ place, kind, shape, dtype, self.device, probability)


@torch.library.custom_op("partir_local::generate", mutates_args=())
def generate(key: Tensor, kind: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, probability: float) -> Tensor:
    """Draw from a generator that is seeded with `key`: a function of its arguments, whatever was drawn before.

    Args:
        key: int64 `[]`.
        kind: "bits", "uniform", "normal" or "chosen".
        probability: of True, for "chosen".
    """
    generator = torch.Generator(device).manual_seed(int(key))
    made = torch.empty(shape, dtype=dtype, device=device)
    if kind == "bits":
        return made.random_(2**BITS, generator=generator)
    if kind == "chosen":
        return made.bernoulli_(probability, generator=generator)
    return made.normal_(generator=generator) if kind == "normal" else made.uniform_(generator=generator)


def _generate_fake(
    key: Tensor, kind: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, probability: float
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


cast(Any, generate).register_fake(_generate_fake)


def numbers_of(rng: str, seed: Tensor, site: int, layout: Layout, device: torch.device, pads: PadNumbers = ()) -> Numbers:
    """Return the numbers of a draw: by block where `rng` is "fast", by index where it is "exact".

    A padded value is drawn by index in any case: its pads must stay copies, or a maximum would see them.
    """
    return ByBlock(seed, site, layout, device) if rng == "fast" and not pads else ByIndex(seed, site, layout, device, pads)


def seed_tensor(seed: int, call: int) -> Tensor:
    """Return what a program takes as its seed: int64 `[2]`, on the CPU."""
    return torch.tensor([as_int64(seed), call], dtype=torch.int64)


def as_int64(seed: int) -> int:
    """Fold an unsigned 64-bit seed into the signed numbers that a tensor holds."""
    return (seed + 2**63) % 2**64 - 2**63


def _key(seed: Tensor, number: int) -> Tensor:
    """Return 64 scrambled bits for (seed, call, number)."""
    key = _mix(seed.select(0, 0) + GOLDEN)
    key = _mix((key ^ seed.select(0, 1)) + GOLDEN)
    return _mix((key ^ number) + GOLDEN)


def _shift(bits: Tensor, places: int) -> Tensor:
    """Shift right, filling with zeros: torch's shift fills with the sign."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """Scramble 64 bits, one to one."""
    bits = (bits ^ _shift(bits, 30)) * MULTIPLIERS[0]
    bits = (bits ^ _shift(bits, 27)) * MULTIPLIERS[1]
    return bits ^ _shift(bits, 31)


def _float(dtype: torch.dtype) -> torch.dtype:
    if dtype not in MANTISSA_BITS:
        raise ValueError(f"random numbers of a fraction: dtype is one of {', '.join(map(str, MANTISSA_BITS))}, got {dtype}.")
    return dtype


def _probability(probability: float) -> float:
    if not 0 <= probability <= 1:
        raise ValueError(f"a probability is between 0 and 1, got {probability}.")
    return probability
