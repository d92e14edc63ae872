"""Read a hardware profile from TOML: by the name of a shipped one, or by path.

    name = "a-machine"
    sources = ["a document"]
    ranks_per_node = 8
    memory = 80e9                  # bytes of a device
    memory_bandwidth = 3.35e12     # bytes/s
    launch = 5e-6                  # seconds of an op besides its work

    [flops]                        # FLOP/s by dtype
    float32 = 67e12

    [[links]]                      # the nearest level first
    name = "node"
    ranks = 8
    latency = 3.4e-6               # seconds a step
    bandwidth = 450e9              # bytes/s that a rank receives while all of its unit do the same
    start = 8.4e-6                 # optional: seconds of a collective before its first step

    [[links]]
    name = "network"
    ranks = "all"
    latency = 14e-6
    bandwidth = 50e9

    [links.collectives.all_gather] # optional: a pace of its own, keys as above
    latency = 14e-6
    bandwidth = 40e9

    [efficiency]                   # optional, parts of 1: compute, memory, links, overlap
    overlap = 0.8
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any, cast

from partir.collectives import SCHEMAS
from partir.errors import HardwareError, first_line
from partir.hardware.profile import Efficiency, Hardware, Link, Pace

# In the standard library from Python 3.11 on; before, tomli is the same code.
toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

LEAST, MOST = 1e-30, 1e30
"""Of a machine's figures, so that no product or quotient of them leaves the range of a float."""

KEYS = ("name", "sources", "ranks_per_node", "memory", "memory_bandwidth", "launch", "flops", "links", "efficiency")
LINK_KEYS = ("name", "ranks", "latency", "bandwidth", "start", "collectives")
PACE_KEYS = ("latency", "bandwidth", "start")


def shipped_names() -> tuple[str, ...]:
    """Return the names of the profiles that come with partir."""
    files = resources.files("partir.hardware").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def load_hardware(profile: str | Path | Hardware) -> Hardware:
    """Return a profile.

    Args:
        profile: a shipped name (``"dgx-h100"``), the path of a TOML file, or a profile, which is returned as it is.

    Raises:
        HardwareError: no such name or file, not TOML, or a key that is missing, unknown or out of range.

    >>> load_hardware("dgx-h100").ranks_per_node
    8
    """
    if isinstance(profile, Hardware):
        return profile
    if str(profile) in shipped_names():
        file = resources.files("partir.hardware").joinpath(f"{profile}.toml")
        return parse_hardware(file.read_text(encoding="utf-8"), f"{profile}.toml")
    if not isinstance(cast(object, profile), (str, Path)) or "\0" in str(profile):
        raise HardwareError(f"hardware {profile!r} is no name and no path of a TOML file.")
    path = Path(profile)
    if path.suffix != ".toml" and not path.exists():
        raise HardwareError(_unknown(str(profile)))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HardwareError(f"hardware profile {path} cannot be read: {error}.") from None
    return parse_hardware(text, str(path))


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, shipped_names(), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"hardware {name!r} is neither a shipped profile ({', '.join(shipped_names())}) nor a file.{hint}"


def parse_hardware(text: str, where: str) -> Hardware:
    """Return the profile that a TOML text holds.

    Args:
        text: of the file.
        where: what errors call it.

    Raises:
        HardwareError: see `load_hardware`.
    """
    try:
        found: object = toml.loads(text)
    except (ValueError, RecursionError) as error:
        raise HardwareError(f"{where} is not TOML: {first_line(error)}.") from None
    table = _Table(where, "", found, KEYS)
    flops = table.table("flops", None)
    if not flops.found:
        raise table.error("flops", "has no dtype; it takes FLOP/s by dtype, `float32 = 67e12`")
    return Hardware(
        name=table.text("name"),
        sources=table.texts("sources"),
        ranks_per_node=table.count("ranks_per_node"),
        memory=table.positive("memory"),
        memory_bandwidth=table.positive("memory_bandwidth"),
        launch=table.seconds("launch"),
        flops={dtype: flops.positive(dtype) for dtype in flops.found},
        links=_links(table),
        efficiency=_efficiency(table),
    )


def _links(table: _Table) -> tuple[Link, ...]:
    entries = table.get("links", "a list of tables, `[[links]]`")
    if not isinstance(entries, list) or not entries:
        raise table.error("links", "is not a list of tables; write one [[links]] a level, the nearest first")
    links = tuple(_link(_Table(table.where, f"links[{i}].", e, LINK_KEYS)) for i, e in enumerate(cast("list[Any]", entries)))
    spans = [link.ranks for link in links]
    if spans[-1] is not None:
        raise table.error(f"links[{len(links) - 1}].ranks", f'is {spans[-1]}; the last level joins all ranks: "all"')
    for number, (inner, outer) in enumerate(zip(spans, spans[1:])):
        if inner is None or (outer is not None and (outer <= inner or outer % inner)):
            law = f"is {outer or 'all'} after {inner or 'all'}; each level joins units of the one before"
            raise table.error(f"links[{number + 1}].ranks", law)
    return links


