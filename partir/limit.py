"""How far a plan is from the least that any algorithm must move.

Source: Al Daas, Ballard, Grigori, Kumar, Rouse, "Tight Memory-Independent Parallel Matrix Multiplication Communication Lower Bounds",
SPAA 2022, arXiv 2205.13407. For sizes sorted m >= n >= k, one copy of the inputs at the start and of the output at the end, some rank
receives at least ``D - (mn + mk + nk)/P`` elements.

Cautions. The bound is for one product. A step that keeps what it gathered for the backward may cost less than its three products
apart, and one that gathers again more; what is not a product (norms, vectors, losses) has no bound here and is not counted. An input that
every rank is given whole is not one copy at the start: a product that reads it may be below its bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.fx import Node

from partir.graph import operands, tensors_of
from partir.mesh import Mesh
from partir.records import Collective
from partir.rules import Binding

if TYPE_CHECKING:
    from partir.passes.pipeline import Compiled


BELOW = 0.999  # ratios are quotients of whole bytes


def lower_bound(m: int, n: int, k: int, ranks: int) -> float:
    """Return the elements that some rank must receive in ``C[m,n] = sum_k A[m,k] B[k,n]``.

    >>> round(lower_bound(8192, 16384, 4096, 64))
    8912896
    """
    m, n, k = sorted((m, n, k), reverse=True)
    if ranks <= m / n:
        accessed = (m * n + m * k) / ranks + n * k
    elif ranks <= m * n / k**2:
        accessed = 2 * math.sqrt(m * n * k**2 / ranks) + m * n / ranks
    else:
        accessed = 3 * (m * n * k / ranks) ** (2 / 3)
    return accessed - (m * n + m * k + n * k) / ranks


def law_elements(m: int, n: int, k: int, mesh: tuple[int, int, int]) -> float:
    """Return the elements that one rank receives by the 3-D law: m on x, n on y, k on z.

    >>> round(law_elements(8192, 16384, 4096, (4, 8, 2)) / lower_bound(8192, 16384, 4096, 64), 9)
    1.0
    """
    x, y, z = mesh
    return ((y - 1) * m * k + (x - 1) * k * n + (z - 1) * m * n) / (x * y * z)


def best_mesh(m: int, n: int, k: int, ranks: int) -> tuple[int, int, int]:
    """Return the mesh (x, y, z) of a number of ranks on which the law moves least for one product.

    >>> best_mesh(8192, 16384, 4096, 64)
    (4, 8, 2)
    """
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    meshes = [(x, y, ranks // (x * y)) for x in divisors for y in divisors if ranks % (x * y) == 0]
    return min(meshes, key=lambda mesh: law_elements(m, n, k, mesh))


@dataclass(frozen=True)
class Product:
    """One matrix product of the forward, with the two products of its backward.

    Args:
        name: of the value that it computes.
        m, n, k: global sizes, batch dims counted in m.
        received: bytes that one rank receives for it in one step.
        bound: bytes that some rank must receive in each of the products, all together.
        best: the mesh on which the law moves least for one of them.
        at_best: bytes of the law on that mesh, all products together.
        products: 3 in training, fewer where an operand has no gradient, 1 in evaluation.
    """

    name: str
    m: int
    n: int
    k: int
    received: int
    bound: float
    best: tuple[int, int, int]
    at_best: float
    products: int

    @property
    def ratio(self) -> float:
        """Received over the bound; 1 is optimal, below 1 what was gathered served twice, or an input was on every rank from the start."""
        return self.received / self.bound if self.bound else math.nan


@dataclass(frozen=True)
class Limit:
    """A plan's distance from the limit.

    Args:
        ranks: of the mesh.
        products: each matrix product.
        others: bytes received for what is no product.
    """

    ranks: int
    products: tuple[Product, ...]
    others: int

    @property
    def ratio(self) -> float:
        """Bytes of all products over the sum of their bounds; nan where nothing has to move."""
        bound = sum(product.bound for product in self.products)
        return sum(product.received for product in self.products) / bound if bound else math.nan

    def __str__(self) -> str:
        rows = [("product", "m", "n", "k", "received", "/ bound", "best mesh", "its law / bound")]
        rows += [_row(product) for product in self._folded()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
        tail = [
            f"all products: {self._distance()}; {self.others:,} bytes for what is no product",
            "the bound is for one product alone: see partir.limit for what it does not cover",
        ]
        if any(product.ratio < BELOW for product in self.products):
            tail.append("below 1: what was gathered serves several products, or an input is on every rank from the start")
        return "\n".join([*lines, *tail]) + "\n"

    def _distance(self) -> str:
        if math.isnan(self.ratio):
            return "no algorithm has to move anything" if self.products else "there are none"
        return f"{self.ratio:.3f} of the bound"

    def _folded(self) -> list[Product]:
        """Leave out products that differ from an earlier one in nothing but the name."""
        first: dict[tuple[object, ...], Product] = {}
        for one in self.products:
            first.setdefault((one.m, one.n, one.k, one.received, one.products), one)
        return list(first.values())


def _row(one: Product) -> tuple[str, ...]:
    at_best = f"{one.at_best / one.bound:.3f}" if one.bound else "-"
    ratio = f"{one.ratio:.3f}" if one.bound else "-"
    sizes = (f"{one.m:,}", f"{one.n:,}", f"{one.k:,}", f"{one.received:,}")
    return one.name, *sizes, ratio, str(one.best), at_best


def limit_of(compiled: Compiled, collectives: Sequence[Collective]) -> Limit:
    """Return how far a compiled program is from the lower bound."""
    mesh = compiled.program.mesh
    training = compiled.program.backward is not None
    received = _received_by_origin(compiled, collectives)
    found = [
        _product(node, mesh, training, received.pop(node.name, 0))
        for node in compiled.annotated.graph.nodes
        if node.meta.get("state") and node.meta["binding"].product is not None and not node.meta["binding"].index
    ]
    return Limit(mesh.size, tuple(found), sum(received.values()))


def _received_by_origin(compiled: Compiled, collectives: Sequence[Collective]) -> dict[str, int]:
    origins: dict[tuple[str, str], str] = {}
    for stage, module in (("forward", compiled.program.forward), ("backward", compiled.program.backward)):
        for node in module.graph.nodes if module is not None else ():
            origins[(stage, node.name)] = str(node.meta.get("origin"))
    found: dict[str, int] = {}
    for one in collectives:
        origin = origins[(one.stage, one.node)] if not one.op.endswith("_bucket") else ""
        found[origin] = found.get(origin, 0) + one.bytes
    return found


def _product(node: Node, mesh: Mesh, training: bool, received: int) -> Product:
    binding: Binding = node.meta["binding"]
    product = binding.product
    assert product is not None
    m, n, k = (math.prod(binding.sizes[name] for name in names) for names in (product.m, product.n, product.k))
    reads = operands(node)
    grads = [bool(reads[place].meta.get("grad")) for place in (product.a, product.b)]
    number = 1 + (sum(grads) if training else 0)
    itemsize = tensors_of(node)[0].dtype.itemsize
    best = best_mesh(m, n, k, mesh.size)
    bound = lower_bound(m, n, k, mesh.size) * itemsize * number
    return Product(node.name, m, n, k, received, bound, best, law_elements(m, n, k, best) * itemsize * number, number)
