"""Bind a program's collectives to process groups: each becomes a start and a wait.

    Before: %g = partir.all_gather(%x, axis=y, dim=0)
    After:  %g_start = start_all_gather_y(%x) ... %g = wait(%g_start)

Requires: a forward or backward graph of one rank, collectives named by axes.
Ensures: no op of the namespace partir remains; a start comes as soon as its operand exists, but at most `overlap.AHEAD` messages are
under way, so that memory holds no more than that; a wait comes right before the first use. The order of all else is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from partir.collectives import addressing, lockstep
from partir.errors import source_line
from partir.graph import collective_name, is_collective, operands, tensor_of
from partir.mesh import Mesh
from partir.overlap import start_early_wait_late
from partir.runtime.groups import Group, Groups, backend_name
from partir.runtime.transport import Call, Pending, Transport, check_reducible

LOCAL = ("slice", "zero_pad", "spread", "settle", "once", "coordinate")

SUMS = ("reduce_scatter", "reduce_scatter_bucket", "all_reduce", "reduce_to")

Start = Callable[..., Pending]


def bind_collectives(program: GraphModule, stage: str, groups: Groups, transport: Transport) -> GraphModule:
    """Return a copy of one rank's graph whose generated code sends and receives."""
    graph = Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    for node in list(graph.nodes):
        if is_collective(node):
            _bind_node(graph, node, stage, groups, transport)
    graph.eliminate_dead_code()
    start_early_wait_late(graph)
    graph.lint()
    return GraphModule(program, graph, f"{stage.capitalize()}OfOneRank")


def collective_axes(program: GraphModule) -> list[tuple[str, ...]]:
    """Return the axes of every group that a graph needs, in the order of first use."""
    named = [_named_arguments(node)["axis"] for node in program.graph.nodes if is_collective(node)]
    return list(dict.fromkeys(addressing.split_axes(axis) for axis in named))


def _bind_node(graph: Graph, node: Node, stage: str, groups: Groups, transport: Transport) -> None:
    op, named = collective_name(node), _named_arguments(node)
    operand = named.pop("t", named.pop("ts", None))
    group = groups.over(addressing.split_axes(named["axis"]))
    with graph.inserting_before(node):
        if op in LOCAL or group.size == 1:
            local = _named_like(_local(op, group, named), f"{op}_here")
            bound = graph.call_function(local, () if operand is None else (operand,))
        else:
            call = Call(op, named["axis"], stage, node.name, line=_line(node))
            if op in SUMS:
                backend = backend_name(group.process_group, groups.device)
                check_reducible(backend, tensor_of(operands(node)[0]).dtype, str(call), source_line(node.meta))
            start = _named_like(_start(op, group, groups.mesh, transport, call, named), f"start_{op}_{call.axis}")
            started = graph.call_function(start, (operand,), name=f"{node.name}_start")
            bound = graph.call_function(transport.wait, (started,))
            started.meta["message"] = "start"
            bound.meta["message"] = "wait"
    name = node.name
    bound.meta = {**node.meta, **bound.meta}
    node.replace_all_uses_with(bound)
    graph.erase_node(node)
    bound.name = name


def _named_arguments(node: Node) -> dict[str, Any]:
    schema: Any = node.target
    defaults = {argument.name: argument.default_value for argument in schema._schema.arguments}
    given = {argument.name: value for argument, value in zip(schema._schema.arguments, node.args)}
    return {**defaults, **given, **node.kwargs}


def _local(op: str, group: Group, named: dict[str, Any]) -> Callable[..., Any]:
    """Return what an op does without a message: on this rank alone, or in a group of one."""
    index, size = group.index, group.size
    if op == "coordinate":
        return partial(lockstep.coordinate, index, named["device"])
    if op == "once" and index > 0:
        return partial(torch.zeros_like, memory_format=torch.contiguous_format)
    if size == 1 or op in ("spread", "settle", "once"):
        return partial(_same)
    if op == "slice":
        return partial(_take, dim=named["dim"], blocks=named["blocks"], index=index, size=size)
    assert op == "zero_pad", op
    return partial(lockstep.zero_pad, index=index, size=size, dim=named["dim"], num_blocks=named["blocks"])


def _same(t: Any) -> Any:
    return t


