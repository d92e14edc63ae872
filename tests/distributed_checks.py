"""What each of 8 gloo ranks checks. A function runs on every rank at once and takes its rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import Node

from partir.blocks import is_owner, shard
from partir.collectives import lockstep, overload
from partir.errors import RankError
from partir.layout import Layout
from partir.mesh import Mesh
from partir.overlap import AHEAD, RESULTS_AHEAD
from partir.passes.differentiate import differentiate
from partir.program import Program
from partir.runtime.bind_collectives import bind_collectives
from partir.runtime.distributed import DistributedProgram
from partir.runtime.parameters import (
    full_gradient,
    full_tensor,
    load_optimizer_state_dict,
    local_block,
    optimizer_state_dict,
)
from partir.runtime.record import record_communication
from partir.runtime.session import Session
from partir.runtime.simulated import SimulatedProgram
from partir.runtime.torch_dtensor import local_of, make_dtensor, spec_of
from tests.hand_lowered import HandLowered, mlp

CPU = torch.device("cpu")


def make_program(hand: HandLowered, results: Sequence[tuple[Node, str]], memory: Any) -> Program:
    module, inputs, outputs = hand.finish(results)
    derived = differentiate(module, hand.mesh, inputs, outputs, memory)
    takes = zip(outputs, derived.differentiable, strict=True)
    outputs = tuple(replace(slot, differentiable=differentiable) for slot, differentiable in takes)
    return Program(hand.mesh, memory, inputs, outputs, derived.forward, derived.backward, derived.num_outputs)


def compile_mlp(sizes: tuple[int, ...], memory: str) -> Program:
    hand = mlp(Mesh.parse(sizes), hidden=48)
    loss = list(hand.graph.nodes)[-1]
    return make_program(hand, [(loss, "f64[]"), (hand.named["y"], "f64[48@x.y, 24@z]")], memory)


class Weights(torch.nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        for slot in program.inputs:
            if slot.kind == "parameter":
                value = torch.randn(slot.shape, dtype=slot.dtype, generator=generator)
                self.register_parameter(slot.name.replace(".", "_"), torch.nn.Parameter(value))


def start_session(sizes: tuple[int, ...]) -> Session:
    return Session(Mesh.parse(sizes), CPU, None)


def mlp_on(sizes: tuple[int, ...], memory: str) -> tuple[DistributedProgram, Weights, Tensor, Session]:
    program, session = compile_mlp(sizes, memory), start_session(sizes)
    weights = Weights(program)
    session.distribute(weights, "test")
    run = session.bind(program)
    laid = [slot for slot in program.inputs if slot.kind == "parameter"]
    session.lay([(p, slot.layout) for p, slot in zip(weights.parameters(), laid, strict=True)])
    x = torch.randn(48, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).requires_grad_()
    return run, weights, x, session


def relative(actual: Tensor, expected: Tensor, floor: float = 1e-6) -> float:
    return float((actual - expected).abs().max()) / max(float(expected.abs().max()), floor)


def everyone_has(value: Tensor) -> bool:
    """Return whether a tensor is the same on all ranks, bit for bit."""
    rows = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, value.contiguous())
    return all(torch.equal(row, value) for row in rows)


def compare_mlp(sizes: tuple[int, ...], memory: str) -> None:
    run, weights, x, session = mlp_on(sizes, memory)
    mesh = session.mesh
    whole = [full_tensor(p).clone().requires_grad_() for p in weights.parameters()]
    twin = SimulatedProgram(run.program)
    with record_communication() as expected_log:
        other = x.detach().clone().requires_grad_()
        loss, y = twin(other, *whole)
        (loss + (y * y).sum()).backward()
    with record_communication() as log:
        loss_here, y_here = run(x, *weights.parameters())
        (loss_here + cast(DTensor, y_here).full_tensor().square().sum()).backward()
    expected = [event for event in expected_log.events if event.rank == dist.get_rank()]
    assert sorted(map(str, log.events)) == sorted(map(str, expected))
    assert relative(loss_here.detach(), loss.detach()) < 1e-12
    assert everyone_has(loss_here.detach())
    assert isinstance(y_here, DTensor) and relative(y_here.full_tensor(), y) < 1e-12
    assert x.grad is not None and relative(x.grad, cast(Tensor, other.grad)) < 1e-10
    for p, q in zip(weights.parameters(), whole, strict=True):
        assert isinstance(p.grad, DTensor) and p.grad.placements == cast(DTensor, p).placements
        assert relative(cast(Tensor, full_gradient(p)), cast(Tensor, q.grad)) < 1e-10
        assert cast(DTensor, p).to_local().numel() * mesh.size == p.numel() * mesh["data"]


def check_mlp_222(rank: int) -> None:
    for memory in ("low", "fast"):
        compare_mlp((2, 2, 2), memory)


def check_mlp_other_meshes(rank: int) -> None:
    for sizes in ((8, 1, 1), (2, 2, 1, 2)):
        compare_mlp(sizes, "low")


COLLECTIVES: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("all_gather", (3, 4), {"dim": 0}),
    ("all_gather", (3, 6), {"dim": 1, "blocks": 3}),
    ("all_gather_same", (2, 3), {"dim": 1}),
    ("reduce_scatter", (48, 2), {"dim": 0}),
    ("reduce_scatter", (2, 48), {"dim": 1, "blocks": 3}),
    ("reduce_scatter", (2, 48), {"dim": -1}),
    ("all_reduce", (5,), {"op": "sum"}),
    ("all_reduce", (), {"op": "sum"}),
    ("all_reduce", (2, 3), {"op": "max"}),
    ("slice", (3, 48), {"dim": 1, "blocks": 3}),
    ("slice", (48,), {"dim": 0, "varied": True}),
    ("zero_pad", (2, 6), {"dim": 1, "blocks": 2}),
    ("spread", (2, 2), {}),
    ("settle", (2, 2), {}),
    ("once", (2, 2), {}),
    ("all_to_all", (3, 16), {"src": 0, "dst": 1}),
    ("all_to_all", (6, 48), {"src": 0, "dst": 1, "src_blocks": 2, "dst_blocks": 3}),
    ("all_gather", (200, 100), {"dim": 0}),
    ("all_gather", (20, 1000), {"dim": 1}),
]


def check_each_collective(rank: int) -> None:
    """Each collective, bound and run, equals its lockstep function, on one axis and on groups in either order."""
    mesh = Mesh.parse((2, 2, 2))
    session = Session(mesh, CPU, None)
    for axis in ("y", "z.x", "x.z", "y.x.z"):
        for op, shape, named in COLLECTIVES:
            blocks = [torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(8)]
            expected = lockstep.run(op, blocks, mesh, axis, **named)[rank]
            assert torch.equal(run_collective(session, op, blocks[rank], axis=axis, **named), expected), (op, axis, named)
    for op in ("broadcast", "reduce_to"):
        for axis, root in (("y", "z"), ("z", "y")):
            blocks = [torch.randn(4, generator=torch.Generator().manual_seed(r)) for r in range(8)]
            expected = lockstep.run(op, blocks, mesh, axis, root=root)[rank]
            assert torch.equal(run_collective(session, op, blocks[rank], axis=axis, root=root), expected), (op, axis)


def check_buckets(rank: int) -> None:
    mesh = Mesh.parse((2, 2, 2))
    session = Session(mesh, CPU, None)
    for op in ("all_gather_bucket", "reduce_scatter_bucket"):
        for axis in ("x", "z.x"):
            blocks = [[torch.randn(8, 3) + r, torch.randn(4) * r] for r in range(8)]
            for row in blocks:
                for t in row:
                    dist.broadcast(t, 0)
            blocks = [[t * (r + 1) for t in blocks[0]] for r in range(8)]
            expected = lockstep.run(op, blocks, mesh, axis)[rank]
            actual = run_collective(session, op, blocks[rank], axis=axis)
            assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True)), (op, axis)


def run_collective(session: Session, name: str, operand: Any, **named: Any) -> Any:
    """Run a graph of one collective through the bound code."""
    graph = torch.fx.Graph()
    many = isinstance(operand, list)
    operands = cast("list[Tensor]", operand) if many else [operand]
    placeholders = [graph.placeholder(f"t{index}") for index in range(len(operands))]
    for placeholder, block in zip(placeholders, operands):
        placeholder.meta["val"] = block
    result = graph.call_function(overload(name), (placeholders if many else placeholders[0],), named)
    graph.output(result)
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    return bind_collectives(module, "forward", session.groups, session.transport)(*operands)


def check_starts_early_waits_late(rank: int) -> None:
    """The bound code starts messages before the work that does not need them, and keeps few under way."""
    run, *_ = mlp_on((2, 2, 2), "low")
    kinds = [str(node.meta.get("message")) for node in run.forward.graph.nodes if node.op == "call_function"]
    under_way = [sum({"start": 1, "wait": -1}.get(kind, 0) for kind in kinds[: n + 1]) for n in range(len(kinds))]
    assert kinds[:2] == ["start", "start"] and max(under_way) <= AHEAD + RESULTS_AHEAD and under_way[-1] == 0
    assert "start_all_gather_y" in run.forward.code and "partir.all_gather" not in run.forward.code


def laid_parameter(session: Session, text: str) -> tuple[torch.nn.Linear, Tensor]:
    layout = Layout.parse(text)
    model = torch.nn.Linear(1, 1, bias=False)
    whole = torch.arange(float(torch.Size(layout.shape).numel())).view(layout.shape) + 1
    model.weight = torch.nn.Parameter(whole.clone())
    session.distribute(model, "test")
    before = model.weight
    session.lay([(model.weight, layout)])
    assert model.weight is before
    return model, whole


def check_permuted_and_diagonal_parameters(rank: int) -> None:
    """Stored order is the program's block; all that leaves is in the original order; optimizers and norms are right."""
    session = Session(Mesh.parse((2, 2, 2)), CPU, None)
    for text in ("f32[(3*8@y)@x, 4@z]", "f32[(3*8@z)@x, 4@y]", "f32[8@y.x] on y=z", "f32[24@y.z.x]", "f32[8@z.x, 4@y]"):
        model, whole = laid_parameter(session, text)
        weight, layout = cast(DTensor, model.weight), Layout.parse(text)
        assert torch.equal(local_block(weight, layout, session.mesh, rank), _own(whole, layout, session.mesh, rank)), text
        assert torch.equal(full_tensor(weight), whole), text
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        twin = torch.nn.Parameter(whole.clone())
        other = torch.optim.AdamW([twin], lr=0.1)
        weight.grad = make_dtensor(local_of(weight) * 0.5, cast(Any, spec_of(weight)))
        twin.grad = whole * 0.5
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        expected = torch.nn.utils.clip_grad_norm_([twin], 1.0)
        assert relative(norm.full_tensor() if isinstance(norm, DTensor) else norm, expected) < 1e-6, text
        optimizer.step()
        other.step()
        assert relative(full_tensor(weight), twin.detach()) < 1e-6, text
        moment = optimizer_state_dict(model, optimizer)["state"][0]["exp_avg"]
        assert relative(moment.full_tensor(), other.state_dict()["state"][0]["exp_avg"]) < 1e-6, text
        load_optimizer_state_dict(model, optimizer, other.state_dict())
        again = optimizer_state_dict(model, optimizer)["state"][0]["exp_avg"]
        assert torch.equal(again.full_tensor(), other.state_dict()["state"][0]["exp_avg"]), text


