"""Prove of a traced module that a prefix of its inputs decides that prefix of its outputs, whatever follows, at any length.

    Given:  the graphs of one module at length N and at a prime length p
    Holds:  f(x)[:L] == f(x[:L]) for every value of the graph, along each dim that grows with the length

A dim grows where its size at p has the factor p. Every call must commute with cutting its growing dims. One does

- if its rule says that these dims may be split and nothing moves: what holds for blocks holds for a prefix;
- if it depends on no input: it is computed at both lengths, cut and compared;
- if position i reads no position after i: cumulative sums, causal attention, attention whose mask is closed above the diagonal,
  softmax of what is -inf there, and its product with the values;
- if it takes the first positions of a table.

Both graphs must have the same calls with the same numbers, sizes apart. Finite numbers are assumed: 0 * inf above the diagonal is no 0.

Requires: graphs of `pipeline.factorise`; p divides no size that does not grow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from partir.errors import PaddingError, source_line
from partir.graph import is_getitem, operands, outputs_of, results_of
from partir.passes.above_diagonal import above_of, closed
from partir.passes.pair_calls import is_first, name_of, named, pair_calls
from partir.subdims import SubDim

MOST = 2**26  # elements of what is computed to be compared
Subs = tuple[tuple[SubDim, ...], ...]


def prove_prefix(
    long: GraphModule, short: GraphModule, length: int, prime: int, known: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
) -> tuple[tuple[int, ...], ...]:
    """Return the dims of each output that grow with the length, or say which call stands in the way.

    Args:
        long, short: the factorised graphs at `length` and at `prime`.
        known: at both lengths, the values of placeholders that are no inputs, by name: buffers and constants.

    Raises:
        PaddingError: names the first call, or constant, for which it does not hold.
    """
    proof = Proof(pair_calls(long, short), length, prime, known)
    for node in short.graph.nodes:
        if node.op == "call_function":
            proof.judge(node)
    return tuple(proof.alone(cast(Node, value)) for value in outputs_of(short))


class Proof:
    """The short graph, call by call.

    Args:
        twin: the node of the long graph for each of the short one.
        length, prime, known: as for `prove_prefix`.
    """

    def __init__(
        self, twin: Mapping[Node, Node], length: int, prime: int, known: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    ) -> None:
        self.twin, self.length, self.prime = twin, length, prime
        self.values: dict[Node, tuple[Any, Any]] = {}  # of what depends on no input, at both lengths
        self.above: dict[Node, Any] = {}  # what every element above the diagonal is, None where that is not one number
        for node in (node for node in twin if node.op == "placeholder"):
            self.above[node] = None
            if node.name in known[1]:
                long, short = self.values[node] = (known[0][twin[node].name], known[1][node.name])
                self._check_sizes(node)
                self._check_values(node, [long], [short], "the values of this constant of forward change with the length")
                self.above[node] = closed((long, short), self.diagonal(node))

    def judge(self, node: Node) -> None:
        """Check one call whose operands are checked.

        Raises:
            PaddingError: it does not commute with cutting.
        """
        self._check_sizes(node)
        if is_getitem(node):
            self._pick(node)
            return
        if node.meta["binding"].random:
            self.fail(node, "draws random numbers, and another length numbers their elements otherwise")
        if all(read in self.values for read in operands(node)) and self._evaluate(node):
            return
        growing = {name for name, subs in node.meta["factors"].items() if any(map(self.grows, subs))}
        if growing & node.meta["broken"] or not growing <= node.meta["binding"].free:
            special = SPECIAL.get(name_of(node))
            if special is None or not special(self, node, growing - node.meta["binding"].free):
                self.fail(node, "its result at a position may depend on later positions, or on how many there are")
        self.above.setdefault(node, above_of(node, self.above, self.diagonal))

    def fail(self, node: Node, why: str) -> NoReturn:
        """Refuse a call, or a constant where it is first read."""
        read = next(iter(node.users), node) if node.op == "placeholder" else node
        raise PaddingError(f"{source_line(read.meta)}: {name_of(node)}: {why}")

    def grows(self, sub: SubDim) -> bool:
        """Return whether a sub-dim grows with the length."""
        return sub.size % self.prime == 0

    def growing_dims(self, node: Node) -> tuple[int, ...]:
        """Return the dims of a value that grow."""
        return tuple(dim for dim, subs in enumerate(node.meta["subdims"][0]) if any(map(self.grows, subs)))

    def alone(self, node: Node) -> tuple[int, ...]:
        """Return the dims of a value that grow, each of which is the length itself.

        Raises:
            PaddingError: one is more.
        """
        dims = self.growing_dims(node)
        if any(node.meta["val"].shape[dim] != self.prime for dim in dims):
            self.fail(node, "an output has a dim in which positions are mixed with something else, as rows of all sequences")
        return dims

    def diagonal(self, node: Node) -> tuple[int, ...]:
        """Return the two dims that grow, where each is the length itself, else ()."""
        dims = self.growing_dims(node)
        return dims if len(dims) == 2 and all(node.meta["val"].shape[dim] == self.prime for dim in dims) else ()

    def are_rows(self, node: Node) -> bool:
        """Return whether the last dim but one is the length itself, and no other dim grows."""
        place = node.meta["val"].dim() - 2
        return self.growing_dims(node) == (place,) and node.meta["val"].shape[place] == self.prime

    def _check_sizes(self, node: Node) -> None:
        """Dims that grow are as many times longer at the other length; no others change."""
        for result, (short, long) in enumerate(zip(results_of(node), results_of(self.twin[node]), strict=True)):
            powers = [sum(map(self.grows, subs)) for subs in node.meta["subdims"][result]]
            grown = [size // self.prime**power * self.length**power for size, power in zip(short.shape, powers)]
            if grown != list(long.shape):
                self.fail(node, f"it is {list(short.shape)} at length {self.prime} and {list(long.shape)} at {self.length}")

    def _pick(self, node: Node) -> None:
        whole, index = cast(Node, node.args[0]), cast(int, node.args[1])
        self.above[node] = None
        if whole in self.values:
            long, short = (value[index] for value in self.values[whole])
            self.values[node], self.above[node] = (long, short), closed((long, short), self.diagonal(node))

    def _evaluate(self, node: Node) -> bool:
        """Compute a call that depends on no input at both lengths; cut, they must agree."""
        if any(result.numel() > MOST or result.device.type == "meta" for result in results_of(self.twin[node])):
            return False
        table = operands(node)[0] if operands(node) else node
        is_table = table is not node and self.twin[table] is self.twin[node]
        long, short = self.values[table][0] if is_table else self._run(node, self.twin[node], 0), self._run(node, node, 1)
        pairs = [(long, short)] if isinstance(short, Tensor) else list(zip(long, short))
        self._check_values(node, *zip(*pairs), why="what it computes for a position changes with the length")
        self.values[node] = (long, short)
        self.above[node] = closed((long, short), self.diagonal(node)) if isinstance(short, Tensor) else None
        return True

    def _check_values(self, node: Node, longs: Sequence[Tensor], shorts: Sequence[Tensor], why: str) -> None:
        for subs, long, short in zip(node.meta["subdims"], longs, shorts):
            if not torch.equal(torch.nan_to_num(self._cut(long, subs)), torch.nan_to_num(_split(short, subs))):
                self.fail(node, why)

    def _run(self, node: Node, run: Node, place: int) -> Any:
        """Run a node or its twin on the known values of its operands."""
        held = {(read if place else self.twin[read]): self.values[read][place] for read in operands(node)}
        args, kwargs = torch.fx.map_arg((run.args, run.kwargs), lambda read: held[read])
        with torch.no_grad():
            return cast(Any, run.target)(*args, **kwargs)

    def _cut(self, value: Tensor, subs: Subs) -> Tensor:
        """Return a value at `length` cut to `prime`, a dim for each sub-dim."""
        flat = [sub for dim in subs for sub in dim]
        sizes = [sub.size // self.prime * self.length if self.grows(sub) else sub.size for sub in flat]
        value = value.reshape(sizes)
        for dim, sub in enumerate(flat):
            value = value.narrow(dim, 0, sub.size)
        return value


def _split(value: Tensor, subs: Subs) -> Tensor:
    return value.reshape([sub.size for dim in subs for sub in dim])


def _slice(proof: Proof, node: Node, moved: set[str]) -> bool:
    """All of a growing dim or its first position, or the first positions of a table."""
    read = operands(node)[0]
    dim = cast(int, named(node).get("dim", 0)) % read.meta["val"].dim()
    size = node.meta["val"].shape[dim]
    return size == read.meta["val"].shape[dim] or is_first(node) and (size == 1 or dim not in proof.growing_dims(read))


def _select(proof: Proof, node: Node, moved: set[str]) -> bool:
    """The first position, which every length has."""
    return named(node).get("index") == 0


def _cumulative(proof: Proof, node: Node, moved: set[str]) -> bool:
    """Along positions, not along the rows of several sequences one after the other."""
    return all(len(node.meta["factors"][name]) == 1 for name in moved)


def _attention(proof: Proof, node: Node, moved: set[str]) -> bool:
    mask = named(node).get("attn_mask")
    if not all(proof.are_rows(read) for read in operands(node)[:3]):
        return False
    closed_by = isinstance(mask, Node) and (False if mask.meta["val"].dtype == torch.bool else -torch.inf)
    return bool(named(node).get("is_causal")) or isinstance(mask, Node) and proof.above[mask] is not None and proof.above[mask] == closed_by


def _softmax(proof: Proof, node: Node, moved: set[str]) -> bool:
    read = operands(node)[0]
    dims, dim = proof.diagonal(read), cast(int, named(node)["dim"]) % read.meta["val"].dim()
    if not dims or dim != dims[1] or proof.above[read] != -torch.inf:
        return False
    proof.above[node] = 0.0
    return True


def _product(proof: Proof, node: Node, moved: set[str]) -> bool:
    """A sum over positions whose weights after one's own are 0."""
    weights, values = operands(node)[:2]
    rank = weights.meta["val"].dim()
    causal = proof.diagonal(weights) == (rank - 2, rank - 1) and proof.above[weights] == 0.0
    return causal and proof.are_rows(values) and moved <= node.meta["binding"].sums


def _index(proof: Proof, node: Node, moved: set[str]) -> bool:
    """Known places, none after the position that reads it."""
    read, places = cast("tuple[Node, list[Node | None]]", node.args[:2])
    own, grown = proof.growing_dims(node), proof.growing_dims(read)
    if any(each is None or each not in proof.values for each in places) or len(own) != 1 or any(dim >= len(places) for dim in grown):
        return False
    rank = max(cast(Node, each).meta["val"].dim() for each in places)  # the dims that places make come first
    if own[0] >= rank or node.meta["val"].shape[own[0]] != proof.prime:
        return False
    for which, size in enumerate((proof.length, proof.prime)):
        row = torch.arange(size).view([-1 if dim == own[0] else 1 for dim in range(rank)])
        for dim in grown:
            at = proof.values[cast(Node, places[dim])][which].cpu()
            if bool((at < 0).any()) or bool((at > row).any()):
                return False
    return True


Special = Callable[[Proof, Node, set[str]], bool]
SPECIAL: dict[str, Special] = {
    "slice": _slice,
    "select": _select,
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"), _cumulative),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("softmax", "_softmax"), _softmax),
    **dict.fromkeys(("matmul", "bmm"), _product),
    "index": _index,
}
