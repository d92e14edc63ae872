"""A plan says what every rank holds and receives, and what it says is what a running program counts."""

from __future__ import annotations

import re
import resource
from typing import Any

import pytest
import torch
from torch import nn

import partir
from partir.errors import LayoutError, PartirError
from partir.layout import Layout
from partir.plans import STAGES
from tests.compiled import run
from tests.planned import MLP, B, S, gpt, gpt_plan, ids, meta_plan, mlp, mlp_plan, rows

MESHES = [(8, 1, 1), (2, 2, 2), (2, 3, 2)]
MORE_MESHES = [(1, 1, 1), (1, 8, 1), (1, 4, 3), (2, 1, 4), (2, 1, 2, 2)]
ROOTED = ("broadcast", "reduce_to")  # not every rank receives the same


def counted(plan: partir.Plan, model: nn.Module, args: tuple[Any, ...]) -> dict[tuple[int, str, str, str], int]:
    """Run one step and return the bytes received by (rank, stage, op, axis)."""
    with partir.record_communication() as log:
        run(plan.compiled, model, args)[0].sum().backward()
    found: dict[tuple[int, str, str, str], int] = {}
    for event in log.events:
        key = (event.rank, event.stage, event.op, event.axis)
        found[key] = found.get(key, 0) + event.bytes
    return found


def planned(plan: partir.Plan) -> dict[tuple[str, str, str], int]:
    kinds = {(c.stage, c.op, c.axis) for c in plan.collectives}
    return {(stage, op, axis): plan.bytes(stage, axis, op) for stage, op, axis in kinds}


def check_bytes(plan: partir.Plan, model: nn.Module, args: tuple[Any, ...]) -> None:
    """Check every rank's bytes by stage, op and axis."""
    found = counted(plan, model, args)
    for rank in range(plan.mesh.size):
        assert {key[1:]: number for key, number in found.items() if key[0] == rank} == planned(plan)
    assert (plan.bytes() == 0) == (plan.mesh.size == 1)
    assert plan.bytes() == plan.bytes("forward") + plan.bytes("backward")


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_bytes_are_those_that_a_running_gpt_counts(sizes: tuple[int, ...]) -> None:
    check_bytes(gpt_plan(sizes, memory="fast" if sizes == (2, 3, 2) else "low"), gpt(), (ids(), ids()))


@pytest.mark.parametrize("sizes", MORE_MESHES, ids=str)
@pytest.mark.parametrize("memory", ["low", "fast"])
def test_bytes_are_those_that_a_running_mlp_counts(sizes: tuple[int, ...], memory: str) -> None:
    x = rows().repeat(3, 3)
    model = MLP(48).double()
    check_bytes(partir.plan(model, sizes, x, memory=memory), model, (x,))


def test_the_diagonal_counts_the_rank_that_receives_most() -> None:
    plan = mlp_plan(vectors="diagonal")
    found = counted(plan, mlp(), (rows(),))
    for (stage, op, axis), number in planned(plan).items():
        by_rank = [found.get((rank, stage, op, axis), 0) for rank in range(8)]
        assert max(by_rank) == number
        assert op in ROOTED or min(by_rank) == number
    assert "other ranks receive less" in plan.report() and "other ranks receive less" in str(plan)
    assert "other ranks receive less" not in str(mlp_plan())


