"""Options of the tests."""

from __future__ import annotations

import pytest

from tests.torchvision_ops import define_missing_ops

define_missing_ops()  # before any test imports transformers or timm


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/*.txt anew instead of comparing with them")
