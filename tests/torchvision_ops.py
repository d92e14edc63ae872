"""Let torchvision be imported beside a torch that its binary was not built for; transformers and timm import it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

# The ops that `import torchvision` gives shape formulas to, whether its binary has loaded or not.
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def define_missing_ops() -> None:
    """Define the ops that importing torchvision needs, where the binary that has them does not load.

    The wheel on PyPI is built for CUDA's torch and does not load beside the CPU one; torchvision then goes on without its binary, until
    it registers a formula for an op that nobody defined: `operator torchvision::nms does not exist`. Nothing here calls these ops.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or _binary_loads(Path(found.origin).parent):
        return
    for schema in _SCHEMAS:
        name = schema.partition("(")[0]
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", schema.removeprefix(name))


def _binary_loads(folder: Path) -> bool:
    for binary in folder.glob("_C*.so"):
        try:
            torch.ops.load_library(str(binary))
            return True
        except OSError:
            continue
    return False