def test_plans_a_model_on_meta_and_allocates_no_weights() -> None:
    with torch.device("meta"):
        model, x = MLP(16384), torch.empty(65536, 16384)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = partir.plan(model, (4, 4, 4), x)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2**20, "KiB; the weights would take 8 GiB"
    assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())
    assert type(model) is MLP
    assert str(plan.layouts["fc1.weight"]) == "f32[65536@y.x, 16384@z]"
    gathered = next(c for c in plan.collectives if c.reason == "fc1.weight for linear")
    assert (gathered.op, gathered.axis, gathered.bytes) == ("all_gather", "x", 3 * 65536 * 16384 * 4 // 64)


def test_two_runs_print_identical_ascii() -> None:
    first, second = (partir.plan(MLP(), (2, 2, 2), torch.empty(8, 16)) for _ in range(2))
    for text in (str, *(lambda plan, stage=stage: plan.text(stage) for stage in STAGES)):
        assert text(first) == text(second)
        assert text(first).isascii() and "0x" not in text(first)


def test_each_collective_says_what_it_is_for() -> None:
    plan = gpt_plan((2, 2, 2))
    reasons = {(c.stage, c.reason) for c in plan.collectives}
    assert {
        ("forward", "token_embedding.weight for embedding"),
        ("forward", "blocks.0.attn.qkv.weight for linear"),
        ("forward", "layer_norm for linear"),
        ("forward", "result of linear"),
        ("forward", "sum over h in layer_norm"),
        ("backward", "gradient of blocks.0.attn.qkv.weight"),
        ("backward", "blocks.0.attn.qkv.weight for linear, again"),
        ("backward", "gradient of layer_norm"),
        ("backward", "gradient of linear"),
    } <= reasons
    assert all(re.fullmatch(r"gpt\.py:\d+( \([\w.]+\))?", c.source) for c in plan.collectives)
    assert all(c.again == c.reason.endswith(", again") for c in plan.collectives)
    assert not any(c.again for c in gpt_plan((2, 3, 2), memory="fast").collectives)
    again = sum(c.bytes for c in plan.collectives if c.again)
    assert 0 < again < plan.bytes("backward")


def test_the_backward_of_a_linear_is_algorithm_2_of_the_paper() -> None:
    chain = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False))
    x = torch.empty(8, 16, requires_grad=True)
    plan = partir.plan(chain, (2, 2, 2), x, outputs="sharded", pin={"input": "f[m@x.y, k@z]"})
    last = [(c.op, c.axis, c.reason) for c in plan.collectives if c.stage == "backward"][:5]
    assert sorted(last) == [
        ("all_gather", "x", "1.weight for linear_1, again"),
        ("all_gather", "y", "gradient of linear_1"),
        ("all_gather", "z", "linear for linear_1, again"),
        ("reduce_scatter", "x", "gradient of 1.weight"),
        ("reduce_scatter", "z", "gradient of linear"),
    ]


def test_layouts_by_name() -> None:
    plan = gpt_plan((2, 2, 2))
    assert plan.layouts["blocks.0.mlp.fc1.weight"] == Layout.parse("f64[192@y.x, 48@z]")
    assert plan.layouts["head.weight"] == plan.layouts["token_embedding.weight"]
    assert plan.layouts["linear_2"] == plan.layouts["blocks.0.mlp.fc1"] == Layout.parse(f"f64[{B}@x.z, {S}, 192@y]")
    assert plan.layouts["ids"] == Layout.parse(f"i64[{B}, {S}]")
    assert set(dict(gpt().named_parameters())) <= set(plan.layouts)


def test_an_unknown_name_is_an_error_with_the_closest() -> None:
    layouts = mlp_plan().layouts
    with pytest.raises(KeyError) as error:
        layouts["fc1.wait"]
    assert isinstance(error.value, PartirError)
    assert str(error.value).startswith("no parameter, input or value is called 'fc1.wait'. Closest: fc1.weight, ")
    assert "fc1.wait" not in layouts and layouts.get("fc1.wait") is None


def test_an_unknown_stage_is_an_error_with_the_stages() -> None:
    message = "plan.text('optimised'): there is no such stage; choose from 'traced', 'annotated', 'lowered', 'forward', 'backward'."
    with pytest.raises(PartirError, match=re.escape(message)):
        mlp_plan().text("optimised")


MLP_LOWERED = """\
%fc1.weight: f64[64@y.x, 16@z]         # local [16, 8]
%fc2.weight: f64[16@z.x, 64@y]         # local [4, 32]
%x: f64[8, 16] nograd
%slice_1: f64[8@x, 16] nograd       = slice(%x, axis=x, dim=0)    # local [4, 16]
%slice_2: f64[8@x, 16@z] nograd     = slice(%slice_1, axis=z, dim=1)    # local [4, 8]
%all_gather: f64[64@y, 16@z] ~x     = all_gather(%fc1.weight, axis=x, dim=0)    # local [32, 8]
%linear: f64[8@x, 64@y] +z          = aten.linear(%slice_2, %all_gather)    # local [4, 32]
%reduce_scatter: f64[8@x.z, 64@y]   = reduce_scatter(%linear, axis=z, dim=0)    # local [2, 32]
%gelu: f64[8@x.z, 64@y]             = aten.gelu(%reduce_scatter)    # local [2, 32]
%all_gather_1: f64[8@x, 64@y] ~z    = all_gather(%gelu, axis=z, dim=0)    # local [4, 32]
%all_gather_2: f64[16@z, 64@y] ~x   = all_gather(%fc2.weight, axis=x, dim=0)    # local [8, 32]
%linear_1: f64[8@x, 16@z] +y        = aten.linear(%all_gather_1, %all_gather_2)    # local [4, 8]
%reduce_scatter_1: f64[8@x.y, 16@z] = reduce_scatter(%linear_1, axis=y, dim=0)    # local [2, 8]
return [%reduce_scatter_1]
"""


