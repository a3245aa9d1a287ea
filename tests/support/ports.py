"""Loopback ports for servers of tests."""

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """TCP ports of 127.0.0.1 that nobody listens on now, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def free_port() -> int:
    """One such port."""
    return free_ports(1)[0]
