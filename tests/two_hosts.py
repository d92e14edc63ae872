"""Two hosts on one machine: network namespaces joined by a virtual cable, each with nothing but its own addresses.

Where a machine permits none, two agents on addresses of the loopback stand in: two hosts in all but the network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Hosts:
    """Where two agents of torchrun run.

    Args:
        prefixes: the words that begin a command on either.
        addresses: by which they know each other.
        interface: the network interface that has the address.
    """

    prefixes: tuple[tuple[str, ...], tuple[str, ...]]
    addresses: tuple[str, str]
    interface: str


LOOPBACK = Hosts(((), ()), ("127.0.0.1", "127.0.0.2"), "lo")


def why_no_namespaces() -> str:
    """Say why this machine cannot make network namespaces, "" where it can."""
    if shutil.which("ip") is None:
        return "the command ip (package iproute2) is not installed"
    done = _ip("netns", "add", _name(9), check=False)
    if done.returncode:
        return f"network namespaces need CAP_SYS_ADMIN and CAP_NET_ADMIN, as root has: {done.stderr.strip()}"
    _ip("netns", "del", _name(9))
    return ""


@contextmanager
def namespaces() -> Generator[Hosts]:
    """Make two network namespaces joined by a cable, and remove them afterwards."""
    names, ends = (_name(0), _name(1)), (f"a{os.getpid()}", f"b{os.getpid()}")
    made = Hosts((_inside(names[0]), _inside(names[1])), ("10.87.0.1", "10.87.0.2"), "wire")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, made.addresses):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "link", "set", end, "name", made.interface)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", made.interface)
            for device in (made.interface, "lo"):
                _ip("-n", name, "link", "set", device, "up")
        yield made
    finally:
        for name in names:
            _ip("netns", "del", name, check=False)


def run_on_both(hosts: Hosts, ranks: int, command: Sequence[str], timeout: float) -> list[subprocess.CompletedProcess[str]]:
    """Run a training command as `ranks` processes on each of two hosts and return what they print."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": hosts.interface}
    started: list[subprocess.Popen[str]] = []
    for host, prefix in enumerate(hosts.prefixes):
        words = [*prefix, *_torchrun(hosts, host, ranks), *command]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment))
    try:
        printed = [process.communicate(timeout=timeout) for process in started]
    finally:
        for process in started:
            process.kill()
    return [subprocess.CompletedProcess(command, process.returncode, *texts) for process, texts in zip(started, printed)]


def _torchrun(hosts: Hosts, host: int, ranks: int) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks)]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts.addresses[0]}:29400", "--rdzv-id", "two-hosts"]
    # torchrun tells by its name whether a host is the endpoint's; here both have one name.
    return [*launch, *rendezvous, "--rdzv-conf", f"is_host={host == 0}", "--local-addr", hosts.addresses[host]]


def _inside(name: str) -> tuple[str, ...]:
    return "ip", "netns", "exec", name


def _name(number: int) -> str:
    return f"partir-{os.getpid()}-{number}"


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)
