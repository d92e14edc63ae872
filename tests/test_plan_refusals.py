"""Plan files that cannot be followed: edited into nonsense, no plans, of another model; each error says where."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import partir
from partir.errors import LayoutError, MeshError, PartirError, PlanError
from tests.plan_files import check_right, edit, fresh, planned, saved, set_layout, set_option, tensor
from tests.planned import MLP, rows

MISFIT = (
    'mesh is (x=3, y=2, z=2), edited, and tensors[0].layout "f64[64@y.x, 16@z]", from before, does not fit it: dim 64@y.x: size 64 is not '
    "divisible by y.x=6. Legal extents: 1, 2, 4, 8, 16, 32, 64. Choose sizes that fit, or plan the model on this mesh: partir.plan(model, "
)
SQUARE = "f64[32@y.x, 32@z]"
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
    "shape of a parameter": (
        lambda c: tensor(c, "fc1.weight").update(shape=[32, 32], chosen=SQUARE, layout=SQUARE),
        "fc1.weight",
        "is that of the parameter 'fc1.weight', f64[32, 32]; in model.parameters it is f64[64, 16].",
    ),
    "name": (lambda c: tensor(c, "fc1.weight").update(name="fc1.wieght"), "fc1.wieght", "f64[64, 16]; model.parameters has no such name."),
    "no row": (lambda c: c["tensors"].remove(tensor(c, "fc1.weight")), '"tensors"', "has no row of kind \"parameter\" for 'fc1.weight'"),
    "value": (lambda c: tensor(c, "fc1.weight").update(kind="value"), '"tensors"', "has no row of kind \"parameter\" for 'fc1.weight'"),
    "chosen": (lambda c: tensor(c, "x").update(chosen="f64[4, 4]"), '"name": "x"', "chosen is f64[4, 4] of a tensor of shape [8, 16]."),
    "digit": (lambda c: tensor(c, "x").update(chosen="f64[8\u00b2, 16]"), '"name": "x"', "size '8\u00b2' is a name; sizes are"),
    "huge": (lambda c: tensor(c, "x").update(shape=[10**40, 16]), '"name": "x"', "); it is 9223372036854775807 or less."),
    "counted for": (lambda c: c["totals"].update(counted_for="mesh (x=2)  compute_dtype=q9"), '"counted_for"', "no dtype is called q9."),
    "true": (lambda c: c.update(version=True), '"version"', "version is true; this partir reads version 1. Save the plan again."),
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
    '{"format": "partir plan", "version": ' + "1" * 5000 + "}": "cannot be read: Exceeds the limit",
    '{"format": "partir plan", "version": 1, "version": 1}': "the file names 'version' twice; name it once.",
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


def test_a_link_is_written_through_and_a_pipe_into(tmp_path: Path) -> None:
    plan, target, link = planned(), tmp_path / "plan.json", tmp_path / "link.json"
    target.write_text("")
    link.symlink_to(target)
    plan.save(link)
    assert link.is_symlink() and partir.Plan.load(target).mesh == plan.mesh
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    plan.save(pipe)
    reader.join(30)
    assert pipe.is_fifo() and read == [target.read_text()]


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
    with pytest.raises(PlanError, match="'a.x00.json' has a NUL character in it: the plan cannot be written. Give a path, plan.json."):
        plan.save("a\0.json")
    for write, text in ((plan.draw, "the drawing cannot be written"), (plan.timeline, "the timeline cannot be written")):
        with pytest.raises(partir.PartirError, match=f"3 is a int: {text}. Give a path"):
            write(cast(Any, 3))
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
