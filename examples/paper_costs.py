"""The paper's runs as formulas: 1-D (Megatron), 2-D (Optimus) and 3-D on the Longhorn profile, and the fit of two constants.

Seconds of a step of one sequence = layers * (compute + memory + messages) / batch. With T = batch * 512 tokens, hidden h, MLP 4h, P GPUs,
float32, per layer, forward and backward:

    compute   24 T h^2 + 4 T 512 h FLOP a pass (Narayanan et al., arXiv 2104.04473, section 3.1, with heads * head size = h) over P, at the
              datasheet's rate. A forward is one pass, a backward two, and one more where activations are recomputed: 1-D and 2-D
              do that (arXiv 2104.05343), the 3-D algorithm as published does not.
    memory    passes over [T, h] of elementwise ops, read or written, counted for eager fp32: 20 outside the split products (2 LayerNorms
              of 2, 2 of bias 2, dropout 3, residual 3), whole on every rank in 1-D; 22 inside them (QKV bias 6, MLP bias and GELU 16).
    messages  elements that one rank receives in one pass:
      1-D     2 all-reduces of T h: 4 (P-1)/P T h           (arXiv 1909.08053; activations replicated); forward, backward, recomputed
      2-D     SUMMA on q x q: (q-1)/q (7 T h + 12 h^2) / q   (arXiv 2104.05343, table 1, whose log2 q is that of a tree; a pipelined
              broadcast has (q-1)/q instead), forward, recomputed, and twice in the backward
      3-D     (p-1)/P (16 T h + 12 h^2) on p x p x p         (arXiv 2105.14450, algorithms 1 and 2; shards saved and gathered again, so
              that the backward's two products cost a forward each)

A rank receives at `efficiency` times its share of the node's EDR port, 12.5 GB/s over 4 ranks, in whatever group: flat bandwidth, as
the paper counts. Only the ring of 1-D enters a node once for its 4 ranks; it is 4^gain as fast, where 1 would be the whole port.
Latencies are the profile's, one a step. Layers are not stated in the paper and cannot be fitted, for times fix only their ratio to the
rates. The memory of a V100 bounds them (`layers_that_fit`), and 24, those of BERT-large, are taken. Heads drop out: attention's FLOPs
depend on heads * head size = h.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares  # pyright: ignore[reportMissingImports, reportMissingTypeStubs] (an extra, without types)

from partir.hardware import Hardware

TABLES = Path(__file__).with_name("paper_tables.csv")
SEQUENCE, ITEM, LAYERS = 512, 4, 24
FIRST_GUESS = (0.5, 0.5)


@dataclass(frozen=True)
class Row:
    """One run of the paper: `step_s` is printed there, seconds of a sequence."""

    scaling: str
    method: str
    gpus: int
    batch: int
    hidden: int
    forward_s: float
    backward_s: float
    step_s: float

    @property
    def summed_s(self) -> float:
        """The formula that all but one of the printed quotients obey."""
        return (self.forward_s + self.backward_s) / self.batch

    @property
    def fitted(self) -> bool:
        """Whether the constants may see this row."""
        return self.gpus < 64


@dataclass(frozen=True)
class Variant:
    """A reading of what the paper leaves open."""

    name: str
    tree: bool = False
    recompute_3d: bool = False
    placed: bool = False


VARIANTS = (
    Variant("pipelined broadcasts, flat links, 3-D keeps activations"),
    Variant("3-D recomputes as well", recompute_3d=True),
    Variant("broadcasts by trees", tree=True),
    Variant("ranks in the order of the published codes, NVLink inside a node", placed=True),
    Variant("the same, and broadcasts by trees", tree=True, placed=True),
)


@dataclass(frozen=True)
class Fit:
    """Constants fitted to the rows of 8, 16 and 36 GPUs: root mean square error of the logarithms of their times."""

    variant: Variant
    efficiency: float
    gain: float
    error: float

    def seconds(self, row: Row, hardware: Hardware) -> float:
        """Predict the step of a sequence."""
        return predict(row, hardware, self.variant, (self.efficiency, self.gain))


def read_rows(path: Path = TABLES) -> tuple[Row, ...]:
    """Read the printed tables."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return tuple(
        Row(r["scaling"], r["method"], *(int(r[k]) for k in ("gpus", "batch", "hidden")), *(float(r[k]) for k in list(r)[5:]))
        for r in csv.DictReader(lines)
    )


