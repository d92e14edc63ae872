"""Plans in files: the same bytes for the same plan, edits that are followed, and one clear error for each mistake."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partir
from partir.errors import LayoutError, MeshError, PartirError, PlanError
from partir.layout import Layout
from partir.plans import STAGES
from tests.compiled import run
from tests.planned import MLP, mlp, mlp_plan, rows

MESHES = [(2, 2, 2), (4, 2, 1), (1, 4, 1)]


planned = functools.cache(mlp_plan)


def saved(tmp_path: Path, sizes: tuple[int, ...] = (2, 2, 2)) -> Path:
    path = tmp_path / "plan.json"
    planned(sizes).save(path)
    return path


def edit(path: Path, change: Callable[[Any], object]) -> Path:
    """Edit what a file holds; a tensor stays a line."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(_as_lines(content))
    return path


def _as_lines(content: Any) -> str:
    """Write JSON as partir does, so that a test may edit parsed values."""
    parts: list[str] = []
    for key, value in content.items():
        if key in ("tensors", "collectives", "notes"):
            text = "[\n" + ",\n".join("  " + json.dumps(row) for row in value) + "\n ]" if value else "[]"
        else:
            text = json.dumps(value)
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def tensor(content: Any, name: str) -> Any:
    return next(row for row in content["tensors"] if row["name"] == name)


def set_layout(name: str, layout: str) -> Callable[[Any], None]:
    return lambda content: tensor(content, name).update(layout=layout)


def set_option(name: str, value: Any) -> Callable[[Any], None]:
    return lambda content: content["options"].update({name: value})


def fresh() -> nn.Module:
    """A model of its own with the values of `mlp`."""
    model = MLP().double()
    model.load_state_dict(mlp().state_dict())
    return model


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_right(model: nn.Module, x: torch.Tensor) -> None:
    """Check loss and gradients of a parallelized `fresh()` against one device, in float64."""
    wanted, found = gradients(mlp(), mlp()(x).pow(2).sum()), gradients(model, model(x).pow(2).sum())
    assert wanted.keys() == found.keys()
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-12, atol=1e-14) for name in wanted)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_an_unedited_plan_gives_the_same_program(sizes: tuple[int, ...], tmp_path: Path) -> None:
    plan, path = mlp_plan(sizes, memory="fast", pin={"fc1.bias": "f[n@x.y.z]"}), tmp_path / "plan.json"
    plan.save(path)
    assert partir.Plan.load(path) == plan.document and str(partir.Plan.load(path)) == str(plan)
    again = partir.plan(mlp(), None, rows(), plan=path)
    assert [again.text(stage) for stage in STAGES] == [plan.text(stage) for stage in STAGES]
    assert again.mesh == plan.mesh and not again.diff(path)
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_the_file_is_the_same_in_another_process_and_on_another_device(tmp_path: Path) -> None:
    path, other = saved(tmp_path), tmp_path / "other.json"
    code = (
        "import torch, partir; from tests.planned import MLP\n"
        "with torch.device('meta'): model, x = MLP().double(), torch.empty(8, 16, dtype=torch.float64)\n"
        f"partir.plan(model, (2, 2, 2), x).save({str(other)!r})"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=Path(__file__).parent.parent)
    assert other.read_bytes() == path.read_bytes()
    assert path.read_text().isascii() and "0x" not in path.read_text()


EDITS = {
    "parameter": set_layout("fc1.weight", "f64[64, 16@y.z.x]"),
    "value": set_layout("linear", "f64[8@y, 64@x.z]"),
    "input": set_layout("x", "f64[8@x.y, 16@z] nograd"),
    "fast": set_option("memory", "fast"),
    "pin": set_option("pin", {"fc2.w*": "f[out@y, in@x.z]"}),
}


CASES = [(what, sizes) for what in EDITS for sizes in MESHES if what not in ("input", "pin") or sizes == MESHES[0]]