def _start(op: str, group: Group, mesh: Mesh, transport: Transport, call: Call, named: dict[str, Any]) -> Start:
    """Return what starts an op's message, given its operand."""
    ends = {"group": group, "transport": transport, "call": call}
    if op in ("all_gather", "all_gather_same"):
        return partial(_start_gather, dim=named["dim"], blocks=named["blocks"], **ends)
    if op == "reduce_scatter":
        return partial(_start_scatter, dim=named["dim"], blocks=named["blocks"], **ends)
    if op == "all_reduce":
        return partial(transport.reduce, group=group, op=named["op"], call=call)
    if op == "all_to_all":
        places = {name: named[name] for name in ("src", "dst", "src_blocks", "dst_blocks")}
        return partial(_start_all_to_all, **places, **ends)
    if op == "all_gather_bucket":
        return partial(_start_gather_bucket, **ends)
    if op == "reduce_scatter_bucket":
        return partial(_start_scatter_bucket, **ends)
    assert op in ("broadcast", "reduce_to"), op
    root = mesh.coordinate(group.ranks[group.index]).get(named["root"], 0)
    send = transport.broadcast if op == "broadcast" else transport.reduce_to
    return partial(send, group=group, root=root, call=call)


def _line(node: Node) -> str:
    return source_line(node.meta) if node.meta.get("stack_trace") else ""


def _then(pending: Pending, change: Callable[[Any], Any]) -> Pending:
    received = pending.finish
    pending.finish = lambda: change(received())
    return pending


def _start_gather(t: Tensor, group: Group, transport: Transport, call: Call, dim: int, blocks: int) -> Pending:
    in_place = dim % t.dim() == 0 and blocks == 1 and not group.order

    def join(rows: Tensor) -> Tensor:
        return rows.flatten(0, 1) if in_place else addressing.join(group.by_member(rows), dim, blocks)

    return _then(transport.gather_rows(t, group, call), join)


def _start_scatter(t: Tensor, group: Group, transport: Transport, call: Call, dim: int, blocks: int) -> Pending:
    return transport.scatter_sum(_cut(t, group, dim, blocks), group, call)


def _start_all_to_all(
    t: Tensor, group: Group, transport: Transport, call: Call, src: int, dst: int, src_blocks: int, dst_blocks: int
) -> Pending:
    pieces = addressing.exchange_pieces(t, group.size, src, dst, src_blocks, dst_blocks)
    pending = transport.exchange_rows(torch.stack(group.by_rank(pieces)), group, call)
    return _then(
        pending, lambda rows: addressing.exchange_join(group.by_member(rows), src, dst, src_blocks, dst_blocks)
    )


def _start_gather_bucket(ts: list[Tensor], group: Group, transport: Transport, call: Call) -> Pending:
    shapes = [(t.shape[0] * group.size, *t.shape[1:]) for t in ts]
    pending = transport.gather_rows(addressing.pack(ts, 1), group, call)
    return _then(pending, lambda rows: addressing.unpack(_ordered(rows, group), shapes, group.size))


def _start_scatter_bucket(ts: list[Tensor], group: Group, transport: Transport, call: Call) -> Pending:
    shapes = [(t.shape[0] // group.size, *t.shape[1:]) for t in ts]
    rows = addressing.pack(ts, group.size).view(group.size, -1)
    sent = torch.stack(group.by_rank(list(rows.unbind(0)))) if group.order else rows
    return _then(transport.scatter_sum(sent, group, call), lambda total: addressing.unpack(total, shapes, 1))


def _ordered(rows: Tensor, group: Group) -> Tensor:
    return torch.stack(group.by_member(rows)) if group.order else rows


def _cut(t: Tensor, group: Group, dim: int, blocks: int) -> Tensor:
    """Return one row a member, as the process group orders them: `[.., blocks*size*n, ..] -> [size, .., blocks*n, ..]`."""
    dim = dim % t.dim()
    length = t.shape[dim] // (blocks * group.size)
    pieces = torch.unflatten(t, dim, (blocks, group.size, length)).movedim(dim + 1, 0).flatten(dim + 1, dim + 2)
    return torch.stack(group.by_rank(list(pieces.unbind(0)))) if group.order else pieces.contiguous()


def _take(t: Tensor, dim: int, blocks: int, index: int, size: int) -> Tensor:
    if blocks > 1:
        return lockstep.slice(t, index, size, dim, blocks)
    length = t.shape[dim] // size
    return t.narrow(dim, index * length, length).contiguous()


def _named_like(function: Callable[..., Any], name: str) -> Any:
    """Name a bound function, so that the generated code reads as the program does."""
    loose: Any = function
    loose.__name__ = loose.__qualname__ = name.replace(".", "_")
    loose.__module__ = "partir"
    return loose