def _link(table: _Table) -> Link:
    ranks = None if table.found.get("ranks") == "all" else table.count("ranks", 'or "all"')
    paces: dict[str, Pace] = {}
    if "collectives" in table.found:
        each = table.table("collectives", tuple(SCHEMAS))
        paces = {op: _pace(each.table(op, PACE_KEYS)) for op in each.found}
    return Link(table.text("name"), ranks, _pace(table), paces)


def _pace(table: _Table) -> Pace:
    return Pace(table.seconds("latency"), table.positive("bandwidth"), table.seconds("start", 0.0))


def _efficiency(table: _Table) -> Efficiency:
    if "efficiency" not in table.found:
        return Efficiency()
    names = tuple(each.name for each in fields(Efficiency))
    given = table.table("efficiency", names)
    return Efficiency(**{name: given.part(name, least=0.0 if name == "overlap" else None) for name in given.found})


class _Table:
    """One table of a file; what is wrong in it is an error that names file, key and what is expected.

    Args:
        where: the file.
        prefix: of its keys in errors, ``"links[0]."``.
        found: what TOML gave.
        keys: those that it may have; None: any.
    """

    def __init__(self, where: str, prefix: str, found: object, keys: tuple[str, ...] | None) -> None:
        self.where, self.prefix = where, prefix
        if not isinstance(found, Mapping):
            raise HardwareError(f"{where}: {prefix.rstrip('.')} is {found!r}; expected a table.")
        self.found: Mapping[str, Any] = cast("Mapping[str, Any]", found)
        unknown = [key for key in self.found if keys is not None and key not in keys]
        if unknown:
            raise self.error(unknown[0], f"is unknown; keys here are {', '.join(keys or ())}")

    def error(self, key: str, law: str) -> HardwareError:
        """Return the error that a key deserves."""
        return HardwareError(f"{self.where}: {self.prefix}{key} {law}.")

    def get(self, key: str, expected: str) -> Any:
        """Return the value of a key that must be there."""
        if key not in self.found:
            raise self.error(key, f"is missing; expected {expected}")
        return self.found[key]

    def table(self, key: str, keys: tuple[str, ...] | None) -> _Table:
        """Return the table at a key."""
        return _Table(self.where, f"{self.prefix}{key}.", self.get(key, "a table"), keys)

    def text(self, key: str) -> str:
        """Return the words at a key."""
        value = self.get(key, "text")
        if not isinstance(value, str) or not value:
            raise self.error(key, f"is {value!r}; expected text")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return the list of texts at a key."""
        value = self.get(key, "a list of texts")
        items = cast("list[Any]", value) if isinstance(value, list) else []
        if not items or not all(isinstance(item, str) for item in items):
            raise self.error(key, f"is {value!r}; expected a list of texts")
        return tuple(items)

    def number(self, key: str, expected: str) -> float:
        """Return the finite number at a key."""
        value = self.get(key, expected)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
            raise self.error(key, f"is {value!r}; expected {expected}")
        if value and not LEAST < abs(value) < MOST:
            raise self.error(key, f"is {str(value)[:40]}; expected {expected}, and between {LEAST:g} and {MOST:g}")
        return float(value)

    def positive(self, key: str) -> float:
        """Return a number above 0."""
        return self._at_least(key, "a number above 0", lambda value: value > 0)

    def seconds(self, key: str, default: float | None = None) -> float:
        """Return a number of seconds, 0 or more."""
        if default is not None and key not in self.found:
            return default
        return self._at_least(key, "seconds, 0 or more", lambda value: value >= 0)

    def part(self, key: str, least: float | None) -> float:
        """Return a number from `least`, or above 0, to 1."""
        expected = "a number above 0 and up to 1" if least is None else f"a number from {least:g} to 1"
        return self._at_least(key, expected, lambda value: (value > 0 if least is None else value >= least) and value <= 1)

    def count(self, key: str, other: str = "") -> int:
        """Return a whole number of 1 or more."""
        expected = " ".join(["a whole number of 1 or more", *([other] if other else [])])
        value = self.get(key, expected)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, f"is {value!r}; expected {expected}")
        if value >= 2**31:
            raise self.error(key, f"is {str(value)[:40]}; expected {expected}, below 2^31")
        return value

    def _at_least(self, key: str, expected: str, legal: Callable[[float], bool]) -> float:
        value = self.number(key, expected)
        if not legal(value):
            raise self.error(key, f"is {value:g}; expected {expected}")
        return value
