"""partir: a declarative graph compiler and auto-partitioner for PyTorch.

    model = partir.parallelize(model, mesh=(4, 4, 4))
"""

from partir.api import full_state_dict, parallelize
from partir.eager_randomness import same_randomness
from partir.equivalence import verify
from partir.errors import PartirError
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
from partir.suggest import Suggestion, suggest_mesh

__all__ = [
    "Layout",
    "Mesh",
    "PartirError",
    "Plan",
    "PlanDifference",
    "PlanDocument",
    "Suggestion",
    "check_rules",
    "full_gradient",
    "full_state_dict",
    "full_tensor",
    "length_buckets",
    "load_optimizer_state_dict",
    "optimizer_state_dict",
    "parallelize",
    "plan",
    "record_communication",
    "rule",
    "same_randomness",
    "suggest_mesh",
    "verify",
]
