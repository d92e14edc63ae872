"""All the cases, by package and name."""

from __future__ import annotations

from tests.real_models import hugging_face, torch_modules, vision

CASES = {
    **{f"transformers {name}": case for name, case in hugging_face.CASES.items()},
    **{f"timm {name}": case for name, case in vision.CASES.items()},
    **{f"torch {name}": case for name, case in torch_modules.CASES.items()},
}