def test_the_lowered_text_reads_as_the_algorithm() -> None:
    model = MLP(bias=False).double()
    assert partir.plan(model, (2, 2, 2), rows(), outputs="sharded").text("lowered") == MLP_LOWERED


def test_every_collective_stands_in_the_text_with_its_layout() -> None:
    plan = gpt_plan((2, 2, 2))
    for record in plan.collectives:
        name = re.escape("%" + record.node)
        if record.node.startswith("d_"):  # gradients are printed under the parameter's own name
            name = "%" + re.sub("_", "[_.]", record.node)
        (line,) = re.findall(rf"^{name}: (.*)$", plan.text(record.stage), re.MULTILINE)
        assert re.match(rf"\(?f64\[.*\] .*= {record.op}\(.*axis={record.axis}", line), line
        assert not line.startswith("local"), line


def test_a_name_means_one_value_in_all_graphs() -> None:
    plan = gpt_plan((2, 2, 2))
    lowered = {node.name: node.meta.get("layout") for node in plan.compiled.lowered.graph.nodes}
    backward = plan.program.backward
    assert backward is not None
    for node in [*plan.program.forward.graph.nodes, *backward.graph.nodes]:
        if node.name in lowered and node.op != "output":
            assert node.meta["layout"] == lowered[node.name], node.name
    assert not any(name.endswith("_default") for name in lowered)


