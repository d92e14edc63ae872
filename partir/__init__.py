"""partir: a declarative graph compiler and auto-partitioner for PyTorch.

    model = partir.parallelize(model, mesh=(4, 4, 4))
"""

from partir.accumulation import accumulate
from partir.api import full_state_dict, parallelize
from partir.batches import BatchSliceSampler, batch_slice, from_local_batch, micro_batches
from partir.clipping import clip_grad_norm_
from partir.eager_randomness import same_randomness
from partir.equivalence import verify
from partir.errors import PartirError
from partir.layout import Layout
from partir.mesh import Mesh
from partir.plan_difference import PlanDifference
from partir.plan_document import PlanDocument
from partir.plans import Plan, plan
from partir.rules import rule
from partir.rules.check import check_rules
from partir.runtime.parameters import full_gradient, full_tensor, load_optimizer_state_dict, optimizer_state_dict
from partir.runtime.record import record_communication
from partir.suggest import Suggestion, suggest_mesh

__all__ = [
    "BatchSliceSampler",
    "Layout",
    "Mesh",
    "PartirError",
    "Plan",
    "PlanDifference",
    "PlanDocument",
    "Suggestion",
    "accumulate",
    "batch_slice",
    "check_rules",
    "clip_grad_norm_",
    "from_local_batch",
    "full_gradient",
    "full_state_dict",
    "full_tensor",
    "load_optimizer_state_dict",
    "micro_batches",
    "optimizer_state_dict",
    "parallelize",
    "plan",
    "record_communication",
    "rule",
    "same_randomness",
    "suggest_mesh",
    "verify",
]
