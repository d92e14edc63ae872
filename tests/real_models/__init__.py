"""Models that other people wrote, in small random configurations, with the calls that people make of them."""

from tests.torchvision_ops import define_missing_ops

define_missing_ops()  # outside pytest too: a rank, the table of models
