"""Messages between ranks: how each is sent on each backend, chosen here and nowhere else, and counted where it is received.

gloo, float32, 8 ranks on 2 cores, milliseconds for one collective in groups of 2 / 4 / 8 (`benchmarks/gloo_collectives.py`):

    bytes a rank            64                  4096               65536                 1 MiB              4 MiB
    all_gather, native      6.2 /  7.3 / 21.1   5.1 /  6.7 / 23.7   4.7 /  6.3 / 19.1   50 / 42 / 63      107 / 303
    .. all_to_all of copies 3.0 /  3.5 /  7.1   4.3 /  4.1 /  9.8   5.1 /  5.9 / 11.2   26 / 26 / 48       74 / 247
    .. send and receive     3.7 /  5.9 / 18.1   6.2 /  5.9 / 12.5   5.7 /  4.7 /  6.8   11 / 16 / 36       28 /  96
    reduce_scatter, native  6.3 /  9.2 / 27.5   6.1 / 12.7 / 35.4   9.1 / 10.7 / 22.2   16 / 32 / 91       57 / 134
    .. all_to_all, sum      4.0 /  4.2 /  8.6   3.2 /  4.1 /  8.1   7.9 /  5.0 /  7.8   11 / 17 / 29       36 /  60
    all_reduce, native      5.9 /  9.2 / 23.3   5.1 /  9.0 / 28.6   5.9 / 10.7 / 22.4    9 / 16 / 23       21 /  33
    .. scatter, then gather 9.3 /  5.2 / 13.4   4.4 /  8.7 / 17.6  11.3 /  9.8 / 17.4   17 / 17 / 19       47 /  39

So gloo gathers small blocks by all_to_all and large ones by send and receive, and scatters by all_to_all and a local sum.
NCCL's own collectives are used as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from partir.errors import PartirError
from partir.runtime import record
from partir.runtime.failures import Failures
from partir.runtime.groups import Group, backend_name
from partir.runtime.torch_dtensor import dist

EXCHANGE_BELOW_BYTES = 65536
NATIVE_REDUCE_FROM_BYTES = 4 * 2**20


_SIZED = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8)
REDUCIBLE = {"gloo": (*_SIZED, torch.int16, torch.complex64, torch.complex128), "nccl": (*_SIZED, torch.complex64, torch.complex128)}


def check_reducible(backend: str, dtype: torch.dtype, where: str, line: str) -> None:
    """Refuse a sum between ranks in a dtype that the backend has no sum for, before anything runs.

    Raises:
        PartirError: names the collective and the user's line.
    """
    legal = REDUCIBLE.get(backend)
    if legal is not None and dtype not in legal:
        names = ", ".join(str(each) for each in legal)
        law = f"{backend} cannot add up {dtype}, only {names}"
        raise PartirError(f"{line}: {where}: {law}. Give reduce_dtype=torch.float32, or cast first.")


@dataclass(frozen=True)
class Call:
    """One collective as errors and logs name it.

    Args:
        op, axis: as in the program.
        stage: "forward" or "backward".
        node: its name in the graph.
        counted: whether `record_communication` counts it.
        line: the user's line that it serves.
        label: what to call it where it is no node of a program.
    """

    op: str
    axis: str
    stage: str
    node: str
    counted: bool = True
    line: str = ""
    label: str = ""

    def in_call(self, number: int) -> str:
        """Return where a rank is: the node, the call, and the user's line."""
        if self.label:
            return f"{self.label}, before call {max(number, 1)}"
        where = f"%{self.node} = {self.op}(axis={self.axis}) of the {self.stage} of call {number}"
        return f"{where}, {self.line}" if self.line else where


@dataclass
class Pending:
    """A message on its way: `Transport.wait` gives its result.

    Args:
        works: what torch.distributed returned.
        finish: makes the result once they are done.
        call: the collective that it serves.
        direct: sent and received one by one, and not by one collective.
    """

    works: list[Any]
    finish: Callable[[], Any]
    call: Call
    direct: bool = False