class Stack(nn.Module):
    """Three equal layers between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.blocks = nn.ModuleList(MLP() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def section(text: str, title: str) -> list[str]:
    """Return the lines of a printed table, its title and header left out."""
    return text.partition(f"\n{title}")[2].partition("\n\n")[0].splitlines()[2:]


@pytest.mark.parametrize("make", [meta_plan, lambda: partir.plan(Stack(), (2, 2, 2), torch.empty(8, 16))], ids=["gpt", "mlp"])
def test_report_shows_every_row_or_says_what_it_folds(make: Any) -> None:
    plan = make()
    for stage in ("forward", "backward"):
        records = [c for c in plan.collectives if c.stage == stage]
        title = f"{stage}: {len(records)} collectives, {plan.bytes(stage):,} bytes received by each rank"
        shown = section(plan.report(), title)
        (line,) = [row for row in shown if " as blocks." in row]
        found = re.fullmatch(r"  ([\w., ]+): as (blocks\.\d) but for the numbers in names \((\d+) rows, ([\d,]+) bytes(?: each)?\)", line)
        assert found is not None, line
        folded = found[1].split(", ")
        layers = {layer: [c.bytes for c in records if c.layer == layer] for layer in [found[2], *folded]}
        assert {len(layer) for layer in layers.values()} == {int(found[3])}
        assert {sum(layer) for layer in layers.values()} == {int(found[4].replace(",", ""))}
        assert len(shown) - 1 + len(folded) * int(found[3]) == len(records)
        assert len(section(plan.report(fold=False), title)) == len(records)
    assert " as blocks." not in plan.report(fold=False)


def test_a_layer_that_differs_is_not_folded() -> None:
    plan, pinned = (partir.plan(Stack(), (2, 2, 2), torch.empty(8, 16), pin=pin) for pin in (None, {"blocks.1.fc1.bias": "f[n@x.y.z]"}))
    last = "  blocks.1, blocks.2: as blocks.0 but for the numbers in names (4 rows each)"
    assert section(plan.report(), "parameters, at rest")[-1] == last
    shown = section(pinned.report(), "parameters, at rest")
    assert shown[-1] == "  blocks.2: as blocks.0 but for the numbers in names (4 rows)"
    assert re.fullmatch(r"  blocks\.1\.fc1\.bias +f32\[64@x\.y\.z\] .*pinned by 'blocks\.1\.fc1\.bias'", shown[-4])


def test_report_shows_totals_layouts_and_lines() -> None:
    plan = gpt_plan((2, 2, 2))
    text = plan.report()
    assert text.startswith("GPT on mesh (x=2, y=2, z=2), 8 ranks\nmemory=low  vectors=balanced  outputs=auto\n")
    assert re.search(r"^  blocks\.0\.mlp\.fc1\.weight +f64\[192@y\.x, 48@z\] +jil +x +9,216$", text, re.MULTILINE)
    line = r"^  linear_2 +f64\[24@x\.z, 4, 192@y\] +ilj +z +y +aten\.linear +gpt\.py:\d+ \(blocks\.0\.mlp\.fc1\)$"
    assert re.search(line, text, re.MULTILINE)
    assert "head.weight is token_embedding.weight" in text
    totals = text.partition("totals, bytes")[2]
    for op, axis in {(c.op, c.axis) for c in plan.collectives} | {("all", "x"), ("all", "all")}:
        wanted: dict[str, str] = {key: value for key, value in (("op", op), ("axis", axis)) if value != "all"}
        forward, backward, both = (plan.bytes(stage, **wanted) for stage in ("forward", "backward", None))
        assert re.search(rf"^  {op} +{re.escape(axis)} +{forward:,} +{backward:,} +{both:,} +\d+$", totals, re.MULTILINE), (op, axis)


def test_report_shows_what_an_output_costs() -> None:
    whole, sharded = (mlp_plan(outputs=outputs) for outputs in ("whole", "sharded"))
    cost = whole.bytes() - sharded.bytes()
    assert cost == (8 * 16 - 2 * 8) * 8  # all of the output but the block that a rank has
    assert re.search(rf"^  output\[0\] +f64\[8, 16\] +whole on every rank +{cost:,} +linear_1$", whole.report(), re.MULTILINE)
    assert re.search(r"^  output\[0\] +f64\[8@x\.y, 16@z\] +in blocks +0 +linear_1$", sharded.report(), re.MULTILINE)


def test_notes_of_the_compiler_are_reported() -> None:
    plan = mlp_plan()
    node = next(node for node in plan.compiled.annotated.graph.nodes if node.name == "linear")
    node.meta["notes"] = ("planned.py:36: linear runs whole along z",)
    assert plan.report().endswith("\n\nnotes\n  planned.py:36: linear runs whole along z\n")


def test_without_gradients_only_the_forward_is_planned() -> None:
    with torch.no_grad():
        plan = mlp_plan()
    assert plan.bytes("backward") == 0 and plan.program.backward is None
    assert plan.text("backward") == "# no backward: nothing has a gradient\n"
    assert "no backward: nothing has a gradient" in plan.report()


def test_plans_a_parallelized_module_and_leaves_it_so() -> None:
    model = partir.parallelize(MLP().double(), (1, 2, 2))
    name = type(model).__name__
    plan = partir.plan(model, (2, 2, 2), rows())
    assert type(model).__name__ == name
    assert plan.text("lowered") == mlp_plan().text("lowered")


def test_options_are_checked() -> None:
    with pytest.raises(PartirError, match="memory='medium' is not understood; choose from 'low', 'fast'"):
        mlp_plan(memory="medium")


PINS = {
    "another order": {"fc1.weight": "f[out@x.y, in@z]"},
    "other dims": {"fc*.weight": "f[out, in@y.z.x]"},
    "whole": {"fc1.weight": "f[out, in]"},
    "a vector": {"fc1.bias": "f[n@x.y.z]"},
    "a value": {"linear": "f[m@x.y, n@z]"},
    "an input": {"x": "f[m@x, k]"},
}


@pytest.mark.parametrize("pin", PINS.values(), ids=list(PINS))
def test_a_pinned_layout_is_kept_and_gradients_stay_right(pin: dict[str, str]) -> None:
    model, x = mlp(), rows()
    plan = mlp_plan(pin=pin)
    (pattern, text), *_ = pin.items()
    named = [name for name in ("fc1.weight", "fc2.weight", "fc1.bias", "linear", "x") if plan.pinned(name)]
    assert named
    for name in named:
        layout = plan.layouts[name]
        assert layout.dims == Layout.parse(text, layout.shape, layout.dtype).dims
        assert re.search(rf"^  {re.escape(name)} .* pinned by '{re.escape(pattern)}'$", plan.report(), re.MULTILINE)
    assert plan.text("lowered") != mlp_plan().text("lowered")
    wanted = gradients(model, lambda: model(x))
    found = gradients(model, lambda: run(plan.compiled, model, (x,))[0])
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-12, atol=1e-14) for name in wanted)


def gradients(model: nn.Module, forward: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    forward().pow(2).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


BAD_PINS = {
    "f[out@y.x, in@z": "layout text 'f[out@y.x, in@z' is not understood; write it as f32[16@x.y, 64@z] +z.",
    "f[out@y.x]": "layout text 'f[out@y.x]' has 1 dims, the tensor has 2: (64, 16).",
    "f[63@y.x, in@z]": "layout text 'f[63@y.x, in@z]': size 63 differs from the tensor's 64.",
    "f[out@q, in]": "layout text 'f[out@q, in]' has unknown axis 'q'; axes are data, x, y, z.",
    "f[out@y, in@y]": "layout f64[64@y, 16@y] uses axis y twice; an axis has one type in a layout.",
    "f32[out@y, in@z]": "has dtype f32, the tensor's is f64. A pin does not convert; write f[...].",
    "f[out@y, in@z] ~x": "a pin is a layout at rest, without +, max, ~ or on.",
    "f[out@y, in] +z": "a pin is a layout at rest, without +, max, ~ or on.",
}


@pytest.mark.parametrize("text", BAD_PINS)
def test_a_pin_that_is_no_layout_of_its_tensor(text: str) -> None:
    with pytest.raises(LayoutError) as error:
        mlp_plan(pin={"fc1.w*": text})
    assert str(error.value).startswith("pin 'fc1.w*' on fc1.weight: ")
    assert str(error.value).endswith(BAD_PINS[text])


def test_a_pin_whose_axes_do_not_divide() -> None:
    message = "pin 'fc1.bias' on fc1.bias: dim 64@z: size 64 is not divisible by z=3. Legal extents: 1, 2, 4, 8, 16, 32, 64."
    model, x = nn.ModuleDict({"fc1": nn.Linear(3, 64)}), torch.empty(3, 3)
    with pytest.raises(LayoutError, match=re.escape(message)):
        partir.plan(_Only(model), (1, 1, 3), x, pin={"fc1.bias": "f[n@z]"})


class _Only(nn.Module):
    def __init__(self, inner: nn.ModuleDict) -> None:
        super().__init__()
        self.fc1 = inner["fc1"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc1(x)


def test_a_pin_that_matches_nothing_or_cannot_be_kept() -> None:
    with pytest.raises(LayoutError, match=re.escape("pin 'fc3.*' matches no parameter, input or value. Closest: fc2.bias, ")):
        mlp_plan(pin={"fc3.*": "f[out, in]"})
    message = "pin on getitem_1: f64[24@x, 4, 48@z] cannot be kept, its layout follows from its operands': f64[24@x.z, 4, 48@y]. Pin those."
    with pytest.raises(LayoutError, match=re.escape(message)):
        partir.plan(gpt(), (2, 2, 2), (ids(), ids()), pin={"getitem_1": "f[b@x, s, h@z]"})


def test_repr_is_short() -> None:
    plan = mlp_plan()
    assert repr(plan) == f"<Plan of MLP on (x=2, y=2, z=2): {len(plan.collectives)} collectives, {plan.bytes():,} bytes a rank>"
    assert list(plan.timings)[0] == "trace" and list(plan.timings)[-1] == "differentiate"


def test_the_limit_where_nothing_has_to_move_is_no_number() -> None:
    one = str(partir.plan(nn.Linear(8, 8), (1, 1, 1), torch.empty(4, 8)).limit())
    assert "all products: no algorithm has to move anything; 0 bytes for what is no product" in one and "nan" not in one
    none = str(partir.plan(nn.GELU(), (2, 1, 1), torch.empty(4, 8)).limit())
    assert "all products: there are none; " in none and "nan" not in none


def test_a_plan_of_another_program_is_found_out() -> None:
    low, fast = mlp_plan(memory="low"), mlp_plan(memory="fast")
    found = counted(fast, mlp(), (rows(),))
    assert {key[1:]: number for key, number in found.items() if key[0] == 0} == planned(fast) != planned(low)
