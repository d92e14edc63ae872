"""Plans in files: the same bytes for the same plan, edits that are followed, and one clear error for each mistake."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import partir
from partir.errors import PlanError
from partir.layout import Layout
from partir.plans import STAGES
from tests.compiled import run
from tests.plan_files import check_right, edit, fresh, gradients, planned, saved, set_layout, set_option, tensor
from tests.planned import MLP, mlp, mlp_plan, rows

MESHES = [(2, 2, 2), (4, 2, 1), (1, 4, 1)]


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
