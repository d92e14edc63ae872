"""The command line: what it prints, its exit codes, and one line instead of a traceback for a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from partir.cli import main

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


def no_module():
    return 3, torch.empty(2)


def leaves():
    raise SystemExit(0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
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
    "draw model.py:make --mesh 2,2,2 --out nowhere/x.html": "there is no folder",
    "draw model.py:make --mesh 2,2,2 --out x.xyz": "it has suffix '.xyz'",
    "cost model.py:make --mesh 2,2,2 --hardware none": "hardware 'none' is neither a shipped profile",
    "mesh model.py:make --ranks 0": "a mesh has at least one rank",
    "mesh model.py:make --ranks 8 --memory lots": "memory='lots' is no number of bytes",
    "mesh model.py:make --ranks 8 --memory 1e400GB": "memory='1e400GB' is no number of bytes",
    "plan --hf no_model_type.json --mesh 2,2,2": 'a config of Hugging Face has a "model_type"',
    "plan --hf unknown.json --mesh 2,2,2": "--hf unknown.json: ValueError: Unrecognized model identifier: no-such-model.",
    "plan --hf gpt2.json --seq 64 --mesh 2,2,2": "--seq 64: this model takes at most 32 positions.",
    "plan --hf list.json --mesh 2,2,2": 'a config of Hugging Face has a "model_type"',
    "plan --hf no.json --mesh 2,2,2": "no.json: line 1, column 2: this is no JSON",
    "plan --hf binary.json --mesh 2,2,2": "binary.json: this is no text; a config.json is JSON.",
    "plan --hf nowhere.json --mesh 2,2,2": "nowhere.json",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_message(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert MISTAKES[line] in error
    assert "Traceback" not in error


@pytest.mark.parametrize("command", ["plan", "draw", "cost", "mesh", "verify", "check-rules"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"usage: partir {command}" in capsys.readouterr().out


def test_plan_and_cost(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model.py:make", "--mesh", "2,2,2", "--json", "--out", "plan.json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["mesh"] == {"x": 2, "y": 2, "z": 2}
    assert (folder / "plan.json").is_file()
    assert main(["cost", "model.py:make", "--mesh", "2,2,2", "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)
    assert cost["values"]["bytes"] == sum(facts["bytes"].values())
    assert cost["seconds"] > 0


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
    assert main(["verify", "model.py:real", "--mesh", "2,2,2", "--tolerance", "-1"]) == 1


def test_as_a_process(folder: Path) -> None:
    root = str(Path(__file__).resolve().parent.parent)
    line = [sys.executable, "-m", "partir", "plan", "nowhere.py:make", "--mesh", "2,2,2"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, env={"PYTHONPATH": root}, cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "partir: nowhere.py:make: there is no file nowhere.py.\n")
