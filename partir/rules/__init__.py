"""Rules: how each op may be split, as text; and where the 3-D algorithm puts things, as text too.

`find(op)` returns the `Rule` of an op, `Rule.bind(...)` what it says about one node. The language is described in parser.py.
"""

from partir.rules.binding import Binding, Body, MatrixProduct
from partir.rules.registry import add, builtin, find, forget, load, parse_rules, rule
from partir.rules.rule import Rule

__all__ = ["Binding", "Body", "MatrixProduct", "Rule", "add", "builtin", "find", "forget", "load", "parse_rules", "rule"]