def received(row: Row, hardware: Hardware, variant: Variant, gain: float) -> tuple[float, int]:
    """Return the seconds that a layer's messages take at full efficiency, and the number of their steps, over all passes."""
    tokens, h, ranks = row.batch * SEQUENCE, row.hidden, row.gpus
    if row.method == "1-D":
        ring = share(hardware) * hardware.ranks_per_node**gain
        return 3 * ITEM * 4 * (ranks - 1) / ranks * tokens * h / ring, 3 * 2 * 2 * (ranks - 1)
    if row.method == "2-D":
        q = round(ranks**0.5)
        rounds = np.log2(q) if variant.tree else (q - 1) / q
        along_row, along_column = rate(1, q, hardware, variant, gain), rate(q, q, hardware, variant, gain)
        seconds = 4 * ITEM * rounds / q * (7 * tokens * h / along_row + 12 * h**2 / along_column)
        return seconds, 4 * 4 * 2 * q * (q - 1)
    p, passes = round(ranks ** (1 / 3)), 4 if variant.recompute_3d else 3
    x, y, z = (rate(stride, p, hardware, variant, gain) for stride in (1, p, p * p))
    seconds = passes * ITEM * (p - 1) / ranks * (tokens * h * (4 / y + 12 / z) + 12 * h**2 / x)
    return seconds, passes * 4 * 3 * (p - 1)


def layers_that_fit(rows: Sequence[Row], hardware: Hardware) -> int:
    """Return how many layers the least roomy run of 1-D can hold: a layer's input, whole, its weights and their gradients."""
    runs = [row for row in rows if row.method == "1-D"]
    held = [ITEM * (row.batch * SEQUENCE * row.hidden + 2 * 12 * row.hidden**2 / row.gpus) for row in runs]
    return int(hardware.memory // max(held))


def share(hardware: Hardware) -> float:
    """Return the bytes a second that each rank of a node gets of its port."""
    return hardware.links[-1].bandwidth


def rate(stride: int, size: int, hardware: Hardware, variant: Variant, gain: float) -> float:
    """Return the bandwidth of a group of `size` ranks, `stride` apart: flat, or by where its ranks are."""
    if not variant.placed:
        return share(hardware)
    node = hardware.ranks_per_node
    if stride * (size - 1) < node:
        return hardware.links[0].bandwidth
    return share(hardware) * min(size, max(1, node // stride)) ** gain


def predict(row: Row, hardware: Hardware, variant: Variant, constants: Sequence[float]) -> float:
    """Return the predicted seconds of a step of one sequence."""
    efficiency, gain = constants
    tokens, h = row.batch * SEQUENCE, row.hidden
    passes = 3 if row.method == "3-D" and not variant.recompute_3d else 4
    compute = passes * (24 * tokens * h**2 + 4 * tokens * SEQUENCE * h) / row.gpus / hardware.flops["float32"]
    whole = 1 if row.method == "1-D" else row.gpus
    memory = passes * ITEM * tokens * h * (20 / whole + 22 / row.gpus) / hardware.memory_bandwidth
    moving, steps = received(row, hardware, variant, gain)
    latency = steps * hardware.links[-1].latency
    return LAYERS * (compute + memory + moving / efficiency + latency) / row.batch


def fit(rows: Sequence[Row], hardware: Hardware, variant: Variant) -> Fit:
    """Fit the efficiency of the links and the gain of the ring to the rows that may be seen, on the logarithms of times."""
    seen = [row for row in rows if row.fitted]

    def errors(constants: Any) -> Any:
        return [np.log(predict(row, hardware, variant, constants) / row.step_s) for row in seen]

    found: Any = least_squares(errors, FIRST_GUESS, bounds=([0.01, 0.0], [1.0, 1.0]))
    return Fit(variant, *(float(value) for value in found.x), error=float(np.sqrt(np.mean(found.fun**2))))


def best_fit(rows: Sequence[Row], hardware: Hardware) -> tuple[Fit, list[Fit]]:
    """Return the variant that fits the seen rows best, and all of them."""
    fits = [fit(rows, hardware, variant) for variant in VARIANTS]
    return min(fits, key=lambda each: each.error), fits