@pytest.mark.parametrize(("what", "sizes"), CASES, ids=str)
def test_an_edited_plan_is_followed_and_its_numbers_are_right(what: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    before = planned(sizes)
    path = edit(saved(tmp_path, sizes), EDITS[what])
    document, model = partir.Plan.load(path), fresh()
    assert "edited since it was made" in str(document)
    plan = partir.plan(mlp(), None, rows(), plan=path)
    for edited in document.edits:
        assert plan.layouts[edited.name].strip(plan.mesh).dims == edited.layout.strip(plan.mesh).dims
        assert edited.layout.dims != before.document[edited.name].layout.dims
    assert plan.text("lowered") != before.text("lowered") or plan.options.memory == "fast"
    assert partir.parallelize(model, plan=path) is model
    check_right(model, rows())


def test_several_edits_are_one_program_in_plan_and_parallelize(tmp_path: Path) -> None:
    path = saved(tmp_path)
    for what in ("parameter", "value", "fast"):
        edit(path, EDITS[what])
    plan, model = partir.plan(mlp(), None, rows(), plan=path), fresh()
    found = gradients(mlp(), run(plan.compiled, mlp(), (rows(),))[0].pow(2).sum())
    partir.parallelize(model, plan=plan, example_inputs=rows())
    wanted = gradients(model, model(rows()).pow(2).sum())
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    plan.save(path)
    assert not partir.Plan.load(path).edits, "what was edited is now what was asked for"
    assert partir.plan(mlp(), None, rows(), plan=path).text("lowered") == plan.text("lowered")


def test_a_listed_layout_that_the_compiler_no_longer_chooses_is_kept(tmp_path: Path) -> None:
    def change(content: Any) -> None:
        tensor(content, "fc1.weight").update(layout="f64[64@x.y, 16@z]", chosen="f64[64@x.y, 16@z]")

    path = edit(saved(tmp_path), change)
    assert not partir.Plan.load(path).edits
    assert str(partir.plan(mlp(), None, rows(), plan=path).layouts["fc1.weight"]) == "f64[64@x.y, 16@z]"


@pytest.mark.parametrize("what", ["parameter", "value"])
def test_other_sizes_and_modes_keep_the_plan_as_far_as_it_goes(what: str, tmp_path: Path) -> None:
    path, model = edit(saved(tmp_path), EDITS[what]), fresh()
    partir.parallelize(model, plan=path)
    check_right(model, rows().repeat(2, 1))  # before any call with the planned sizes
    check_right(model, rows())
    with torch.no_grad():
        assert torch.allclose(model(rows()), mlp()(rows()), rtol=1e-12)
    double = partir.plan(mlp(), None, rows().repeat(2, 1), plan=path)
    if what == "value":
        assert str(double.layouts["linear"]) == "f64[16@y, 64@x.z]"
    assert double.layouts["fc1.weight"] == partir.Plan.load(path)["fc1.weight"].layout


def test_equal_plans_and_plans_that_differ(tmp_path: Path) -> None:
    plan, path = mlp_plan(), saved(tmp_path)
    for first, second in ((plan, planned()), (plan, path), (partir.Plan.load(path), plan)):
        assert not first.diff(second) and str(first.diff(second)) == "the plans are equal\n"
    other = mlp_plan((4, 2, 1), memory="fast", pin={"fc1.weight": "f[out, in@y.x]"})
    found = plan.diff(other)
    assert found and found.settings["memory"] == ("low", "fast") and found.settings["mesh"] == (str(plan.mesh), str(other.mesh))
    changed = {change.names[0]: (change.first, change.second) for change in found.layouts}
    assert changed["fc1.weight"] == ("f64[64@y.x, 16@z]", str(other.layouts["fc1.weight"]))
    for (stage, op, axis), pair in found.moves.items():
        wanted: list[Any] = [None if part == "all" else part for part in (stage, axis, op)]
        assert pair == (plan.bytes(*wanted), other.bytes(*wanted))
    assert f"{plan.bytes():,}  ->  {other.bytes():,}" in re.sub(r" +-> +", "  ->  ", str(found))
    assert found.moves.keys() == other.diff(path).moves.keys()


class Stack(nn.Module):
    """Equal layers."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.nn.functional.gelu(block(x))
        return x


def test_a_difference_folds_layers_and_names_what_only_one_plan_has() -> None:
    x = torch.empty(8, 16)
    short, long = partir.plan(Stack(), (2, 2, 2), x), partir.plan(Stack(4), (2, 2, 2), x)
    pinned = partir.plan(Stack(), (2, 2, 2), x, pin={"blocks.*.weight": "f[out, in@x.y.z]"})
    changes = {change.text: change for change in short.diff(pinned).layouts}
    states = [changes["blocks.*.weight"].where, *(change.where for change in changes.values() if len(change.names) > 1)]
    assert states[0] in ("blocks.0..2 (3 alike)", "blocks.0,2 (2 alike)")
    assert {"blocks.3.weight", "blocks.3.bias"} <= set(short.diff(long).only_second)
    assert "only in the first: blocks.3.weight" in str(long.diff(short))


def test_many_layers_print_on_a_screen_as_few_do() -> None:
    x = torch.empty(8, 16)
    few, many = (str(partir.plan(Stack(layers), (2, 2, 2), x)) for layers in (4, 8))
    assert len(few.splitlines()) == len(many.splitlines()) <= 50
    assert "  blocks.0,2,4,6 (4 alike)" in many and max(map(len, many.splitlines())) <= 120
    assert "plan.report()" in many.splitlines()[-1]


MISFIT = (
    'mesh is (x=3, y=2, z=2), edited, and tensors[0].layout "f64[64@y.x, 16@z]", from before, does not fit it: dim 64@y.x: size 64 is not '
    "divisible by y.x=6. Legal extents: 1, 2, 4, 8, 16, 32, 64. Choose sizes that fit, or plan the model on this mesh: partir.plan(model, "
)
REFUSED: dict[str, tuple[Callable[[Any], object], str, str]] = {
    "memory": (set_option("memory", "medium"), '"memory"', 'options.memory is "medium"; choose from "low", "fast", or a number'),
    "an option": (set_option("memry", "low"), '"memry"', "options.memry is no field; legal here: 'memory', 'vectors', "),
    "mesh of zero": (lambda c: c["mesh"].update(y=0), '"y"', "mesh.y is 0; it is 1 or more."),
    "mesh axis": (lambda c: c["mesh"].update(w=2), '"w"', "mesh.w is no field; legal here: 'data', 'x', 'y', 'z'."),
    "mesh of a half": (lambda c: c["mesh"].update(y=1.5), '"y"', "mesh.y is 1.5; write an integer."),
    "layout": (set_layout("fc1.weight", "f64[64@y.x"), "fc1.weight", "is not understood; write it as f32[16@x.y, 64@z] +z."),
    "axis": (set_layout("fc1.weight", "f64[64@w, 16]"), "fc1.weight", "has unknown axis 'w'; axes are data, x, y, z."),
    "sizes": (set_layout("fc1.weight", "f64[63@y, 16]"), "fc1.weight", "size 63 differs from the tensor's 64."),
    "division": (lambda c: c["mesh"].update(x=3), '"mesh"', MISFIT),
    "both edited": (lambda c: (c["mesh"].update(x=3), set_layout("fc1.weight", "f64[64, 16@x]")(c)), "fc1.weight", "size 16 is not div"),
    "an axis": (lambda c: c["collectives"][0].update(axis="data"), "", "collectives[0].axis is \"data\": the mesh's axes are x, y, z."),
    "collective": (lambda c: c["collectives"][0].update(op="nonsense"), "", 'collectives[0].op is "nonsense"; choose from "all_gather", '),
    "direction": (lambda c: tensor(c, "fc1.weight").update(direction="up"), "fc1.weight", 'direction is "up"; choose from "data", "x", '),
    "state": (lambda c: tensor(c, "linear").update(state="w"), '"linear"', 'state is "w"; choose from "data", "x", "y", "z", or leave it'),
    "held": (lambda c: c["totals"].update(held="much"), '"held"', 'totals.held is "much"; write an integer.'),
    "whole": (lambda c: c["totals"].update(parameters=None), '"parameters"', "totals.parameters is null; write an integer."),
    "rules": (set_option("rules", ["a.rules"]), '"rules"', 'options.rules[0] is "a.rules"; write a list.'),
    "dtype": (set_layout("fc1.weight", "f32[64@y.x, 16@z]"), "fc1.weight", "dtype f32, the tensor's is f64; a layout does not convert."),
    "pending": (set_layout("linear", "f64[8@x, 64@y] +z"), '"linear"', "an edit says how dims are split, without +, max, ~ or on;"),
    "output": (set_layout("output[0]", "f64[8@x, 16]"), "output[0]", "of an output follows from options.outputs; edit that:"),
    "kind": (lambda c: tensor(c, "x").update(kind="inputs"), '"name": "x"', "kind is \"inputs\"; choose from \"parameter\", "),
    "shape": (lambda c: tensor(c, "x").update(shape="8, 16"), '"name": "x"', 'shape is "8, 16"; write a list.'),
    "nothing": (lambda c: tensor(c, "x").pop("layout"), '"name": "x"', "has no 'layout'; it needs 'name', 'kind', 'shape', "),
    "bytes": (lambda c: c["collectives"][0].update(bytes=-1), "", "collectives[0].bytes is -1; it is 0 or more."),
    "totals": (lambda c: c["totals"].update(forward=1), '"forward"', "totals.forward is 1; the forward's collectives add up to "),
    "twice": (lambda c: c["tensors"].append(c["tensors"][0]), "", "is the second of parameter 'fc1.weight'; list each tensor once."),
    "version": (lambda c: c.update(version=2), '"version"', "version is 2; this partir reads version 1. Save the plan again."),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_field_edited_into_nonsense_is_named_with_its_line(what: str, tmp_path: Path) -> None:
    change, mark, message = REFUSED[what]
    path, model = edit(saved(tmp_path), change), fresh()
    with pytest.raises(PlanError) as error:
        partir.parallelize(model, plan=path)
    found = re.match(rf"{re.escape(str(path))}:(\d+): ", str(error.value))
    assert found is not None and message in str(error.value), str(error.value)
    assert mark in path.read_text().splitlines()[int(found[1]) - 1]
    check_unchanged(model)


def check_unchanged(model: nn.Module) -> None:
    """A refused model runs on one device as before."""
    assert type(model) is MLP and "_partir" not in vars(model)
    check_right(model, rows())


BROKEN = {
    "": "is no JSON: column 1: Expecting value.",
    '{\n "format": "partir plan",\n "version": ]\n': "is no JSON: column 13: Expecting value.",
    "[1]": 'is no plan: a plan is written by plan.save and has "format": "partir plan".',
    '{"format": "a plan"}': 'is no plan: a plan is written by plan.save and has "format": "partir plan".',
    '{"format": "partir plan"}': "the file has no 'version'; it needs 'format', 'version'.",
    '{"format": "partir plan", "version": 1}': "the file has no 'model'; it needs 'format', 'version', 'model', ",
    '{"format": "partir plan", "version": NaN}': "is no JSON: it holds the number NaN.",
    "[" * 100_000: "is nested too deep.",
}


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_a_file_that_is_no_plan(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=re.escape(BROKEN[text])) as error:
        partir.Plan.load(path)
    assert str(error.value).startswith(str(path))
    if "]\n" in text:
        assert str(error.value).startswith(f"{path}:3: ")


def test_a_key_that_is_named_twice(tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.write_text(path.read_text().replace('  "memory": "low",', '  "memory": "low",\n  "memory": "fast",'))
    with pytest.raises(PlanError, match=r"plan.json:\d+: options names 'memory' twice; name it once."):
        partir.Plan.load(path)


def test_paths_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    plan, missing = planned(), tmp_path / "missing" / "plan.json"
    with pytest.raises(PlanError, match=re.escape(f"{missing}: cannot be read: No such file or directory.")):
        partir.Plan.load(missing)
    with pytest.raises(PlanError, match=re.escape(f"{missing}: the plan cannot be written: No such file or directory.")):
        plan.save(missing)
    with pytest.raises(PlanError, match=re.escape(f"{tmp_path}: the plan cannot be written: ")):
        plan.save(tmp_path)
    with pytest.raises(PlanError, match="'.' names no file: the plan cannot be written. Give a path, plan.json."):
        plan.save("")
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match=re.escape("plan.json: is no JSON: byte 0 is no UTF-8 text.")):
        partir.Plan.load(tmp_path / "plan.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json"], "no half of a file is left"


def test_a_plan_of_another_model(tmp_path: Path) -> None:
    path = saved(tmp_path)
    for model, message in (
        (nn.Linear(16, 16), "is of another model: it was made for MLP, this is Linear; parameters missing: fc1.weight f64[64, 16], "),
        (MLP(32), "different: fc1.weight is f32[128, 32], planned f64[64, 16], "),
        (MLP(bias=False).double(), "parameters missing: fc1.bias f64[64], fc2.bias f64[16]. "),
        (_with_extra(), "parameters unexpected: extra f32[3]. "),
    ):
        with pytest.raises(PlanError, match=re.escape(message)):
            partir.parallelize(model, plan=path)
        assert "_partir" not in vars(model)


def _with_extra() -> nn.Module:
    model = fresh()
    model.extra = nn.Parameter(torch.zeros(3))
    return model


def test_a_model_whose_forward_computes_something_else_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = saved(tmp_path), fresh()
    monkeypatch.setattr(MLP, "forward", lambda self, x: self.fc2(torch.relu(self.fc1(x))))
    message = f"{path}: MLP has the parameters and inputs that were planned with torch 2.13.0, but its forward computes something else now."
    with pytest.raises(PlanError, match=re.escape(message.replace("2.13.0", torch.__version__.partition("+")[0]))):
        partir.parallelize(model, plan=path, example_inputs=rows())
    assert type(model) is MLP
    assert partir.parallelize(model, (2, 1, 1))(rows()).equal(model.forward(rows())), "a refused model may be parallelized"


def test_a_plan_keeps_its_dtypes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path, model = tmp_path / "plan.json", mlp()
    plan = partir.plan(model, (2, 2, 1), rows(), compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plan.save(path)
    assert "compute_dtype=bf16  reduce_dtype=f32" in str(partir.Plan.load(path))
    again = partir.plan(model, example_inputs=rows(), plan=path)
    assert again.document == plan.document and again.bytes() == plan.bytes() < planned((2, 2, 1)).bytes()
    assert "compute_dtype: None -> torch.bfloat16" in str(planned((2, 2, 1)).diff(plan))
    with pytest.raises(PlanError, match=r"compute_dtype=torch.float16 is given with a plan that has compute_dtype=torch.bfloat16"):
        partir.parallelize(model, plan=path, compute_dtype=torch.float16)
    edit(path, lambda content: content["options"].update(compute_dtype="i64"))
    with pytest.raises(PlanError, match=r'plan.json:7: options.compute_dtype is "i64"; choose from "bf16", "f16", "f32", "f64"'):
        partir.Plan.load(path)


def test_a_plan_with_a_mesh_or_options_that_contradict_it(tmp_path: Path) -> None:
    path, model = saved(tmp_path), fresh()
    with pytest.raises(MeshError, match=re.escape("mesh=(x=4, y=2, z=1) is given with a plan on mesh (x=2, y=2, z=2). Leave mesh out")):
        partir.parallelize(model, (4, 2, 1), plan=path)
    message = "memory='fast' is given with a plan that has memory='low'. Leave it out, or edit the plan's options."
    with pytest.raises(PlanError, match=re.escape(message)):
        partir.parallelize(model, memory="fast", plan=path)
    message = 'mesh None is not understood: give (x, y, z), (data, x, y, z), "auto", or plan=, which has'
    with pytest.raises(MeshError, match=re.escape(message)):
        partir.parallelize(model)
    with pytest.raises(PartirError, match="a plan is a partir.Plan, a partir.PlanDocument or the path of a saved one, not int."):
        partir.parallelize(model, plan=3)  # pyright: ignore[reportArgumentType]
    check_right(partir.parallelize(model, {"x": 2, "y": 2, "z": 2}, plan=path), rows())


def test_an_edited_layout_that_cannot_be_kept_names_its_line(tmp_path: Path) -> None:
    class Halves(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.fc1(x).chunk(2, dim=-1)
            return self.fc2(torch.cat([first * second, first], dim=-1))

    model, path = Halves().double(), tmp_path / "plan.json"
    partir.plan(model, (2, 2, 2), rows()).save(path)
    edit(path, set_layout("getitem", "f64[8, 32@y]"))
    where = 1 + next(i for i, line in enumerate(path.read_text().splitlines()) if '"name": "getitem"' in line)
    message = rf"plan.json:{where}: pin on getitem: .* cannot be kept, its layout follows from its operands'"
    with pytest.raises(LayoutError, match=message):
        partir.parallelize(model, plan=path, example_inputs=rows())
    assert type(model) is Halves
    assert torch.allclose(partir.parallelize(model, (2, 1, 2))(rows()), Halves.forward(model, rows()))


def test_the_layout_of_every_tensor_is_in_the_file(tmp_path: Path) -> None:
    plan, document = planned(), partir.Plan.load(saved(tmp_path))
    assert {t.name: t.layout for t in document if t.kind != "output"} == {
        name: layout for name, layout in plan.layouts.items() if name not in ("fc1", "fc2", "")
    }
    assert document["fc1"] == document["linear"] and document["linear"].layout == Layout.parse(str(plan.layouts["fc1"]))
    assert [(c.stage, c.op, c.axis, c.bytes, c.reason) for c in document.collectives] == [
        (c.stage, c.op, c.axis, c.bytes, c.reason) for c in plan.collectives
    ]


@pytest.mark.parametrize("made_for", [None, torch.bfloat16], ids=str)
def test_an_edited_compute_dtype_is_followed(made_for: torch.dtype | None, tmp_path: Path) -> None:
    path, dtype = tmp_path / "plan.json", torch.float32
    mlp_plan(compute_dtype=made_for).save(path)
    edit(path, set_option("compute_dtype", "f32"))
    fresh_plan = mlp_plan(compute_dtype=dtype)
    plan = partir.plan(mlp(), None, rows(), plan=path)
    assert [plan.text(stage) for stage in STAGES] == [fresh_plan.text(stage) for stage in STAGES]
    model = partir.parallelize(fresh(), plan=path)
    assert model(rows()).dtype is dtype and torch.allclose(model(rows()).double(), mlp()(rows()), rtol=1e-4, atol=1e-6)


def test_a_value_edited_beside_compute_dtype_is_kept_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = edit(edit(saved(tmp_path), set_option("compute_dtype", "f32")), set_layout("linear", "f64[8@y, 64@x.z]"))
    assert str(partir.plan(mlp(), None, rows(), plan=path).layouts["linear"]) == "f32[8@y, 64@x.z]"

    def forward(self: MLP, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fc1(x)
        return self.fc2(hidden.exp() if hidden.dtype is torch.float64 else hidden)

    monkeypatch.setattr(MLP, "forward", forward)
    partir.plan(fresh(), (2, 2, 2), rows()).save(path)
    edit(edit(path, set_option("compute_dtype", "f32")), set_layout("linear", "f64[8@y, 64@x.z]"))
    with pytest.raises(PlanError, match=r"plan.json:\d+: compute_dtype and the layout of the value 'linear' are both edited, but "):
        partir.plan(fresh(), None, rows(), plan=path)


def test_another_forward_is_named_beside_an_edited_compute_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = edit(saved(tmp_path), set_option("compute_dtype", "f32"))
    monkeypatch.setattr(MLP, "forward", lambda self, x: self.fc2(torch.relu(self.fc1(x))))
    with pytest.raises(PlanError, match="but its forward computes something else now"):
        partir.plan(fresh(), None, rows(), plan=path)


GELU = "op aten.gelu(x[* d], approximate?) -> y[* d]\n    whole d\n"


def test_a_plan_made_with_rules_asks_for_the_same_rules(tmp_path: Path) -> None:
    path, rules, other = tmp_path / "plan.json", tmp_path / "gelu.rules", tmp_path / "other.rules"
    rules.write_text(GELU)
    other.write_text(GELU.replace(" d", " last"))
    plan = mlp_plan(rules=rules)
    plan.save(path)
    assert "  rules=gelu.rules" in str(partir.Plan.load(path)) and partir.Plan.load(path) == plan.document
    again = partir.plan(mlp(), None, rows(), plan=path, rules=rules)
    assert again.text("lowered") == plan.text("lowered") != planned().text("lowered")
    digest = plan.document.settings.rules[0][1]
    assert f"rules: None -> gelu.rules {digest}" in str(planned().diff(plan))
    made = f"{path}: the plan was made with the rule files gelu.rules {digest} (name, SHA-256 of the text); "
    for given, message in (
        (None, f"{made}given are none. Pass the same, rules=['gelu.rules'], or plan again with other rules."),
        (other, f"{made}given are ['other.rules']. Pass the same, "),
    ):
        with pytest.raises(PlanError, match=re.escape(message)):
            partir.parallelize(fresh(), plan=path, rules=given)
    rules.write_text(GELU + "\n")
    with pytest.raises(PlanError, match=re.escape(f"{made}the text of gelu.rules has changed since. Pass the same, ")):
        partir.parallelize(fresh(), plan=path, rules=rules)
    with pytest.raises(PlanError, match=re.escape("rules=['gelu.rules'] is given with a plan made without rules. Leave it out")):
        partir.parallelize(fresh(), plan=planned(), rules=rules)


def test_every_kind_of_edit_is_named_and_old_numbers_are_said_to_be_old(tmp_path: Path) -> None:
    path = saved(tmp_path)
    for change in (set_layout("fc1.weight", "f64[64, 16@y.z.x]"), set_option("memory", "fast"), lambda c: c["mesh"].update(x=1, y=4)):
        edit(path, change)
    document, plan = partir.Plan.load(path), planned()
    old = "  collectives, readers and bytes saved are those from before the edits: plan again to count"
    edits = "edited since it was made: mesh, memory, layouts of fc1.weight"
    assert f"\n{edits}\n{old}\n" in str(document)
    for name in ("fc1.weight", "fc2.bias"):
        assert f"\nthe plan was {edits}\n{old}\n" in document.explain(name)
        assert "edited since" not in plan.explain(name)
    assert str(plan.diff(document)).startswith(f"the second plan was {edits}\n{old}\n")
    assert str(document.diff(path)) == "\n".join(["the plans are equal", *document.diff(path).cautions]) + "\n"
    assert len(document.diff(path).cautions) == 4 and not plan.diff(plan.document).cautions
