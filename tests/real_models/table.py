"""Write docs/models.md: what works of the models here and what is refused. `python -m tests.real_models.table [part of a name ...]`"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

import torch

from partir.errors import PartirError
from tests.real_models.all import CASES
from tests.real_models.case import Case, Run, runs, worst_difference

HEAD = """# Models that work

Written by `python -m tests.real_models.table > docs/models.md` (about 20 minutes of one core).

Each model, in a small random configuration, called as people call it (keywords, `labels=`, the default cache), runs on one device and
on simulated meshes with `partir.verify`: the number is the largest relative difference of the loss, all outputs, every parameter's
gradient and every buffer. Sizes are odd (vocabulary 37, batch 3, sequence 7, 6 heads, 2 key and value heads) or even (48, 12, 8, 12, 4).
About 1e-7 means that the model itself computes in float32 somewhere (losses, rotary embeddings, norms).

| model | attention | odd (2, 2, 2) | even (1, 4, 1) | odd (3, 1, 2) | evaluation (2, 2, 2) |
|---|---|---|---|---|---|"""


def main(wanted: list[str]) -> None:
    """Print the table, a row for each model and attention."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print(HEAD)
    refused: dict[str, str] = {}
    for name, case in CASES.items():
        if wanted and not any(part in f"={name}=" for part in wanted):
            continue
        for attention in case.attentions:
            cells = [_cell(name, case, run, refused) for run in runs(case) if run.attention == attention]
            print(f"| {name} | {attention} | " + " | ".join([*cells, *[""] * (4 - len(cells))]) + " |", flush=True)
    if refused:
        print("\n## What is refused, and with which error\n")
    for name, reason in refused.items():
        print(f"{name}:\n\n```\n{reason}\n```\n")


def _cell(name: str, case: Case, run: Run, refused: dict[str, str]) -> str:
    try:
        return f"{worst_difference(case, run):.0e}"
    except PartirError as error:
        message = re.sub(r"/\S*/site-packages/", "", f"{type(error).__name__}: {error}")
        refused[name] = message.replace(f"{Path.cwd()}/", "")
        return "refused"


if __name__ == "__main__":
    main(sys.argv[1:])
