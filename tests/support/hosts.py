"""Two hosts on this machine: network namespaces joined by a cable that a test can cut."""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import start


@dataclass(frozen=True)
class Host:
    """A separate network that shares everything else with this machine.

    Attributes:
        name: the name of its network namespace.
        address: its address for the other host.
        interface: its end of the cable.
    """

    name: str
    address: str
    interface: str

    def start(self, script: Path, *args: object, env: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
        """Start `script` on this host without waiting for it. Its output goes to the file `log`."""
        command = ["ip", "netns", "exec", self.name, sys.executable, str(script), *map(str, args)]
        # Otherwise gloo uses the interface of the machine's name, which the namespaces lack.
        return start(command, env={"GLOO_SOCKET_IFNAME": self.interface, **env}, log=log)

    def cut_cable(self) -> None:
        """From now on, everything that is sent is lost."""
        _ip("-n", self.name, "link", "set", self.interface, "down")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that can reach each other, until the block ends. Skips the test if the machine doesn't allow it."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (iproute2), which makes network namespaces")
    token = f"{os.getpid() % 100_000}{secrets.token_hex(2)}"  # names of interfaces have at most 15 letters
    first, second = (Host(f"pa{token}{side}", f"10.213.77.{end}", f"pa{token}{side}") for side, end in ("a1", "b2"))
    try:
        try:
            for host in (first, second):
                _ip("netns", "add", host.name)
            peer = ("peer", "name", second.interface, "netns", second.name)
            _ip("link", "add", first.interface, "netns", first.name, "type", "veth", *peer)
            for host in (first, second):
                _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
                for interface in ("lo", host.interface):
                    _ip("-n", host.name, "link", "set", interface, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield first, second
    finally:
        for host in (first, second):  # with their ends of the cable
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, check=True, encoding="utf-8")
