"""partir: a declarative graph compiler and auto-partitioner for PyTorch.

    model = partir.parallelize(model, mesh=(4, 4, 4))
"""

from partir.accumulation import accumulate
from partir.api import full_state_dict, parallelize
from partir.batches import BatchSliceSampler, batch_slice, from_local_batch, micro_batches
from partir.checkpoint import Checkpoint, SavingCheckpoint, latest_checkpoint, load_checkpoint, save_checkpoint
from partir.clipping import clip_grad_norm_
from partir.eager_randomness import same_randomness
from partir.equivalence import verify
from partir.errors import NonFiniteError, PartirError, RankError
from partir.layout import Layout
from partir.length_buckets import length_buckets
from partir.mesh import Mesh
from partir.plan_difference import PlanDifference
from partir.plan_document import PlanDocument
from partir.plans import Plan, plan
from partir.rules import rule
from partir.rules.check import check_rules
from partir.runtime.parameters import full_gradient, full_tensor, load_optimizer_state_dict, optimizer_state_dict
from partir.runtime.record import record_communication
from partir.safetensors import load_safetensors, save_safetensors
from partir.suggest import Suggestion, suggest_mesh

__all__ = [
    "BatchSliceSampler",
    "Checkpoint",
    "Layout",
    "Mesh",
    "NonFiniteError",
    "PartirError",
    "Plan",
    "PlanDifference",
    "PlanDocument",
    "RankError",
    "SavingCheckpoint",
    "Suggestion",
    "accumulate",
    "batch_slice",
    "check_rules",
    "clip_grad_norm_",
    "from_local_batch",
    "full_gradient",
    "full_state_dict",
    "full_tensor",
    "latest_checkpoint",
    "length_buckets",
    "load_checkpoint",
    "load_optimizer_state_dict",
    "micro_batches",
    "optimizer_state_dict",
    "load_safetensors",
    "parallelize",
    "plan",
    "record_communication",
    "rule",
    "same_randomness",
    "save_checkpoint",
    "save_safetensors",
    "suggest_mesh",
    "verify",
]