class Transport:
    """Sends and receives for one rank.

    Args:
        rank: this rank.
        device: where the tensors live.
        failures: what ends a wait.
    """

    def __init__(self, rank: int, device: torch.device, failures: Failures) -> None:
        self.rank = rank
        self.device = device
        self.failures = failures
        self._tags: dict[int, int] = {}

    def wait(self, pending: Pending) -> Any:
        """Wait for a message and return its result."""
        for work in pending.works:
            where = pending.call.in_call(self.failures.call)
            self.failures.wait(work, where, on_cpu=self.device.type == "cpu", direct=pending.direct)
        return pending.finish()

    def gather_rows(self, t: Tensor, group: Group, call: Call) -> Pending:
        """Start sending `t` to every member; the result has `[size, *t.shape]`, rows as the process group orders them."""
        t = t.contiguous()
        rows = t.new_empty((group.size, *t.shape))
        self._count(call, (group.size - 1) * t.nbytes)
        if t.numel() == 0:
            return Pending([], lambda: rows, call)
        if not self._gloo(group):
            work = dist.all_gather_into_tensor(_raw(rows), _raw(t), group=group.process_group, async_op=True)
            return Pending([work], lambda: rows, call)
        if t.nbytes < EXCHANGE_BELOW_BYTES:
            return self._exchange(_raw(t).expand(group.size, -1).contiguous(), rows, group, call)
        return self._send_and_receive(t, rows, group, call)

    def exchange_rows(self, sent: Tensor, group: Group, call: Call) -> Pending:
        """Start sending row `i` of `sent`, `[size, ...]`, to member `i`; the result holds what each sent here."""
        sent = sent.contiguous()
        rows = torch.empty_like(sent)
        self._count(call, sent.nbytes // group.size * (group.size - 1))
        if sent.numel() == 0:
            return Pending([], lambda: rows, call)
        return self._exchange(sent, rows, group, call)

    def scatter_sum(self, sent: Tensor, group: Group, call: Call) -> Pending:
        """Start adding up row `i` of every member's `sent`, `[size, ...]`, on member `i`; the result is `[...]`."""
        if self._gloo(group):
            pending = self.exchange_rows(sent, group, call)
            received = pending.finish
            pending.finish = lambda: _total(received(), group)
            return pending
        sent = sent.contiguous()
        total = sent.new_empty(sent.shape[1:])
        self._count(call, sent.nbytes // group.size * (group.size - 1))
        work = dist.reduce_scatter_tensor(total.view(-1), sent.view(-1), group=group.process_group, async_op=True)
        return Pending([work], lambda: total, call)

    def reduce(self, t: Tensor, group: Group, op: str, call: Call) -> Pending:
        """Start adding up `t` over the members, or taking the maximum: bitwise the same result on all of them."""
        if op == "sum" and self._gloo(group) and t.nbytes < NATIVE_REDUCE_FROM_BYTES:
            return self._reduce_by_chunks(t, group, call)
        result = t.clone(memory_format=torch.contiguous_format)
        chunk = -(-t.numel() // group.size) * t.element_size()
        self._count(call, 2 * (group.size - 1) * chunk)
        kind = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        work = dist.all_reduce(result, op=kind, group=group.process_group, async_op=True)
        return Pending([work], lambda: result, call)

    def broadcast(self, t: Tensor, group: Group, root: int, call: Call) -> Pending:
        """Start sending `t` of the member at place `root`; only its values are read."""
        result = t.clone(memory_format=torch.contiguous_format)
        if group.index != root:
            self._count(call, result.nbytes)
        work = dist.broadcast(_raw(result), src=group.ranks[root], group=group.process_group, async_op=True)
        return Pending([work], lambda: result, call)

    def reduce_to(self, t: Tensor, group: Group, root: int, call: Call) -> Pending:
        """Start adding up `t` on the member at place `root`; the result elsewhere is zeros over one element of storage."""
        t = t.contiguous()
        if group.index != root:
            work = group.process_group.send([_raw(t)], self._row(group, root), self._tag(group))
            return Pending([work], lambda: t.new_zeros(()).expand(t.shape), call, direct=True)
        rows = t.new_empty((group.size, *t.shape))
        rows[self._row(group, root)] = t
        self._count(call, (group.size - 1) * t.nbytes)
        tag = self._tag(group)
        others = [row for row in range(group.size) if row != self._row(group, root)]
        works = [group.process_group.recv([_raw(rows[row])], row, tag) for row in others]
        return Pending(works, lambda: _total(rows, group), call, direct=True)

    def _reduce_by_chunks(self, t: Tensor, group: Group, call: Call) -> Pending:
        """Add chunk `i` up on member `i`, then gather the chunks: two messages, counted as one."""
        chunk, uncounted = -(-t.numel() // group.size), replace(call, counted=False)
        padded = torch.nn.functional.pad(t.reshape(-1), (0, chunk * group.size - t.numel()))
        self._count(call, 2 * (group.size - 1) * chunk * t.element_size())
        first = self.scatter_sum(padded.view(group.size, chunk), group, uncounted)
        total = first.finish

        def finish() -> Tensor:
            rows = self.wait(self.gather_rows(total(), group, uncounted))
            return rows.reshape(-1)[: t.numel()].view(t.shape)

        first.finish = finish
        return first

    def _exchange(self, sent: Tensor, rows: Tensor, group: Group, call: Call) -> Pending:
        work = dist.all_to_all_single(_raw(rows), _raw(sent), group=group.process_group, async_op=True)
        return Pending([work], lambda: rows, call)

    def _send_and_receive(self, t: Tensor, rows: Tensor, group: Group, call: Call) -> Pending:
        me, tag, process_group = self._row(group, group.index), self._tag(group), group.process_group
        shifts = range(1, group.size)
        works = [process_group.recv([_raw(rows[(me - n) % group.size])], (me - n) % group.size, tag) for n in shifts]
        works += [process_group.send([_raw(t)], (me + n) % group.size, tag) for n in shifts]
        rows[me] = t
        return Pending(works, lambda: rows, call, direct=True)

    def _row(self, group: Group, member: int) -> int:
        return group.order[member] if group.order else member

    def _tag(self, group: Group) -> int:
        """Number the direct messages of a group, so that two that are under way are not confused."""
        key = id(group.process_group)
        self._tags[key] = self._tags.get(key, 0) + 1
        return self._tags[key]

    def _gloo(self, group: Group) -> bool:
        return backend_name(group.process_group, self.device) == "gloo"

    def _count(self, call: Call, num_bytes: int) -> None:
        if call.counted:
            record.received(rank=self.rank, op=call.op, axis=call.axis, num_bytes=num_bytes, stage=call.stage)


def _raw(t: Tensor) -> Tensor:
    """View a contiguous tensor as bytes: a move needs no dtype of its backend."""
    return t.reshape(-1).view(torch.uint8)


def _total(rows: Tensor, group: Group) -> Tensor:
    """Add up rows in the order of the members, as every runtime does."""
    members: Sequence[Tensor] = group.by_member(rows)
    total = members[0] + members[1]
    for member in members[2:]:
        total += member
    return total
