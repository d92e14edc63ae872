"""Agreement: ranks compare what they are about to do, so that a difference is an error on all of them and never a wrong number.

Each comparison is one message of three numbers a rank on a CPU group: an 8-byte hash, this rank's seed (rank 0's is used by all), and
its call counter (a rank that resumed from another checkpoint has another). Only when hashes differ do the texts behind them travel.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from partir.errors import RankError
from partir.runtime.differences import difference, other_calls
from partir.runtime.groups import Groups
from partir.runtime.torch_dtensor import dist
from partir.runtime.transport import Call, Transport

Value = TypeVar("Value")
# Each rank of a machine has a device of its own, which programs and signatures name: cuda:3, device(type='cuda', index=3).
_DEVICE_NUMBER = re.compile(r"(\b(?:cuda|xpu|hpu|npu|mtia|privateuseone)|device\(type='\w+')(?::\d+|, index=\d+)")


@dataclass(frozen=True)
class Agreed:
    """What a comparison settled.

    Args:
        seed: rank 0's seed.
        ready: whether every rank said that it was ready.
    """

    seed: int
    ready: bool


class Agreement:
    """Compares one rank's texts with the others'.

    Args:
        groups: process groups over the mesh.
        transport: sends on the CPU.
    """

    def __init__(self, groups: Groups, transport: Transport) -> None:
        self._group = groups.control()
        self._transport = transport

    def compare(self, what: str, text: str, *, ready: bool = True, seed: int = 0, calls: int = 0) -> Agreed:
        """Raise on every rank if a text differs among them.

        Args:
            what: what is compared, for the error: "the signature of a call".
            text: this rank's.
            ready: a flag that travels with it.
            seed: this rank's seed.
            calls: how many calls this rank has made.

        Raises:
            RankError: texts or call counters differ; the message lists them by rank.
        """
        if self._group.size == 1:
            return Agreed(seed, ready)
        text = _DEVICE_NUMBER.sub(r"\1", text)
        # The lowest bit is the flag, so that hash and flag are 8 bytes.
        number = (_hash(f"{what}\n{text}") & ~1) | int(ready)
        mine = torch.tensor([number, seed, calls], dtype=torch.int64)
        where = Call("comparison", "all", "", what, counted=False, label=f"the comparison of {what}")
        rows = self._transport.wait(self._transport.gather_rows(mine, self._group, where)).tolist()
        if any((row[0] ^ number) & ~1 for row in rows):
            raise RankError(difference(self.exchange(f"{what}: {text}"), what))
        if any(row[2] != calls for row in rows):
            raise RankError(other_calls([row[2] for row in rows]))
        return Agreed(rows[0][1], all(row[0] & 1 for row in rows))

    def compare_blocks(self, names: Sequence[str], blocks: Sequence[tuple[int, Tensor]]) -> None:
        """Raise on every rank if ranks that hold the same block of a tensor hold other contents.

        Args:
            names: of the tensors.
            blocks: of each, which block this rank holds, and the block.

        Raises:
            RankError: names a tensor and two ranks.
        """
        if self._group.size == 1 or not names:
            return
        mine = torch.tensor([[number, _hash(content_hash([block]))] for number, block in blocks], dtype=torch.int64)
        where = Call("agreement", "all", "comparison of the blocks of the inputs", "agreed", counted=False)
        rows = self._transport.wait(self._transport.gather_rows(mine, self._group, where)).tolist()
        for index, name in enumerate(names):
            first: dict[int, int] = {}
            for rank, row in enumerate(rows):
                other = first.setdefault(row[index][0], rank)
                if rows[other][index][1] != row[index][1]:
                    raise RankError(
                        f"{name}: ranks {other} and {rank} hold the same block of a DTensor input, and its contents differ. Ranks that "
                        "differ only along axes that do not split the batch must pass the same samples: see partir.batch_slice."
                    )

    def succeed(self, what: str, error: Exception | None) -> None:
        """Tell the others whether a step worked here, and raise everywhere if it did not somewhere.

        Raises:
            Exception: this rank's own error.
            RankError: another rank's.
        """
        if self.compare(what, "", ready=error is None).ready:
            return
        texts = self.exchange("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        raise RankError(f"{what} failed on other ranks:\n    " + "\n    ".join(failed))

    def exchange(self, mine: Value) -> list[Value]:
        """Return what every rank brings; nothing that is compared, so no rank may leave out the call."""
        if self._group.size == 1:
            return [mine]
        values: list[Any] = [None] * self._group.size
        with self._transport.failures.told("the exchange of what ranks found"):
            dist.all_gather_object(values, mine, group=self._group.process_group)
        return values


def content_hash(tensors: Sequence[Tensor]) -> str:
    """Return a hash of what tensors hold."""
    digest = hashlib.blake2b(digest_size=8)
    for t in tensors:
        raw = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(raw.numpy().data)
    return digest.hexdigest()


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