def _own(whole: Tensor, layout: Layout, mesh: Mesh, rank: int) -> Tensor:
    if is_owner(layout, mesh, rank):
        return shard(whole, layout, mesh, rank)
    return torch.zeros(layout.local_shape(mesh))


def check_values_come_from_rank_0(rank: int) -> None:
    session = Session(Mesh.parse((2, 2, 2)), CPU, None)
    torch.manual_seed(rank)
    model = torch.nn.BatchNorm1d(4)
    model.weight.data.normal_()
    model.running_mean.normal_()  # pyright: ignore
    session.distribute(model, "test")
    assert everyone_has(full_tensor(model.weight)) and everyone_has(cast(Tensor, model.running_mean))


def check_disagreement_is_an_error_everywhere(rank: int) -> None:
    session = Session(Mesh.parse((2, 2, 2)), CPU, None)
    text = "f32[4]" if rank != 5 else "f32[6]"
    message = error_of(lambda: session.agree_on_call(text, rank != 3, 0, 0))
    assert "rank 5 from the others" in message and "f32[6]" in message and "ranks 0, 1, 2, 3, 4, 6, 7" in message
    batch = torch.ones(4) * (rank // 4)
    message = error_of(lambda: session.agree_on_contents(["ids"], [batch]))
    assert "contents of the inputs differs between ranks: ranks 4, 5, 6, 7" in message
    assert not session.agree_on_call("same", rank != 3, rank, 0).ready
    assert session.agree_on_call("same", True, 10 + rank, 6).seed == 10
    message = error_of(lambda: session.agree_on_call("same", True, 0, 7 if rank == 2 else 6))
    assert "the number of this call differs between ranks: rank 2 from the others" in message and "rank 2: call 8" in message
    error = ValueError("no memory") if rank == 2 else None
    try:
        session.agreement.succeed("compiling", error)
        raise AssertionError("must raise")
    except ValueError:
        assert rank == 2
    except RankError as caught:
        assert rank != 2 and "rank 2: ValueError: no memory" in str(caught)


def error_of(call: Any) -> str:
    try:
        call()
    except RankError as error:
        return str(error)
    raise AssertionError("no error")
