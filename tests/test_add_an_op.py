"""docs/add_an_op.md and examples/new_op.py run; the command line checks rule files; a plain function is an op; a rule is proposed."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from partir import rule, rules
from partir.cli import main
from partir.rules.propose import propose

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
aten = torch.ops.aten


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "add_an_op"}
    try:
        for source, printed in BLOCK.findall((ROOT / "docs/add_an_op.md").read_text()):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(compile(source, "add_an_op.md", "exec", dont_inherit=True), names)
            out = capsys.readouterr().out
            assert not printed or out == printed
    finally:
        rules.forget("aten.cumsum")


def test_the_example_runs() -> None:
    run = subprocess.run([sys.executable, "examples/new_op.py"], cwd=ROOT, capture_output=True, text=True, timeout=200, env=None)
    assert run.returncode == 0, run.stderr
    assert "4 ok, 0 wrong" in run.stdout
    differences = [float(line.rsplit(" ", 1)[1]) for line in run.stdout.splitlines() if "largest difference" in line]
    assert len(differences) == 3 and max(differences) < 1e-12


RIGHT = "op aten.mm(a[m k], b[k n]) -> c[m n]\n    sum k\n"
COMMANDS = {
    "right": (RIGHT, [], 0, "3 ok, 0 wrong, 0 missing"),
    "missing": (RIGHT + "    whole m\n", [], 0, "m could be split"),
    "wrong": ("op aten.mm(a[m k], b[k n]) -> c[m n]\n    max k\n", [], 1, "with self float64[12, 12], mat2 float64[12, 12]"),
    "blocks": (RIGHT.replace("sum", "max"), ["--blocks", "2x3"], 1, "k: 2x3 blocks: result 0 differs at ["),
    "syntax": ("op aten.mm(a[m k], b[k n] -> c[m n]\n", [], 2, ":1:27: unexpected `->`"),
    "no such op": ("op shop.nothing(a[m]) -> c[m]\n", [], 2, "torch has no op shop.nothing: import the module that defines it"),
    "no such module": (RIGHT, ["--import", "no_such_module"], 2, "--import no_such_module: No module named"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_check_rules(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, options, code, said = COMMANDS[name]
    path = tmp_path / "mine.rules"
    path.write_text(text)
    assert main(["check-rules", str(path), *options]) == code
    printed = capsys.readouterr()
    assert said in (printed.err if code == 2 else printed.out)
    assert printed.err.startswith("partir: ") == (code == 2) and "Traceback" not in printed.err


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-rules", str(tmp_path / "none.rules")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_an_option_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["check-rules", "--blocks", "2y", "x"])
    assert left.value.code == 2 and "invalid" in capsys.readouterr().err


def test_a_function_is_an_op_with_its_own_gradient() -> None:
    @rule("x[* k] -> y[* k], z[*]; whole k")
    def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x.square().sum(-1)

    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    y, z = halves(x)
    (gradient,) = torch.autograd.grad((y * 3).sum() + z.sum(), x)
    assert torch.equal(gradient, 3 + 2 * x.detach())
    assert torch.autograd.gradcheck(halves, (x,))


def r(*shape: int) -> torch.Tensor:
    return torch.rand(shape)


PROPOSED = [
    (aten.mm.default, (r(4, 6), r(6, 8)), "op aten.mm(self[a b], mat2[b c]) -> y[a c]\n    sum b"),
    (aten.bmm.default, (r(6, 6, 6), r(6, 6, 6)), "op aten.bmm(self[a b c], mat2[a c d]) -> y[a b d]\n    sum c"),
    (aten.cumsum.default, (r(6, 6), 1), "op aten.cumsum(self[a b], dim) -> y[a c]\n    whole b c"),
    (aten.add.Tensor, (r(4, 6), r(6)), "op aten.add.Tensor(self[a b], other[b]) -> y[a b]"),
    (aten.rand_like.default, (r(4, 6),), None),
    (aten.linalg_inv.default, (r(4, 4),), None),
]


@pytest.mark.parametrize(("op", "args", "text"), PROPOSED, ids=[str(case[0]) for case in PROPOSED])
def test_a_proposed_rule(op: object, args: tuple[object, ...], text: str | None) -> None:
    assert propose(op, args, {}) == text
    if text is not None:
        assert next(iter(rules.parse_rules(text))) == str(op).removesuffix(".default")
