"""What the server compiles before it forks ranks: importing this takes seconds."""

from __future__ import annotations

import torch

from tests.compiled_ahead import compile_ahead

torch.set_num_threads(1)
compile_ahead()
