"""What a user calls: `parallelize`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from partir import rules as rule_files
from partir.errors import PartirError
from partir.follow_plan import requested
from partir.inference import ordinary_tensors
from partir.initial_tape import Initialize
from partir.initial_values import InitialValues, default_device, materialize
from partir.module import ParallelModule, parallel_class, parallelized
from partir.options import Options, memory_text
from partir.parallelized import Compiler, Parallelized
from partir.passes.accumulating import accumulating
from partir.passes.prove_lengths import prove_lengths
from partir.passes.trace import flatten_inputs, input_names
from partir.plan_document import PlanDocument
from partir.random_numbers import as_int64
from partir.runtime.parameters import full_tensor, needs_conversion, to_original, to_stored
from partir.signature import positional
from partir.suggest import automatic_mesh

if TYPE_CHECKING:
    from partir.plans import Plan

Model = TypeVar("Model", bound=nn.Module)


def parallelize(
    model: Model,
    mesh: Any = None,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    memory: str | int = "low",
    vectors: str = "balanced",
    outputs: str = "auto",
    check_inputs: str = "first",
    check_finite: str = "never",
    pin: Mapping[str, str] | None = None,
    rules: str | Path | Iterable[str | Path] | None = None,
    rng: str = "exact",
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    timeout: float | None = None,
    plan: Plan | PlanDocument | str | os.PathLike[str] | None = None,
    initialize: Initialize | None = None,
) -> Model:
    """Run a module on a mesh of ranks, with the loss and gradients that it has on one device.

    In place and returned: class, attributes, parameter names and `state_dict` keys stay. With torch.distributed initialised and a world
    of the mesh's size this process is one rank; otherwise it runs all of them.

    Args:
        model: any module.
        mesh: `(x, y, z)`, `(data, x, y, z)`, sizes by axis name, a named DeviceMesh, or "auto": the mesh of this world that receives
            the fewest bytes.
        example_inputs: a tensor or a tuple of arguments: compile now. Without, at the first call.
        example_kwargs: keyword arguments of the example.
        memory: "low" keeps shards and gathers again in the backward, "fast" keeps what was gathered; a number of bytes, "40GB", chooses
            for each value between keeping it, gathering it and computing it again, so that a step with AdamW fits on each rank.
        vectors: "balanced" splits vectors over all ranks, "diagonal" is the paper's placement (y == z).
        outputs: "whole", "sharded" (DTensors, no gather), or "auto": 0-d tensors whole; others whole unless a 0-d loss is returned
            and gradients are recorded.
        check_inputs: compare the inputs' contents between ranks at the "first" call of a signature, "always" or "never".
        check_finite: "loss": a 0-d output that is nan or inf is an error at once; "nodes": and the call is run once more to name the
            node, the line and the rank that made the first one.
        pin: layouts by name pattern, `{"blocks.*.fc1.weight": "f[out@y.x, in@z]"}`.
        rules: paths of rule files; in this model their rules come before those of `partir.rules.add` and the built-in ones.
        rng: "exact": the same random numbers on every mesh, and in eager calls under `partir.same_randomness`. "fast": each block is
            drawn by torch's own generator, the same on all ranks that hold it; on another mesh the numbers are others.
        compute_dtype: cast floating parameters and inputs to it, blocks before they are gathered: `torch.bfloat16` beside float32
            parameters keeps master weights, computes and gathers in bfloat16 and returns float32 gradients. Buffers stay as they are.
        reduce_dtype: make sums between ranks in it where it is wider than what is added, `torch.float32`.
        timeout: the longest wait for another rank in seconds; by default that of `init_process_group`.
        plan: a plan, or the path of a saved and perhaps edited one: mesh, memory, vectors, outputs, rng and layouts are its own.
        initialize: of a model built under `torch.device("meta")`: `initialize(model)` runs after its modules' own init functions
            (`reset_parameters`, `_init_weights`), for what only `__init__` would have set.

    Raises:
        MeshError: the mesh does not exist, or the world size is neither 1 nor its size.
        RuleError: a rule file is no text, or says what cannot be.
        PlanError: the plan is no plan, is of another model, or contradicts what else is given.
        PartirError: the module is already parallelized, or anything that compiling it finds.
        RankError: ranks differ in model or options.
        NonFiniteError: by a call, where `check_finite` asks for it.
    """
    if isinstance(model, ParallelModule):
        raise PartirError(f"{type(model).__name__} is already parallelized over {parallelized(model).mesh}.")
    if "forward" in model.__dict__:
        raise PartirError(
            f"{type(model).__name__} has a forward set on the instance, which would hide the compiled one; set it on the class."
        )
    limit = _limit(timeout)
    files = rule_files.read(rules)
    given = Options(
        memory=memory_text(memory),
        vectors=vectors,
        outputs=outputs,
        check_inputs=check_inputs,
        check_finite=check_finite,
        pin=dict(pin or {}),
        rng=rng,
        timeout=limit,
        rules=files,
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
    )
    if isinstance(mesh, str) and mesh == "auto" and plan is None:
        mesh = automatic_mesh(model, example_inputs, example_kwargs, given)
    ranks, options, compile_program = requested(model, mesh, plan, given)
    compiler = Compiler(compile_program, flatten_inputs, input_names, prove_lengths, accumulating)
    original = cast("type[nn.Module]", type(model))
    state = Parallelized(ranks, options, original, compiler)
    with ordinary_tensors():
        _give_values(model, state, initialize)
        _distribute(model, state)
    model.__dict__["_partir"] = state
    model.__class__ = cast(Any, parallel_class(original))
    if example_inputs is not None or example_kwargs is not None:
        _prepare(model, state, positional(example_inputs), dict(example_kwargs or {}))
    return model


def _limit(timeout: float | None) -> timedelta | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(cast(object, timeout), (int, float)) or not 0 < timeout < 1e9:
        raise PartirError(f"timeout={timeout!r} is no number of seconds above 0.")
    return timedelta(seconds=timeout)


def _prepare(model: nn.Module, state: Parallelized, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compile for the example; a refusal leaves a simulated module as it was. A rank's parameters are DTensors by then."""
    try:
        state.prepare(model, args, kwargs)
    except Exception:
        if state.session(model) is None:
            model.__class__ = state.original
            del model.__dict__["_partir"]
        raise


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return whole tensors in the original order, on the CPU of rank 0; `{}` elsewhere. Every rank must call it."""
    session = parallelized(model).session(model)
    tensors = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    whole: dict[str, torch.Tensor] = {}
    for name, t in tensors.items():
        value = full_tensor(t)
        if session is None or session.groups.rank == 0:
            whole[name] = value.cpu()
    return whole


def _give_values(model: nn.Module, state: Parallelized, initialize: Initialize | None) -> None:
    """Materialize a model that is on meta: on a rank each parameter awaits its block until its layout is known."""
    if not any(t.is_meta for t in [*model.parameters(), *model.buffers()]):
        if initialize is not None:
            raise PartirError(f"{type(model).__name__} has values, so initialize= is not for it: only a model on meta is initialized here.")
        return
    session = state.session(model)
    device = default_device() if session is None else session.device
    seed = as_int64(torch.initial_seed()) if session is None else session.seed()
    materialize(model, InitialValues(model, seed, initialize), device, whole=session is None)


def _distribute(model: nn.Module, state: Parallelized) -> None:
    """Make this process a rank: parameters become DTensors, state dicts convert."""
    session = state.session(model)
    if session is None:
        return
    model.to(session.device)
    session.distribute(model, f"{state.original.__qualname__} on mesh {state.mesh} with {state.options}")
    cast(Any, model).register_state_dict_post_hook(_leave_in_original_order)
    cast(Any, model).register_load_state_dict_pre_hook(_enter_in_stored_order)


def _leave_in_original_order(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if isinstance(value, DTensor) and needs_conversion(parameter):
            state_dict[prefix + name] = to_original(value, cast(Any, parameter).partir_layout)


def _enter_in_stored_order(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if not isinstance(value, torch.Tensor) or not isinstance(parameter, DTensor) or value.shape != parameter.shape:
            continue
        if needs_conversion(parameter) or not isinstance(value, DTensor):
            state_dict[prefix + name] = to_stored(value, parameter)
