"""Write a hardware profile as TOML."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields

from partir.hardware.profile import Hardware, Link, Pace


def hardware_text(hardware: Hardware) -> str:
    """Return the TOML text of a profile: ``parse_hardware(hardware_text(h), "") == h``."""
    return "\n".join(_lines(hardware)) + "\n"


def _lines(hardware: Hardware) -> Iterator[str]:
    yield f"name = {_text(hardware.name)}"
    yield f"sources = [{', '.join(map(_text, hardware.sources))}]"
    yield f"ranks_per_node = {hardware.ranks_per_node}"
    yield f"memory = {hardware.memory!r}  # bytes"
    yield f"memory_bandwidth = {hardware.memory_bandwidth!r}  # bytes/s"
    yield f"launch = {hardware.launch!r}  # seconds"
    yield from ("", "[flops]  # FLOP/s")
    yield from (f"{dtype} = {rate!r}" for dtype, rate in hardware.flops.items())
    for link in hardware.links:
        yield from _link_lines(link)
    yield from ("", "[efficiency]")
    yield from (f"{each.name} = {getattr(hardware.efficiency, each.name)!r}" for each in fields(hardware.efficiency))


def _link_lines(link: Link) -> Iterator[str]:
    yield from ("", "[[links]]", f"name = {_text(link.name)}", f"ranks = {link.ranks or _text('all')}")
    yield from _pace_lines(link.pace)
    for op, pace in link.collectives.items():
        yield from ("", f"[links.collectives.{op}]")
        yield from _pace_lines(pace)


def _pace_lines(pace: Pace) -> Iterator[str]:
    yield f"latency = {pace.latency!r}  # seconds a step"
    yield f"bandwidth = {pace.bandwidth!r}  # bytes/s"
    yield f"start = {pace.start!r}  # seconds"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a basic string of TOML is one of JSON
