"""The benchmarks' instruments, on cases whose answer is known."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measure import CountBytes, peak_bytes

MEBI = 2**20
FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(FOLDER / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_planning_prints_every_pass() -> None:
    printed = run("planning.py", *"--mesh 2,2,2 --layers 1 2 --hidden 32 --heads 4 --batch 4 --seq 16 --vocabulary 64 --repeats 1".split())
    assert all(name in printed for name in ("trace", "annotate_layouts", "differentiate", "total", "growth"))


def test_choosing_a_mesh_is_timed() -> None:
    sizes = "--layers 1 --hidden 32 --heads 4 --batch 8 --seq 16 --vocabulary 64"
    printed = run("choosing_meshes.py", *f"--ranks 2 --by bytes {sizes}".split())
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]
    assert [row[:3] for row in rows] == [["2", "bytes", "4"]]


@pytest.mark.slow
def test_random_numbers_are_timed_side_by_side() -> None:
    printed = run("random_numbers.py", *"--rows 8 --columns 8 --repeats 1".split())
    assert all(word in printed for word in ("torch", "exact / fast", "dropout", "rand_like", "randn_like"))


@pytest.mark.slow
def test_peers_compute_the_same_losses() -> None:
    sizes = "--ranks 2 --batch 4 --seq 16 --hidden 32 --heads 4 --layers 1 --vocabulary 64 --rounds 1 --steps 1"
    printed = run("peers.py", *f"--peers ddp fsdp tp --partir-mesh 1,2,1 {sizes}".split())
    rows = [line.split("│") for line in printed.splitlines() if line.startswith("│")]
    losses = [float(row[-2]) for row in rows if row[-2].strip()]
    assert len(losses) == 4 and max(losses) - min(losses) < 2e-5


def test_peak_counts_what_is_alive_during_the_step() -> None:
    def prepare() -> Callable[[], object]:
        kept = torch.zeros(MEBI)  # 4 MiB
        torch.zeros(4 * MEBI)  # freed before the step

        def step() -> Tensor:
            temporary = torch.zeros(MEBI // 2)  # 2 MiB
            return temporary + 1 + kept[0]  # 2 MiB at a time, two of them with the temporary one

        return step

    assert peak_bytes(prepare) == pytest.approx(10 * MEBI, rel=1e-3)


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """This process is rank 0 of 8; the others do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("eight_ranks")
def test_bytes_of_each_collective() -> None:
    block, whole = torch.zeros(100), torch.zeros(800)  # 400 and 3200 bytes
    expected = {
        "all_reduce": (lambda: dist.all_reduce(whole), 2 * 7 * 400),
        "all_gather": (lambda: dist.all_gather_single(whole, block), 7 * 400),
        "all_gather_list": (lambda: dist.all_gather([torch.zeros(100) for _ in range(8)], block), 7 * 400),
        "reduce_scatter": (lambda: dist.reduce_scatter_single(block, whole), 7 * 400),
        "all_to_all": (lambda: dist.all_to_all_single(torch.zeros(800), whole), 7 * 400),
        "send": (lambda: dist.send(block, 1), 0),
        "receive": (lambda: dist.recv(block, 1), 400),
        "barrier": (dist.barrier, 0),
    }
    for name, (call, num_bytes) in expected.items():
        with CountBytes() as count:
            call()
        assert count.received == num_bytes, name


@pytest.mark.usefixtures("eight_ranks")
def test_bytes_of_functional_collectives_in_a_smaller_group() -> None:
    pair: Any = dist.new_group([0, 1])
    with CountBytes() as count:
        torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_gather_into_tensor(torch.zeros(100), 2, pair.group_name)
        )
    assert (count.received, count.num_collectives) == (400, 1)


@pytest.mark.usefixtures("eight_ranks")
def test_a_collective_without_a_formula_is_an_error() -> None:
    with CountBytes(), pytest.raises(NotImplementedError, match="the bytes of c10d.gather_ are not known"):
        dist.gather(torch.zeros(4), [torch.zeros(4) for _ in range(8)])
