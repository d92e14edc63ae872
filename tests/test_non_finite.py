"""`check_finite`: a loss that is nan or inf is an error that names the call, the node, the line and the rank that made it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from partir import NonFiniteError, PartirError, parallelize


class Logs(nn.Module):
    """A logarithm of what a user gives, behind a mask that holds inf on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        attended = self.linear(x).masked_fill(mask, float("-inf")).softmax(-1)
        return (attended @ self.linear.weight + torch.log(x)).square().mean()


def parallel(check_finite: str, mesh: tuple[int, ...] = (2, 2, 1)) -> Logs:
    torch.manual_seed(0)
    return parallelize(Logs().double(), mesh, check_finite=check_finite)


def inputs(low: float = 1.0) -> tuple[Tensor, Tensor]:
    x = torch.ones(4, 8, dtype=torch.float64)
    x[3, 5] = low
    return x, torch.arange(8).expand(4, 8) > 5


@pytest.mark.parametrize("mesh", [(2, 2, 1), (1, 2, 2), (1, 1, 1), (2, 1, 2, 1)])
def test_the_node_is_named(mesh: tuple[int, ...]) -> None:
    model = parallel("nodes", mesh)
    model(*inputs()).backward()
    with pytest.raises(NonFiniteError) as caught:
        model(*inputs(-0.5))
    text = str(caught.value)
    assert "call 2: the loss output[0] is nan. %log = aten.log.default, test_non_finite.py:" in text, text
    assert "makes 1 nan of" in text and "from -0.5 to 1" in text and "on rank " in text, text
    assert float(model.calls) == 1  # the call that failed has written nothing
    assert torch.isfinite(model(*inputs()))


def test_inf_is_followed_through_inf() -> None:
    with pytest.raises(NonFiniteError, match=r"is inf. %log = aten.log.default.* makes 1 inf of"):
        parallel("nodes")(*inputs(0.0))


def test_what_enters_with_nan_is_named() -> None:
    model = parallel("nodes")
    with torch.no_grad():
        model.linear.weight[2, 3] = float("nan")
    with pytest.raises(NonFiniteError, match=r"%linear.weight, which enters the program, holds 1 nan and 0 inf of \d+ on rank"):
        model(*inputs())
    with pytest.raises(NonFiniteError, match=r"%x, which enters the program, holds 1 nan"):
        parallel("nodes")(*inputs(float("nan")))


def test_only_the_loss_and_never() -> None:
    with pytest.raises(NonFiniteError, match=r'call 1: the loss output\[0\] is nan. Pass check_finite="nodes" to parallelize'):
        parallel("loss")(*inputs(-1.0))
    assert parallel("never")(*inputs(-1.0)).isnan()
    with pytest.raises(PartirError, match="check_finite='always' is not understood; choose from 'never', 'loss', 'nodes'"):
        parallel("always")


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "cluster.md").read_text()
    ((source, printed),) = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```\n", page, re.MULTILINE | re.DOTALL)
    exec(compile(source, "cluster.md", "exec", dont_inherit=True), {"__name__": "page"})
    assert capsys.readouterr().out == printed
