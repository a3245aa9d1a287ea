"""Several hosts on one machine: network namespaces, each with an address of its own on one bridge. Needs root and ``ip``.

``hosts(3)`` gives ``10.213.7.1`` to ``.3``. Programs are started in a host with ``Host.command`` in front. Everything is removed at the
end, also after a failure; the names hold this process's id, so sessions do not meet.
"""

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support import needs

_numbers = itertools.count()


def _ip(*args: str) -> None:
    subprocess.run([needs.program("ip"), *args], check=True, capture_output=True, timeout=60)


@dataclass(frozen=True)
class Host:
    """One namespace."""

    name: str
    address: str
    link: str
    """Its end of the cable in the bridge's namespace."""
    bridge: str

    @property
    def command(self) -> list[str]:
        """Runs a program in this host."""
        return [needs.program("ip"), "netns", "exec", self.name]

    def cut_off(self) -> None:
        """Pulls the cable: nothing is delivered any more, and nobody is told."""
        _ip("-n", self.bridge, "link", "set", self.link, "down")

    def plug_in(self) -> None:
        """Puts the cable back."""
        _ip("-n", self.bridge, "link", "set", self.link, "up")


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Hosts on a bridge that has a namespace of its own, so that the machine's network stays untouched."""
    needs.root()
    base = f"fs{os.getpid()}x{next(_numbers)}"
    bridge = f"{base}b"
    made = [bridge]
    try:
        _ip("netns", "add", bridge)
        _ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", bridge, "link", "set", "br0", "up")
        found = []
        for n in range(count):
            host = Host(f"{base}h{n}", f"10.213.7.{n + 1}", f"port{n}", bridge)
            _ip("netns", "add", host.name)
            made.append(host.name)
            _ip("-n", bridge, "link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("-n", bridge, "link", "set", host.link, "master", "br0")
            _ip("-n", bridge, "link", "set", host.link, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "eth0", "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
            found.append(host)
        yield found
    finally:
        for name in reversed(made):
            subprocess.run([needs.program("ip"), "netns", "del", name], check=False, capture_output=True, timeout=60)
