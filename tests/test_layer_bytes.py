"""A Transformer layer moves what three_d.md says, the norms' two numbers a row, and its vectors: nothing else.

Counted where the data moves, in a running GPT; the same numbers are read off the compiled graphs.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, cast

import pytest
import torch

from partir.collectives.traffic import received_bytes
from partir.graph import collective_name, is_collective
from partir.mesh import Mesh
from partir.runtime.record import CommunicationLog, record_communication
from tests.compiled import GPT_BATCH, GPT_HIDDEN, GPT_SEQUENCE, compiled_gpt, gpt, run

ITEM = 8
CASES = [((2, 2, 2), "low"), ((2, 2, 2), "fast"), ((2, 3, 4), "low"), ((1, 1, 4), "fast")]
Bytes = dict[tuple[str, str], int]


@lru_cache
def counted(sizes: tuple[int, ...], memory: str, layers: int) -> CommunicationLog:
    model, args = gpt(layers)
    with record_communication() as log:
        run(compiled_gpt(sizes, memory, layers), model, args)[0].backward()
    return log


def by_axis(log: CommunicationLog, rank: int) -> Bytes:
    """Sum what a rank received by stage and axis; a group over several axes is its own axis."""
    totals: Bytes = {}
    for event in log.events:
        if event.rank == rank:
            totals[event.stage, event.axis] = totals.get((event.stage, event.axis), 0) + event.bytes
    return totals


def layer_bytes(mesh: Mesh, memory: str) -> Bytes:
    """What one rank receives for one layer, by stage and axis: each number below is a term of three_d.md."""
    x, y, z, ranks = mesh["x"], mesh["y"], mesh["z"], mesh.size
    tokens, h = GPT_BATCH * GPT_SEQUENCE, GPT_HIDDEN
    low = memory == "low"

    # Products, elements on all ranks together: qkv (h -> 3h) and fc1 (h -> 4h) in state y, proj (h -> h) and fc2 (4h -> h)
    # in state z. Along y: A of qkv and fc1, C of proj and fc2. Along z: C of qkv and fc1 (3 + 4), A of proj and fc2 (1 + 4).
    # Along x every weight: 3 + 1 + 4 + 4. The backward moves the same, and A and B once more where shards were kept.
    along_y, along_z, along_x = 4 * tokens * h, 12 * tokens * h, 12 * h * h
    again_y, again_z, again_x = 2 * tokens * h, 5 * tokens * h, 12 * h * h
    products = {
        ("forward", "y"): (y - 1) * along_y,
        ("forward", "z"): (z - 1) * along_z,
        ("forward", "x"): (x - 1) * along_x,
        ("backward", "y"): (y - 1) * (along_y + low * again_y),
        ("backward", "z"): (z - 1) * (along_z + low * again_z),
        ("backward", "x"): (x - 1) * (along_x + low * again_x),
    }
    total = {key: elements // ranks for key, elements in products.items()}

    # Two norms, two numbers a row each, all-reduced along z (which splits hidden) as reduce-scatter and all-gather of chunks.
    rows = tokens // (x * y)
    norms = 2 * 2 * 2 * (z - 1) * math.ceil(rows / z)
    total["forward", "z"] += norms
    total["backward", "z"] += norms

    # Vectors. Norm weights and biases (4 h) and the biases of proj and fc2 (2 h) rest h@z.x, the biases of qkv and fc1
    # (3 h + 4 h) n@y.z.x. All are gathered along x in one message, and their gradients reduce-scattered; with shards kept
    # the message is sent again. The biases of qkv and fc1 enter the sums pending over z in parts: nothing along z.
    vectors = (x - 1) * (6 * h // (z * x) + 7 * h // ranks)
    total["forward", "x"] += vectors
    total["backward", "x"] += vectors * (2 if low else 1)
    # The norms' vectors are whole along y: their gradients are summed there, block by block.
    total["backward", "y"] += 4 * 2 * (y - 1) * math.ceil(h // (z * x) / y)
    return {key: elements * ITEM for key, elements in total.items() if elements}


@pytest.mark.parametrize("sizes, memory", CASES)
def test_a_layer_moves_the_formula_the_norms_and_the_vectors(sizes: tuple[int, ...], memory: str) -> None:
    mesh = Mesh.parse(sizes)
    one, two = counted(sizes, memory, 1), counted(sizes, memory, 2)
    for rank in (0, mesh.size - 1):
        before, after = by_axis(one, rank), by_axis(two, rank)
        difference = {key: after[key] - before.get(key, 0) for key in after}
        assert {key: value for key, value in difference.items() if value} == layer_bytes(mesh, memory)


@pytest.mark.parametrize("sizes, memory", CASES)
def test_counted_bytes_are_those_read_off_the_graphs(sizes: tuple[int, ...], memory: str) -> None:
    mesh = Mesh.parse(sizes)
    program, log = compiled_gpt(sizes, memory, 1).program, counted(sizes, memory, 1)
    for stage, graph in (("forward", program.forward), ("backward", program.backward)):
        assert graph is not None
        planned = sum(node_bytes(node, mesh) for node in graph.graph.nodes if is_collective(node))
        for rank in range(mesh.size):
            assert log.bytes(rank=rank, stage=stage) == planned


def node_bytes(node: torch.fx.Node, mesh: Mesh) -> int:
    if collective_name(node) == "coordinate":
        return 0
    axis = str(node.args[1] if len(node.args) > 1 else node.kwargs["axis"])
    read = [cast(Any, operand).meta["val"] for operand in node.all_input_nodes]
    shapes = [tuple(value.shape) for value in read] if collective_name(node).endswith("_bucket") else tuple(read[0].shape)
    return received_bytes(collective_name(node), shapes, read[0].dtype, mesh.extent(axis.split(".")))
