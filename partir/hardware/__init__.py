"""Hardware profiles: what a device and its links can do, read from TOML files; the shipped ones lie beside this file.

>>> from partir.hardware import load_hardware, shipped_names
>>> shipped_names()
('dgx-a100', 'dgx-h100', 'longhorn-v100', 'mi250x-node')
>>> longhorn = load_hardware("longhorn-v100")
>>> longhorn.ranks_per_node, longhorn.links[-1].bandwidth
(4, 3125000000.0)
"""

from partir.hardware.load import load_hardware, parse_hardware, shipped_names
from partir.hardware.profile import Efficiency, Hardware, Link, Pace
from partir.hardware.write import hardware_text

__all__ = ["Efficiency", "Hardware", "Link", "Pace", "hardware_text", "load_hardware", "parse_hardware", "shipped_names"]
