"""Simulated hosts on this machine: on the loopback device, or in separate network namespaces."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Host:
    """A simulated host.

    Attributes:
        prefix: prefix of commands that run on the host.
        address: network address of the host.
        device: network device of this address.
    """

    prefix: tuple[str, ...]
    address: str
    device: str


def on_loopback() -> list[Host]:
    """Returns two hosts that share this machine's network."""
    return [Host((), "127.0.0.1", "lo")] * 2


@contextlib.contextmanager
def in_namespaces() -> Iterator[list[Host]]:
    """Creates two hosts with separate networks, which are connected by a virtual cable only.

    Raises:
        OSError: this user or system can't create network namespaces.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise OSError("network namespaces need root and the command ip")
    names = [f"hkv{os.getpid()}{side}" for side in "ab"]
    created = []
    try:
        for name in names:
            _ip("netns", "add", name)
            created.append(name)
        _ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1])
        _ip("link", "set", names[1], "netns", names[1])
        hosts = []
        for number, name in enumerate(names, 1):
            address = f"10.211.73.{number}"
            _ip("-n", name, "address", "add", f"{address}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            hosts.append(Host(("ip", "netns", "exec", name), address, name))
        yield hosts
    finally:
        for name in created:
            _ip("netns", "delete", name)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
