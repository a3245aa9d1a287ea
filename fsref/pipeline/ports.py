"""TCP ports that nobody listens on now. Another process may still take one before it is used: its user then fails to bind and says so."""

import socket
from contextlib import ExitStack
from typing import Final

LOOPBACK: Final = "127.0.0.1"


def free_ports(count: int, *, address: str = LOOPBACK) -> list[int]:
    """``count`` free ports of an address of this machine, all different. Raises ``OSError`` if the address is not one of its own."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind((address, 0))
        return [s.getsockname()[1] for s in sockets]
