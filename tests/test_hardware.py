"""Hardware profiles: the shipped ones, the way to text and back, and every mistake of a file by its message."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from partir.errors import HardwareError
from partir.hardware import hardware_text, load_hardware, parse_hardware, shipped_names

GOOD = """\
name = "small"
sources = ["a test"]
ranks_per_node = 2
memory = 1e9
memory_bandwidth = 1e10
launch = 1e-5

[flops]
float32 = 1e12

[[links]]
name = "node"
ranks = 2
latency = 1e-6
bandwidth = 1e10

[[links]]
name = "network"
ranks = "all"
latency = 1e-5
bandwidth = 1e9

[links.collectives.all_gather]
latency = 2e-5
bandwidth = 2e9
start = 3e-5

[efficiency]
overlap = 0.0
"""


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_profiles_name_their_sources(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name and len(hardware.sources) >= 3
    assert hardware.links[0].ranks == hardware.ranks_per_node and hardware.links[-1].ranks is None
    assert hardware.links[0].bandwidth > hardware.links[-1].bandwidth
    assert hardware.flops_of(torch.float32) > hardware.memory_bandwidth > hardware.links[0].bandwidth


def test_text_and_back() -> None:
    for hardware in [parse_hardware(GOOD, "good.toml"), *map(load_hardware, shipped_names())]:
        assert parse_hardware(hardware_text(hardware), "again.toml") == hardware


def test_a_collective_may_have_a_pace_of_its_own() -> None:
    network = parse_hardware(GOOD, "good.toml").links[1]
    assert network.pace_of("all_gather").start == 3e-5 and network.pace_of("all_reduce") == network.pace


def test_a_path_and_a_profile_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    hardware = load_hardware(path)
    assert load_hardware(str(path)) == hardware and load_hardware(hardware) is hardware


MISTAKES = [
    ("memory = 1e9\n", "", "bad.toml: memory is missing; expected a number above 0."),
    ("memory = 1e9", "memory = -1e9", "bad.toml: memory is -1e+09; expected a number above 0."),
    ("memory = 1e9", "memory = 0", "bad.toml: memory is 0; expected a number above 0."),
    ("memory = 1e9", "memory = nan", "bad.toml: memory is nan; expected a number above 0."),
    ("memory = 1e9", 'memory = "80GB"', "bad.toml: memory is '80GB'; expected a number above 0."),
    ("memory = 1e9", "memory = true", "bad.toml: memory is True; expected a number above 0."),
    ("memory = 1e9", "memry = 1e9", "bad.toml: memry is unknown; keys here are name, sources"),
    ("launch = 1e-5", "launch = -1", "bad.toml: launch is -1; expected seconds, 0 or more."),
    ("ranks_per_node = 2", "ranks_per_node = 2.5", "bad.toml: ranks_per_node is 2.5; expected a whole number of 1 or more."),
    ("float32 = 1e12", "float32 = inf", "bad.toml: flops.float32 is inf; expected a number above 0."),
    ("float32 = 1e12", "", "bad.toml: flops has no dtype"),
    ('sources = ["a test"]', "sources = []", "bad.toml: sources is []; expected a list of texts."),
    ("latency = 1e-6", "", "bad.toml: links[0].latency is missing; expected seconds, 0 or more."),
    ("ranks = 2", 'ranks = "two"', "bad.toml: links[0].ranks is 'two'; expected a whole number of 1 or more or \"all\"."),
    ('ranks = "all"', "ranks = 4", 'bad.toml: links[1].ranks is 4; the last level joins all ranks: "all".'),
    ("ranks = 2", 'ranks = "all"', "bad.toml: links[1].ranks is all after all; each level joins units of the one before."),
    ("collectives.all_gather", "collectives.gather_all", "bad.toml: links[1].collectives.gather_all is unknown; keys here are"),
    ("overlap = 0.0", "overlap = 1.5", "bad.toml: efficiency.overlap is 1.5; expected a number from 0 to 1."),
    ("overlap = 0.0", "compute = 0.0", "bad.toml: efficiency.compute is 0; expected a number above 0 and up to 1."),
    ("memory = 1e9", "memory = 1" + "0" * 400, "; expected a number above 0, and between 1e-30 and 1e+30."),
    ("float32 = 1e12", "float32 = 5e-324", "flops.float32 is 5e-324; expected a number above 0, and between 1e-30 and 1e+30."),
    ("launch = 1e-5", "launch = 1e308", "bad.toml: launch is 1e+308; expected seconds, 0 or more, and between"),
    ("ranks_per_node = 2", "ranks_per_node = 1" + "0" * 400, "; expected a whole number of 1 or more, below 2^31."),
    ("launch = 1e-5", "launch = " + "[" * 5000, "bad.toml is not TOML: "),
    ("launch = 1e-5", "launch = = 1", "bad.toml is not TOML: Invalid value (at line 6, column 10)."),
]


@pytest.mark.parametrize(("good", "bad", "message"), MISTAKES)
def test_a_mistake_names_file_key_and_expectation(good: str, bad: str, message: str) -> None:
    assert GOOD.count(good) == 1
    parse_hardware(GOOD, "good.toml")
    with pytest.raises(HardwareError) as caught:
        parse_hardware(GOOD.replace(good, bad), "bad.toml")
    assert message in str(caught.value)


def test_unknown_names_and_unreadable_paths(tmp_path: Path) -> None:
    names = ", ".join(shipped_names())
    message = re.escape(f"hardware 'dgx-h10' is neither a shipped profile ({names}) nor a file. Did you mean 'dgx-h100'?")
    with pytest.raises(HardwareError, match=message):
        load_hardware("dgx-h10")
    with pytest.raises(HardwareError, match=r"none.toml cannot be read: .*No such file"):
        load_hardware(tmp_path / "none.toml")
    with pytest.raises(HardwareError, match="cannot be read: .*Is a directory"):
        load_hardware(tmp_path)
    for nonsense in ("a\0b.toml", 3, None):
        with pytest.raises(HardwareError, match="is no name and no path of a TOML file."):
            load_hardware(cast(Any, nonsense))


def test_a_dtype_that_the_profile_lacks() -> None:
    with pytest.raises(HardwareError, match=r"hardware small: flops.bfloat16 is missing; it has float32."):
        parse_hardware(GOOD, "good.toml").flops_of(torch.bfloat16)
