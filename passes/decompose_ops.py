"""Decompose ops until each has a rule.

    Before: %loss = aten.cross_entropy_loss(%logits, %labels)
    After:  %log_softmax = aten.log_softmax(%logits, 1); %gather = aten.gather(%log_softmax, 1, %u) ...

Requires: a traced graph: flat, functional, ``meta["val"]`` on every node.
Ensures: every op has a rule; ops that do nothing (dropout in evaluation, conversions to the same dtype) are gone.
New nodes keep the source line and the module path of the op that they replace. Idempotent.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import _decomp as decompositions_of_torch
from torch import fx
from torch.backends import mkldnn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from partir.errors import RuleError, source_line
from partir.passes.decompositions import OWN
from partir.passes.functionalize import call, functionalize
from partir.passes.torch_ops import is_composite, is_op, name_of, schema_of
from partir.random_ops import draws, refusal
from partir.rules.propose import propose

aten = torch.ops.aten
HasRule = Callable[[fx.Node], bool]
_CONVERSIONS = ("aten::to", "aten::_to_copy", "aten::type_as", "prims::convert_element_type")
_IDENTITIES = (aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.positive.default)


def decompose_ops(graph_module: fx.GraphModule, has_rule: HasRule) -> fx.GraphModule:
    """Replace every op of a graph that has no rule by ops that have one.

    Args:
        graph_module: changed in place and returned.
        has_rule: tells of a node, with its arguments, whether a rule serves it.

    Raises:
        RuleError: an op has neither a rule nor a decomposition; the message holds the rule to write.
    """
    decomposer = _Decomposer(graph_module.graph, has_rule)
    for node in list(graph_module.graph.nodes):
        decomposer.visit(node, ())
    graph_module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    graph_module.graph.lint()
    graph_module.recompile()
    return graph_module


class _Decomposer:
    """Replaces nodes of a graph; traces of decompositions are kept for the layers that repeat them."""

    def __init__(self, graph: fx.Graph, has_rule: HasRule) -> None:
        self.graph = graph
        self.has_rule = has_rule
        self.traces: dict[str, fx.Graph] = {}

    def visit(self, node: fx.Node, above: tuple[str, ...]) -> None:
        """Simplify a node, or decompose it and visit what it became; `above` lists the ops it came from."""
        if node.op != "call_function" or node.target is operator.getitem:
            return
        if self._simplify(node):
            return
        self._check_draw(node)
        if self.has_rule(node):
            return
        key = _signature(node)
        function = None if key in above else _decomposition(node)
        if function is None:
            _refuse(node)
        if key not in self.traces:
            traced = _trace(node, function)
            if traced is None:
                _refuse(node)
            self.traces[key] = traced
        for new in self._inline(node, self.traces[key]):
            self.visit(new, (*above, key))

    def _check_draw(self, node: fx.Node) -> None:
        """Refuse random numbers that another mesh could not repeat; what our own decompositions draw is checked when visited."""
        if "site" not in node.meta or node.target in OWN:
            return
        reason = refusal(node.target)
        if reason is not None:
            raise RuleError(f"{source_line(node.meta)}: {reason}")

    def _simplify(self, node: fx.Node) -> bool:
        """Remove a node that does nothing, or write a conversion in its one form; tell whether it is settled."""
        name = name_of(node.target)
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return name == "aten::cat" and self._simplify_cat(node)
        off = name in _DROPOUTS and not (node.args[2] and node.args[1])
        old, new = source.meta.get("val"), node.meta.get("val")
        if off or node.target in _IDENTITIES or (name in _CONVERSIONS and _same_type(old, new)):
            self._replace(node, source)
            return True
        if name in _CONVERSIONS and node.target is not aten._to_copy.default and isinstance(new, torch.Tensor):
            with self.graph.inserting_before(node):
                converted = call(self.graph, aten._to_copy.default, (source,), {"dtype": new.dtype})
            converted.meta = dict(node.meta)
            self._replace(node, converted)
            if not self.has_rule(converted):
                _refuse(converted)
            return True
        return False

    def _simplify_cat(self, node: fx.Node) -> bool:
        """Drop empty tensors from a cat; a cache that starts empty makes one."""
        parts = cast("Sequence[fx.Node]", node.args[0])
        kept = [part for part in parts if part.meta["val"].numel() > 0]
        if len(kept) == 1 and kept[0].meta["val"].dtype == node.meta["val"].dtype:
            self._replace(node, kept[0])
            return True
        if kept and len(kept) < len(parts):
            node.args = (kept, *node.args[1:])
        return False

    def _replace(self, node: fx.Node, value: fx.Node) -> None:
        node.replace_all_uses_with(value)
        self.graph.erase_node(node)

    def _inline(self, node: fx.Node, trace: fx.Graph) -> list[fx.Node]:
        """Copy a trace in place of a node; return the nodes that are new."""
        env: dict[fx.Node, fx.Node] = {}
        inputs = iter(_tensor_nodes(node))
        new: list[fx.Node] = []
        outputs: Any = None
        for inner in trace.nodes:
            if inner.op == "placeholder":
                env[inner] = next(inputs)
            elif inner.op == "output":
                outputs = fx.map_arg(inner.args[0], lambda arg: env[arg])
            else:
                with self.graph.inserting_before(node):
                    env[inner] = self.graph.node_copy(inner, lambda arg: env[arg])
                kept = {key: value for key, value in node.meta.items() if key in ("stack_trace", "nn_module_stack")}
                env[inner].meta = {**kept, "val": inner.meta["val"]}
                new.append(env[inner])
        drawing = [inner for inner in new if draws(inner.target, inner.args, inner.kwargs)]
        assert len(drawing) <= 1, f"{node.target}: eager torch draws once, its decomposition {len(drawing)} times"
        for inner in drawing:
            inner.meta["site"] = node.meta["site"]
        self._use(node, outputs)
        return new

    def _use(self, node: fx.Node, outputs: Any) -> None:
        """Let the users of a node, or of its several results, use the outputs of its decomposition."""
        if isinstance(outputs, fx.Node):
            self._replace(node, outputs)
            return
        for user in list(node.users):
            assert user.target is operator.getitem
            self._replace(user, outputs[user.args[1]])
        self.graph.erase_node(node)


_DROPOUTS = ("aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::feature_alpha_dropout")


def _same_type(old: Any, new: Any) -> bool:
    both = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
    return both and old.dtype == new.dtype and old.device == new.device


def _tensor_nodes(node: fx.Node) -> list[fx.Node]:
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]


def _signature(node: fx.Node) -> str:
    """Return a text that is equal for calls with the same trace."""

    def describe(leaf: Any) -> str:
        value = leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf
        if isinstance(value, torch.Tensor):
            return f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.device}"
        return repr(value)

    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    return f"{node.target} {spec} {[describe(leaf) for leaf in leaves]}"


def _decomposition(node: fx.Node) -> Callable[..., Any] | None:
    """Return the function that computes an op by other ops: our own, else torch's."""
    target = node.target
    if not is_op(target):
        return None
    if target in OWN:
        return OWN[target]
    if is_composite(target):
        return cast("Callable[..., Any]", target.decompose)
    torchs: Any = decompositions_of_torch
    return torchs.get_decompositions([target]).get(target) or torchs.core_aten_decompositions().get(target)


