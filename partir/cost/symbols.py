"""Which dims of inputs are symbols of a cost: those of which every size that follows is a product.

    [B, S, D] -> linear -> [B, S, E]                 S stays S: a symbol
    [B, S, D] -> cat with a first token -> [B, S+1, D]   nobody can say here what 17 is for another S: a number

A dim that the model splits in two, that is padded, or that an op turns into another size (a shift, a convolution along it) stays the
plan's own number, and the cost says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from torch.fx import Node

from partir.errors import PartirError, source_line
from partir.graph import operands
from partir.mesh import AXES
from partir.rules import Binding

if TYPE_CHECKING:
    from partir.passes.pipeline import Compiled


@dataclass(frozen=True)
class Symbols:
    """The symbols of a compilation.

    Args:
        keys: the key of a sub-dim -> its symbol.
        values: the size of each symbol in the program.
        left_out: a letter that is no symbol -> why.
    """

    keys: Mapping[int, str] = field(default_factory=dict[int, str])
    values: Mapping[str, int] = field(default_factory=dict[str, int])
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])


def input_symbols(compiled: Compiled, wanted: Mapping[str, tuple[str, int]] | None) -> Symbols:
    """Return the symbols of dims of inputs.

    Args:
        wanted: name -> (input, dim) whose size it stands for; by default `B` and `S` are the first two dims of the first input.

    Raises:
        PartirError: no such input or dim, a name that means something else, or a dim that cannot be a symbol.
    """
    nodes = list(compiled.annotated.graph.find_nodes(op="placeholder"))
    inputs = {slot.name: node for node, slot in zip(nodes, compiled.program.inputs) if slot.kind == "input"}
    chosen = _checked(wanted, inputs) if wanted is not None else _first_two(inputs)
    keys, values, left_out = dict[int, str](), dict[str, int](), dict[str, str]()
    for letter, (name, dim) in chosen.items():
        node = inputs[name]
        subdims = node.meta["subdims"][0][dim]
        reason = _split(subdims) or _changed(compiled, {one.key for one in subdims})
        if reason and wanted is not None:
            raise PartirError(f"cost: {letter} cannot stand for dim {dim} of {name}, of size {node.meta['val'].shape[dim]}: {reason}.")
        if reason:
            left_out[letter] = reason
        elif subdims:
            keys[subdims[0].key], values[letter] = letter, subdims[0].size
    return Symbols(keys, values, left_out)


def _first_two(inputs: Mapping[str, Node]) -> dict[str, tuple[str, int]]:
    first = next((name for name, node in inputs.items() if node.meta["val"].dim()), None)
    return {} if first is None else {letter: (first, dim) for dim, letter in zip(range(inputs[first].meta["val"].dim()), "BS")}


def _checked(wanted: Mapping[str, Any], inputs: Mapping[str, Node]) -> dict[str, tuple[str, int]]:
    """Return what a user wants as symbols."""
    chosen: dict[str, tuple[str, int]] = {}
    for letter, place in wanted.items():
        if not str(letter).isidentifier() or letter in AXES:
            raise PartirError(f"cost: {letter!r} is no name for a symbol; use a letter that is not an axis ({', '.join(AXES)}).")
        if not isinstance(place, (tuple, list)) or len(cast("tuple[Any, ...]", place)) != 2:
            raise PartirError(f'cost: symbol {letter} is {place!r}; give the input and the number of its dim: {{"{letter}": ("ids", 1)}}.')
        name, dim = cast("tuple[Any, Any]", place)
        if name not in inputs or not isinstance(dim, int) or not 0 <= dim < inputs[name].meta["val"].dim():
            known = ", ".join(f"{n} {list(node.meta['val'].shape)}" for n, node in inputs.items())
            raise PartirError(f"symbol {letter}: there is no dim {dim} of an input {name!r}; inputs are {known}.")
        key = _key(inputs, (name, dim))
        other = next((letter for letter, at in chosen.items() if key is not None and _key(inputs, at) == key), None)
        if other is not None:
            raise PartirError(f"cost: {other} and {letter} stand for the same size, that of dim {dim} of {name}: leave one out.")
        chosen[letter] = (name, dim)
    return chosen


def _key(inputs: Mapping[str, Node], place: tuple[str, int]) -> int | None:
    subdims = inputs[place[0]].meta["subdims"][0][place[1]]
    return subdims[0].key if len(subdims) == 1 else None


def _split(subdims: Any) -> str:
    return f"the model takes it apart, {'*'.join(str(one.size) for one in subdims)}" if len(subdims) > 1 else ""


def _changed(compiled: Compiled, keys: set[int]) -> str:
    """Return which call makes another size of a dim; ``""``: none."""
    for node in compiled.annotated.graph.nodes:
        if "binding" not in node.meta:
            continue
        size = next(iter(_made_of(node, keys)), None)
        if size is not None:
            op = str(node.target).removesuffix(".default")
            return f"{source_line(node.meta)}: {op} makes a dim of {size} of it, and what that is for another size is not known here"
    return ""


def _made_of(node: Node, keys: set[int]) -> Iterator[int]:
    """Yield the sizes that a call makes of dims which it neither keeps nor sums over."""
    binding = cast(Binding, node.meta["binding"])
    kept = {factor for dims in binding.results for names in dims for factor in names}
    read = {factor for dims in binding.operands for names in dims for factor in names}
    gone = read - kept - binding.sums - binding.maxima
    for dims, operand in zip(binding.operands, operands(node)):
        for names, subdims in zip(dims, operand.meta["subdims"][0]):
            if gone & set(names) and keys & {one.key for one in subdims}:
                yield from (binding.sizes[factor] for factor in sorted(kept - read) if binding.sizes[factor] > 1)
