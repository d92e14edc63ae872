"""The training script, as a person runs it."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import partir

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "train_gpt.py"
SMALL = "--steps 3 --batch 4 --seq 16 --hidden 32 --layers 1 --heads 4 --dtype float64".split()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script in this process: a new one takes longer to import torch than to train."""
    argv, out, err, code = [str(SCRIPT), *SMALL, *arguments], io.StringIO(), io.StringIO(), 0
    path = mock.patch.object(sys, "path", [str(SCRIPT.parent), *sys.path])
    with mock.patch.object(sys, "argv", argv), path, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
            print("" if isinstance(stop.code, int) else stop.code, file=sys.stderr)
        except partir.PartirError as error:  # anything else is a failure of the test
            code = 1
            print(error, file=sys.stderr)
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def test_trains_beside_its_twin(tmp_path: Path) -> None:
    done = run("--mesh", "2,2,1", "--compare", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    first, last = (float(loss) for loss in done.stdout.split("mesh (2, 2, 1): loss ")[1].splitlines()[0].split(" -> "))
    assert last < first
    assert f"one device: loss {first:.4f} -> {last:.4f}" in done.stdout
    difference = float(done.stdout.split("largest difference of the two losses in 3 steps: ")[1].splitlines()[0])
    assert difference < 1e-12
    assert {"graph.dot", "loss.png", "plan.txt"} <= {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize(
    ("mesh", "message"),
    [("2,two", "'2,two' is not a list of sizes such as 2,2,2"), ("2,0,2", "0")],
)
def test_a_mesh_that_does_not_exist(mesh: str, message: str) -> None:
    done = run_here("--mesh", mesh)
    assert done.returncode != 0
    assert message in done.stderr.strip().splitlines()[-1]


def test_clipping_and_accumulation_of_a_hugging_face_model(tmp_path: Path) -> None:
    sizes = {"n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 256, **sizes}))
    done = run_here("--mesh", "2,1,2", "--compare", "--hf-config", str(tmp_path / "config.json"), "--clip", "0.5", "--accumulate", "2")
    assert done.returncode == 0, done.stderr
    difference = float(done.stdout.split("largest difference of the two losses in 3 steps: ")[1].splitlines()[0])
    assert difference < 1e-5  # transformers computes the loss in float32


def test_micro_batches_that_do_not_divide() -> None:
    assert "--accumulate 3 does not divide --batch 4 into equal micro-batches" in run_here("--accumulate", "3").stderr


def steps_of(done: subprocess.CompletedProcess[str]) -> dict[int, str]:
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stderr.splitlines() + done.stdout.splitlines() if line.startswith("step ")]
    return {int(words[1]): words[-1] for words in lines}


def test_a_run_goes_on_on_another_mesh(tmp_path: Path) -> None:
    folder = ("--checkpoints", str(tmp_path / "saved"))
    whole = steps_of(run_here("--mesh", "2,2,1", "--steps", "5"))
    steps_of(run_here("--mesh", "2,2,1", "--steps", "3", "--save-every", "2", *folder))
    resumed = steps_of(run_here("--mesh", "1,1,2", "--steps", "5", "--resume", *folder))
    assert sorted(resumed) == [3, 4, 5]
    assert resumed == {step: whole[step] for step in resumed}
    none_left = run_here("--mesh", "1,1,2", "--steps", "2", "--resume", *folder)
    assert none_left.returncode == 0 and "no step was left to make" in none_left.stdout, none_left.stderr


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    done = run_here("--resume", "--checkpoints", str(tmp_path))
    assert done.returncode == 1
    assert f"--resume: no complete checkpoint is in {tmp_path}." in done.stderr
