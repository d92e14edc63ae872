"""What a plan costs, for any sizes: bytes, FLOPs and memory as expressions in the sizes of axes, batch and sequence."""

from partir.cost.cost import Cost, cost_of

__all__ = ["Cost", "cost_of"]
