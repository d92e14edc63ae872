"""Rules: how each op may be split, as text; and where the 3-D algorithm puts things, as text too.

`find(op)` returns the `Rule` of an op, `Rule.bind(...)` what it says about one node. parser.py describes the language.
"""

from partir.rules.binding import Binding, Body, MatrixProduct
from partir.rules.placement import Placement, VectorRest, parse_placement, placement
from partir.rules.recipe import Backend, run_body
from partir.rules.registry import add, builtin, find, forget, load, parse_rules, read, rule, using
from partir.rules.rule import Rule

__all__ = [
    "Backend",
    "Binding",
    "Body",
    "MatrixProduct",
    "Placement",
    "Rule",
    "VectorRest",
    "add",
    "builtin",
    "find",
    "forget",
    "load",
    "parse_placement",
    "parse_rules",
    "placement",
    "read",
    "rule",
    "run_body",
    "using",
]
