"""The command line: what it prints, its exit codes, and one line instead of a traceback for a mistake."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from partir.cli import main
from partir.runtime import calibrate

MODEL = """
import torch
from torch import nn


def make():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)), torch.empty(8, 16)


def real():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)), torch.randn(8, 16)


def raises():
    raise KeyError("no key")


def wrong():
    return 3


def narrow():
    return nn.Linear(16, 16), torch.empty(8, 12)


class Flow(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def flow():
    return Flow(), torch.randn(8, 8)


def interrupted():
    raise KeyboardInterrupt


def no_module():
    return 3, torch.empty(2)


def unnamed():
    return nn.Linear(8, 8), (), {3: torch.empty(8, 8)}


def sparse():
    return nn.Linear(8, 8), torch.eye(8).to_sparse()


def leaves():
    raise SystemExit(0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "good.rules").write_text("op aten.mm(a[m k], b[k n]) -> c[m n]\n    sum k\n")
    (tmp_path / "raising.py").write_text("raise KeyError('no key')")
    (tmp_path / "broken.py").write_text("x = (")
    (tmp_path / "no_model_type.json").write_text('{"hidden": 3}')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "unknown.json").write_text('{"model_type": "no-such-model"}')
    (tmp_path / "gpt2.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32}')
    (tmp_path / "no.json").write_text("{oops")
    (tmp_path / "binary.json").write_bytes(bytes(range(128, 256)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


MISTAKES = {
    "plan nowhere.py:make --mesh 2,2,2": "nowhere.py:make: there is no file nowhere.py.",
    "plan model.py:nothing --mesh 2,2,2": "model.py has no function nothing.",
    "plan model.py:raises --mesh 2,2,2": "model.py:raises: the function raised KeyError: 'no key'",
    "plan model.py:leaves --mesh 2,2,2": "model.py:leaves: the function raised SystemExit: 0",
    "plan model.py:wrong --mesh 2,2,2": "model.py:wrong returned int; expected (module, example inputs)",
    "plan model.py:no_module --mesh 2,2,2": "model.py:no_module returned tuple; expected (module, example inputs)",
    "plan broken.py:make --mesh 2,2,2": "broken.py cannot be imported: SyntaxError",
    "plan model.py --mesh 2,2,2": "'model.py' is no model: write path/to/file.py:function.",
    "plan --mesh 2,2,2": "give one model: path/to/file.py:function, or --hf config.json.",
    "plan model.py:make --mesh 2,,2": "--mesh '2,,2': write sizes",
    "plan model.py:make --mesh a=2": "mesh axis 'a' is unknown. Axes are data, x, y, z.",
    "plan model.py:make --mesh 0,2,2": "mesh axis x has size 0; sizes are 1 or more.",
    "plan model.py:make --mesh 2,2,2 --explain none": "no parameter, input, value or output is called 'none'.",
    "plan model.py:make --mesh 2,2,2 --out nowhere/x.json": "nowhere/x.json: the plan cannot be written",
    "plan model.py:make --mesh 2,2,2 --out .": "'.' names no file: the plan cannot be written. Give a path, plan.json.",
    "draw model.py:make --mesh 2,2,2 --out nowhere/x.html": "there is no folder",
    "draw model.py:make --mesh 2,2,2 --out x.xyz": "it has suffix '.xyz'",
    "cost model.py:make --mesh 2,2,2 --hardware none": "hardware 'none' is neither a shipped profile",
    "mesh model.py:make --ranks 0": "a mesh has at least one rank",
    "mesh model.py:make --ranks 1000000007": "1,000,000 are the most that are tried",
    "plan model.py:unnamed --mesh 2,2,2": "model.py:unnamed: keyword inputs are a dict of names, and 3 is none.",
    "plan model.py:sparse --mesh 2,2,2": "input input is a sparse_coo tensor, and only dense ones have dims to split: pass its to_dense().",
    "verify model.py:sparse --mesh 2,2,2": "input input is a sparse_coo tensor",
    "check-rules good.rules --import raising": "--import raising: KeyError: 'no key'",
    "check-rules good.rules --import .": "--import .: ",
    "calibrate --ranks 1 --out one.toml": "calibrate: 1 rank has no links to others, which are what is measured: give 2 or more.",
    "calibrate --out .": "--out .: that is a folder; name a file in it, cluster.toml.",
    "mesh model.py:make --ranks 8 --memory lots": "memory='lots' is no number of bytes",
    "mesh model.py:make --ranks 8 --memory 1e400GB": "memory='1e400GB' is no number of bytes",
    "plan --hf no_model_type.json --mesh 2,2,2": 'a config of Hugging Face has a "model_type"',
    "plan --hf unknown.json --mesh 2,2,2": "--hf unknown.json: ValueError: Unrecognized model identifier: no-such-model.",
    "plan --hf gpt2.json --seq 64 --mesh 2,2,2": "--seq 64: this model takes at most 32 positions.",
    "plan --hf list.json --mesh 2,2,2": 'a config of Hugging Face has a "model_type"',
    "plan --hf no.json --mesh 2,2,2": "no.json: line 1, column 2: this is no JSON",
    "plan --hf binary.json --mesh 2,2,2": "binary.json: this is no text; a config.json is JSON.",
    "plan --hf nowhere.json --mesh 2,2,2": "nowhere.json",
    "plan model.py:make --mesh 2,2,2 --rules nowhere.rules": "nowhere.rules",
    "mesh model.py:make --ranks 2 --rules model.py": "model.py:2:1: unknown entry `import`",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_message(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert MISTAKES[line] in error
    assert "Traceback" not in error


REFUSED = {
    "verify model.py:real --mesh 2,2,2 --tolerance -1": "argument --tolerance: '-1' is no finite number of 0 or more.",
    "verify model.py:real --mesh 2,2,2 --tolerance nan": "argument --tolerance: 'nan' is no finite number of 0 or more.",
    "mesh model.py:make --ranks 2 --top -1": "argument --top: '-1' is no integer of 1 or more.",
    "mesh model.py:make --ranks 2 --top 0": "argument --top: '0' is no integer of 1 or more.",
    "calibrate --out a.toml --seconds -1": "argument --seconds: '-1' is no finite number above 0.",
    "calibrate --out a.toml --seconds nan": "argument --seconds: 'nan' is no finite number above 0.",
    "calibrate --out a.toml --seconds 0": "argument --seconds: '0' is no finite number above 0.",
    "calibrate --out a.toml --timeout 0": "argument --timeout: '0' is no finite number above 0.",
    "calibrate --out a.toml --timeout inf": "argument --timeout: 'inf' is no finite number above 0.",
    "calibrate --out a.toml --ranks 0": "argument --ranks: '0' is no integer of 1 or more.",
    "plan --hf gpt2.json --mesh 2,2,2 --batch two": "argument --batch: 'two' is no integer of 1 or more.",
    "plan model.py:make --mesh 2,2,2 --compute-dtype int8": "argument --compute-dtype: 'int8' is no floating-point dtype of torch",
    "mesh model.py:make --ranks 2 --reduce-dtype half-ish": "argument --reduce-dtype: 'half-ish' is no floating-point dtype of torch",
    "plan model.py:make --mesh 2,2,2 --explain x --stage lowered": "argument --stage: not allowed with argument --explain",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_number_that_means_nothing_is_refused_before_anything_runs(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "calibrate", lambda *given: pytest.fail(f"ranks were started with {given}"))
    with pytest.raises(SystemExit) as stopped:
        main(line.split())
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and REFUSED[line] in error and "Traceback" not in error
    assert not (folder / "a.toml").exists()


@pytest.mark.parametrize("command", ["plan", "draw", "cost", "mesh", "verify", "check-rules", "calibrate"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: partir {command}" in text and f"    partir {command} " in text and "exit codes: 0 success, 1 a finding" in text


@pytest.mark.parametrize("command", ["plan", "verify"])
@pytest.mark.parametrize("model", ["narrow", "flow"])
def test_what_cannot_be_traced_is_one_line(
    command: str, model: str, folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """torch logs a traceback of its own, and prints half a graph."""
    assert main([command, f"model.py:{model}", "--mesh", "2,2,2"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("partir: ") and shown.err.count("\n") == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("size", ["x", "1"])
def test_an_environment_that_torchrun_did_not_set(
    size: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": size, "MASTER_ADDR": ""}.items():
        monkeypatch.setenv(name, value)
    assert main(["calibrate", "--out", "a.toml"]) == 2
    assert "partir: calibrate: the environment is not what torchrun sets: " in capsys.readouterr().err


def test_an_interrupt_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model.py:interrupted", "--mesh", "2,2,2"]) == 130
    assert capsys.readouterr() == ("", "partir: interrupted\n")


def test_plan_and_cost(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model.py:make", "--mesh", "2,2,2", "--json", "--out", "plan.json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["mesh"] == {"x": 2, "y": 2, "z": 2}
    assert (folder / "plan.json").is_file()
    assert main(["cost", "model.py:make", "--mesh", "2,2,2", "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)
    assert cost["values"]["bytes"] == sum(facts["bytes"].values())
    assert cost["seconds"] > 0


def test_dtypes_and_rules_are_part_of_a_plan_and_of_a_choice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half the bytes in bfloat16; with the rule that a file has for the op, its rows are read whole."""
    (folder / "mine.rules").write_text("op aten.linear(x[* k], w[n k], b?[n]) -> y[* n]\n    whole n k\n")
    moved: dict[str, tuple[int, int]] = {}
    for options in ("", "--compute-dtype bfloat16", "--rules mine.rules"):
        assert main(["plan", "model.py:make", "--mesh", "1,2,1", "--json", *options.split()]) == 0
        planned = sum(json.loads(capsys.readouterr().out)["bytes"].values())
        assert main(["mesh", "model.py:make", "--ranks", "2", "--by", "bytes", "--json", *options.split()]) == 0
        ranked = json.loads(capsys.readouterr().out)["ranked"]
        moved[options] = planned, next(one["bytes"] for one in ranked if one["mesh"] == [1, 2, 1] and one["mode"] == "low")
    assert all(planned == chosen for planned, chosen in moved.values())
    assert moved["--compute-dtype bfloat16"][0] < 0.6 * moved[""][0] and moved["--rules mine.rules"] != moved[""]


def test_cost_where_nothing_has_to_move(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "model.py:make", "--mesh", "1,1,1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["over_lower_bound"] is None


def test_a_tensor_or_a_stage_is_part_of_the_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "model.py:make", "--mesh", "2,2,2"]
    for option, name in (("--explain", "0.weight"), ("--stage", "lowered")):
        assert main([*line, option, name]) == 0
        text = capsys.readouterr().out
        assert main([*line, "--json", option, name]) == 0
        assert json.loads(capsys.readouterr().out)[option.removeprefix("--")][name].strip() == text.strip()


def test_draw(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", "model.py:make", "--mesh", "x=2,y=2", "--out", "model.html"]) == 0
    assert capsys.readouterr().out == "written: model.html\n"
    assert (folder / "model.html").read_text().startswith("<!")


def test_mesh(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mesh", "model.py:make", "--ranks", "2", "--by", "bytes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    received = [one["bytes"] for one in found["ranked"]]
    assert received == sorted(received) and len(received) == 8


def test_verify_finds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finding, here of an impossible tolerance, is exit code 1."""
    assert main(["verify", "model.py:real", "--mesh", "2,2,2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["worst"] < 1e-9
    assert main(["verify", "model.py:real", "--mesh", "2,2,2", "--tolerance", "0"]) == 1


def test_as_a_process(folder: Path) -> None:
    root = str(Path(__file__).resolve().parent.parent)
    line = [sys.executable, "-m", "partir", "plan", "nowhere.py:make", "--mesh", "2,2,2"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, env={"PYTHONPATH": root}, cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "partir: nowhere.py:make: there is no file nowhere.py.\n")