def _trace(node: fx.Node, function: Callable[..., Any]) -> fx.Graph | None:
    """Trace a decomposition on the fake operands of a node; high-level ops inside it stay whole.

    None where it does not serve this call: it says so itself, there is no operand, it gives another shape or dtype, or it
    holds a call without a result (a check that raises).
    """
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
    fakes = [leaves[index].meta["val"] for index in places]

    def run(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for index, tensor in zip(places, tensors, strict=True):
            filled[index] = tensor
        args, kwargs = _plain(pytree.tree_unflatten(filled, spec))
        result: Any = function(*args, **kwargs)
        return tuple(cast("Sequence[Any]", result)) if isinstance(result, tuple) else result

    mode = next((fake.fake_mode for fake in fakes if hasattr(fake, "fake_mode")), None)
    if mode is None:
        return None
    # oneDNN would make an LSTM of float32 on the CPU one op of its own; anywhere else it is products, which have rules.
    with mode, mkldnn.flags(enabled=False, allow_tf32=None):  # pyright: ignore[reportArgumentType, reportUnknownMemberType]
        # Contiguous: strides are no part of a graph, and some of torch's decompositions write by them.
        fakes = [fake.new_empty(fake.shape) for fake in fakes]
        try:
            traced = make_fx(run, pre_dispatch=True)(*fakes)
            if any(inner.target is node.target for inner in traced.graph.nodes):
                # Torch's own composites show themselves before dispatch, and take themselves apart after it.
                traced = make_fx(run)(*fakes)
        except (NotImplementedError, GuardOnDataDependentSymNode):
            return None
    functionalize(traced.graph, set())
    for inner in list(traced.graph.nodes):
        if inner.op == "get_attr":
            _write_constant(traced, inner)
    traced.graph.eliminate_dead_code()
    silent = any(inner.op == "call_function" and "val" not in inner.meta for inner in traced.graph.nodes)
    return traced.graph if not silent and _agrees(node, traced.graph) else None


def _plain(value: Any) -> Any:
    """Return arguments with plain lists, which fx makes immutable and some decompositions change."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        parts = [_plain(part) for part in cast("Sequence[Any]", value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def _write_constant(traced: fx.GraphModule, inner: fx.Node) -> None:
    """Write a number that a decomposition holds as a tensor as an op that makes it."""
    value = getattr(traced, str(inner.target))
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise RuleError(f"a decomposition holds the constant {value}, which has no place in a graph.")
    with traced.graph.inserting_before(inner):
        options = {"dtype": value.dtype, "device": value.device}
        made = call(traced.graph, aten.full.default, (list(value.shape), value.item()), options)
    made.meta = dict(inner.meta)
    inner.replace_all_uses_with(made)
    traced.graph.erase_node(inner)


def _agrees(node: fx.Node, graph: fx.Graph) -> bool:
    """Tell whether a decomposition gives the shapes and dtypes of its op."""
    output = next(inner for inner in graph.nodes if inner.op == "output")
    old = pytree.tree_leaves(node.meta["val"])
    new = [leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf for leaf in pytree.tree_leaves(output.args[0])]
    return all(mine.shape == theirs.shape and mine.dtype == theirs.dtype for mine, theirs in zip(new, old, strict=True))


def _refuse(node: fx.Node) -> NoReturn:
    raise RuleError(
        f"{source_line(node.meta)}: {node.target} has no rule for this call, and no decomposition into ops that have "
        "one. A rule names the dims of each operand and says what happens when one is split. "
        f"Write it in a .rules file:\n{_proposed(node)}"
    )


def _proposed(node: fx.Node) -> str:
    """Return a rule found by trial, ready to paste, else the first line of one."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta.get("val"))
    found = propose(node.target, cast("tuple[Any, ...]", args), cast("dict[str, Any]", kwargs)) if is_op(node.target) else None
    if found is not None:
        lines = "\n".join(f"    {line}" for line in found.splitlines())
        return f"{lines}\nThis one was found by trial on this call alone: read it, then run `partir check-rules` on it."
    return f"    {rule_skeleton(node)}\nwith a name for each dim in place of ..., and `sum k` for each dim that is summed over."


def rule_skeleton(node: fx.Node) -> str:
    """Return the first line of the rule that an op lacks, such as ``op my.scale(x[* ...], factor) -> y[* ...]``."""
    if not is_op(node.target):
        return f"op {node.target}(x[* ...]) -> y[* ...]"
    schema = schema_of(node.target)
    arguments = ", ".join(argument.name + _TENSOR_MARKS.get(str(argument.type), "") for argument in schema.arguments)
    results = ", ".join(f"y{index or ''}[* ...]" for index in range(len(schema.returns)))
    overload = "" if schema.overload_name in ("", "default") else f".{schema.overload_name}"
    return f"op {schema.name.replace('::', '.')}{overload}({arguments}) -> {results}"


_TENSOR_MARKS = {"Tensor": "[* ...]", "Optional[Tensor]": "?[* ...]", "List[Tensor]": "*[* ...]"}
