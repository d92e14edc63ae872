"""Models that other people wrote, in small random configurations, with the calls that people make of them."""
