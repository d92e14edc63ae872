"""A world in which one rank dies in the middle of a step; each survivor must be told within a minute."""

from __future__ import annotations

import os
import time

import torch.distributed as dist

from partir.errors import RankError
from tests.distributed_checks import mlp_on

DEAD = 3


def check_survivors_are_told(rank: int) -> None:
    run, weights, x, _ = mlp_on((2, 2, 2), "low")
    run(x, *weights.parameters())[0].backward()
    dist.barrier()
    began = time.monotonic()
    try:
        loss = run(x, *weights.parameters())[0]
        if rank == DEAD:
            os._exit(1)
        loss.backward()
    except RankError as error:
        text = str(error)
        assert time.monotonic() - began < 30, text
        assert f"rank {rank} stopped at %" in text and "of the backward of call " in text, text
        assert f"No word from rank {DEAD}" in text, text
        return
    raise AssertionError(f"rank {rank} was not told")
