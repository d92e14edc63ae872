"""What a parallelized module keeps: its mesh, its options, and a compiled program for each signature of its calls.

Programs are compiled at the first call of each signature: structure, shapes, dtypes, Python numbers, training flags, grad mode, what
requires a gradient. Parameter layouts are fixed by the first.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from partir.inference import may_be_saved, ordinary_tensors
from partir.layout import Layout
from partir.length_buckets import LengthBuckets
from partir.mesh import Mesh
from partir.non_finite import Seen, check_losses
from partir.options import Options
from partir.program import Program, Slot
from partir.random_numbers import as_int64, seed_tensor
from partir.runtime.accumulate import Accumulator, DistributedRunner, Runner, SimulatedRunner
from partir.runtime.initial_blocks import fill_left_out
from partir.runtime.session import Session, device_of, is_distributed
from partir.runtime.simulated import SimulatedProgram
from partir.signature import layout_of_dtensor, refuse_meta, signature_here, warn_of_changes

Change = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Compiler:
    """What a module needs of the compiler; `partir.api` gives it, for only it knows the passes.

    Args:
        compile: (model, args, kwargs, mesh, options, parameter layouts, layouts of DTensor inputs) -> compiled.
        flatten: (args, kwargs) -> (tensors, structure of the rest).
        names: (model, structure) -> a name for each of those tensors.
        prove: (model, tensors, structure, dims, length, options) -> that shorter calls may be padded to this one.
        accumulating: (compiled, options) -> the compiled call in two programs, `gather` and `batch`.
    """

    compile: Callable[..., Any]
    flatten: Callable[..., tuple[list[Tensor], Any]]
    names: Callable[..., list[str]]
    prove: Callable[..., Any]
    accumulating: Callable[..., Any]


@dataclass(frozen=True)
class Entry:
    """A compiled signature.

    Args:
        compiled: the compiler's result.
        run: takes one tensor an input slot, returns one an output slot.
        names: of the input tensors, in the order in which a call is taken apart.
    """

    compiled: Any
    run: Callable[..., tuple[Tensor, ...]]
    names: Sequence[str]


class Parallelized:
    """What a parallelized module keeps: mesh, options, compiled programs, parameter layouts and the call counter.

    Args:
        mesh: the ranks.
        options: what the user asked for.
        original: the module's own class.
        compiler: the compiler.
    """

    def __init__(self, mesh: Mesh, options: Options, original: type[nn.Module], compiler: Compiler) -> None:
        self.mesh = mesh
        self.options = options
        self.original = original
        self.compiler = compiler
        self.layouts: dict[str, Layout] = {}
        self.calls = 0
        self.lengths: LengthBuckets | None = None
        self.accumulators: dict[int, Accumulator] | None = None
        self._runners: dict[int, tuple[Runner, Runner]] = {}
        self._programs: dict[Any, Entry] = {}
        self._session: Session | None = None

    def session(self, model: nn.Module) -> Session | None:
        """Return this process's rank, None where all ranks are simulated."""
        if self._session is None and is_distributed(self.mesh):
            self._session = Session(self.mesh, device_of(model), self.options.timeout)
        return self._session

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module, padded where `length_buckets` is open."""
        return self.run(model, args, kwargs) if self.lengths is None else self.lengths.call(self, model, args, kwargs)

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], change: Change | None = None) -> Any:
        """Compile if the signature is new, then run the program and rebuild what forward returns, each tensor changed if asked."""
        leaves, structure = self.compiler.flatten(args, kwargs)
        with ordinary_tensors():
            entry, seed = self._entry(model, args, kwargs, leaves, structure)
        self.calls += 1
        program, traced = cast(Program, entry.compiled.program), entry.compiled.traced
        tensors = self._tensors(model, program, traced, dict(zip(entry.names, leaves)), seed)
        keeps = self.accumulators is not None and program.backward is not None and torch.is_grad_enabled()
        results = self._accumulator(model, entry).call(_others(program, tensors)) if keeps else entry.run(*tensors)
        if self.options.check_finite != "never":
            self._check_finite(model, entry, tensors, results[: traced.num_outputs])
        for index, name in cast("Sequence[tuple[int, str]]", traced.mutated_buffers):
            _write_buffer(model, name, results[index])
        returned = results[: traced.num_outputs]
        return traced.outputs.rebuild(returned if change is None else change(returned))

    def _check_finite(self, model: nn.Module, entry: Entry, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        session, run = self.session(model), cast(Any, entry.run)
        who = f"call {self.calls}" if session is None else f"rank {session.groups.rank}, call {self.calls}"

        def look() -> Seen:
            return run.look_at_nodes(*tensors) if session is None else session.look_at_nodes(run, tensors)

        check_losses(outputs, entry.compiled.program, who, look if self.options.check_finite == "nodes" else None)

    def _accumulator(self, model: nn.Module, entry: Entry) -> Accumulator:
        """Return what calls of a signature keep in the present block of `partir.accumulate`."""
        assert self.accumulators is not None
        if id(entry) not in self.accumulators:
            if id(entry) not in self._runners:
                split, session = self.compiler.accumulating(entry.compiled, self.options), self.session(model)
                self._runners[id(entry)] = _runner(split.gather, session), _runner(split.batch, session)
            gather, batch = self._runners[id(entry)]
            parameters = [model.get_parameter(slot.name) for slot in gather.program.inputs]
            self.accumulators[id(entry)] = Accumulator(gather, batch, parameters)
        return self.accumulators[id(entry)]

    def prepare(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """Compile for some inputs without running."""
        leaves, structure = self.compiler.flatten(args, kwargs)
        with ordinary_tensors():
            return self._entry(model, args, kwargs, leaves, structure)[0]

    def _entry(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Tensor], structure: Any
    ) -> tuple[Entry, tuple[int, int]]:
        """Return the program of a call and the seed and call number, on which all ranks agree."""
        text, key = signature_here(model, leaves, structure)
        seed, calls = torch.initial_seed(), self.calls
        found, session = self._programs.get(key), self.session(model)
        if found is None:
            warn_of_changes([known[0] for known in self._programs], text)
        if session is None:
            if found is None:
                compiled, names = self._compile(model, args, kwargs, leaves, structure), self.input_names(model, structure)
                self._keep_layouts(model, compiled.program)
                found = self._programs[key] = Entry(compiled, SimulatedProgram(compiled.program), names)
            return found, (seed, calls)
        block = "" if self.accumulators is None else "; inside partir.accumulate"
        agreed = session.agree_on_call(text + block, found is not None, as_int64(seed), calls)
        if self.options.check_inputs == "always" or (self.options.check_inputs == "first" and not agreed.ready):
            names = self.input_names(model, structure)
            plain = [(name, t) for name, t in zip(names, leaves) if not isinstance(t, DTensor)]
            session.agree_on_contents([name for name, _ in plain], [t for _, t in plain])
            session.agree_on_blocks([(name, t) for name, t in zip(names, leaves) if isinstance(t, DTensor)])
        if not agreed.ready or found is None:
            found = self._programs[key] = self._distribute(session, model, args, kwargs, leaves, structure, found)
        return found, (agreed.seed, calls)

    def _distribute(
        self,
        session: Session,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Tensor],
        structure: Any,
        known: Entry | None,
    ) -> Entry:
        compiled, error = None if known is None else known.compiled, None
        try:
            if compiled is None:
                compiled = self._compile(model, args, kwargs, leaves, structure)
        except Exception as caught:
            error = caught
        session.agreement.succeed("compiling", error)
        constants = {slot.name: slot.value for slot in cast(Any, compiled).traced.slots if slot.kind == "constant"}
        if constants:
            session.agree_on_constants(constants)
        run = session.bind(cast(Any, compiled).program)
        session.lay(self._keep_layouts(model, cast(Any, compiled).program))
        fill_left_out(model, self.mesh)
        return Entry(compiled, run, self.input_names(model, structure))

    def _compile(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Tensor], structure: Any
    ) -> Any:
        named = dict(zip(self.input_names(model, structure), leaves))
        given = {name: layout_of_dtensor(leaf, self.mesh) for name, leaf in named.items() if isinstance(leaf, DTensor)}
        refuse_meta(model, self.original, named)
        with class_of(model, self.original):
            return self.compiler.compile(model, args, kwargs, self.mesh, self.options, self.layouts, given)

    def programs(self) -> tuple[Program, ...]:
        """Return the programs compiled so far."""
        return tuple(cast(Program, entry.compiled.program) for entry in self._programs.values())

    def compiled(self) -> tuple[Any, ...]:
        """Return what the compiler made of each signature so far, in order."""
        return tuple(entry.compiled for entry in self._programs.values())

    def prove(self, model: nn.Module, leaves: list[Tensor], structure: Any, dims: Mapping[int, int], length: int) -> Any:
        """Prove that shorter calls may be padded to this one; see `partir.length_buckets`."""
        with class_of(model, self.original):
            return self.compiler.prove(model, leaves, structure, dims, length, self.options)

    def includes(self, model: nn.Module, proved: Any, length: int) -> bool:
        """Return whether a call of this length may be padded to the one that was proved."""
        with class_of(model, self.original):
            return proved.includes(length)

    def input_names(self, model: nn.Module, structure: Any) -> list[str]:
        """Return a name for each tensor of a call."""
        with class_of(model, self.original):
            return self.compiler.names(model, structure)

    def _keep_layouts(self, model: nn.Module, program: Program) -> list[tuple[nn.Parameter, Layout]]:
        """Fix the layouts of parameters that had none; return all of the program's."""
        laid: list[tuple[nn.Parameter, Layout]] = []
        for slot in program.inputs:
            if slot.kind == "parameter":
                self.layouts.setdefault(slot.name, slot.layout)
                laid.append((model.get_parameter(slot.name), slot.layout))
        return laid

    def _tensors(
        self, model: nn.Module, program: Program, traced: Any, inputs: Mapping[str, Tensor], seed: tuple[int, int]
    ) -> list[Tensor]:
        constants = {slot.name: slot.value for slot in traced.slots if slot.kind == "constant"}
        tensors = [_tensor(model, slot, constants, inputs, seed) for slot in program.inputs]
        if not torch.is_grad_enabled():
            return tensors
        # The backward reads what the forward read of a buffer, and not what the call writes into it at its end.
        written = {name for _, name in cast("Sequence[tuple[int, str]]", traced.mutated_buffers)}
        slots = zip(program.inputs, tensors)
        return [t.clone() if slot.kind == "buffer" and slot.name in written else t for slot, t in slots]

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallelized:
        """Copy the state that a copied module changes; programs and groups serve both."""
        twin = Parallelized(self.mesh, self.options, self.original, self.compiler)
        twin.layouts, twin.calls = dict(self.layouts), self.calls
        twin._programs, twin._session = dict(self._programs), self._session
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what only this process can hold: programs are compiled again, groups made again."""
        return {**self.__dict__, "_programs": {}, "_session": None, "_runners": {}, "accumulators": None}


@contextmanager
def class_of(model: nn.Module, original: type[nn.Module]) -> Generator[None]:
    """Give a module its own class back while it is traced."""
    swapped = model.__class__
    model.__class__ = original
    try:
        yield
    finally:
        model.__class__ = swapped


def _tensor(
    model: nn.Module, slot: Slot, constants: Mapping[str, Tensor | None], inputs: Mapping[str, Tensor], seed: tuple[int, int]
) -> Tensor:
    if slot.kind == "parameter":
        return model.get_parameter(slot.name)
    if slot.kind == "buffer":
        return model.get_buffer(slot.name)
    if slot.kind == "seed":
        return seed_tensor(*seed)
    found = constants.get(slot.name) if slot.kind == "constant" else inputs.get(slot.name)
    assert found is not None, f"no tensor for the {slot.kind} {slot.name}"
    return may_be_saved(found)


def _runner(program: Program, session: Session | None) -> Runner:
    return SimulatedRunner(program) if session is None else DistributedRunner(session.bind(program))


def _others(program: Program, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t for t, slot in zip(tensors, program.inputs, strict=True) if slot.kind != "parameter"]


def _write_buffer(model: nn.Module, name: str, value: Tensor) -> None:
    with torch.no_grad():
        model.get_buffer(name).copy_(value.full_tensor() if isinstance(value, DTensor) else value)
