"""The process that the roles are forked from. Run as ``python -m tests.support.roles.zygote FD``; speaks JSON lines over that socket.

It imports everything once, has no threads, and reaps: the test asks it to wait for a process that died or stopped.
Started with a failpoint, so that the product's places are live; each child arms its own.
"""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from fsref import failpoints
from tests.support.roles import actors, wire


def main(fd: int) -> None:
    """Serves until the test's end of the socket is closed."""
    control = socket.socket(fileno=fd)
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads: a process that forks must have one"
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not data:
            control.close()
            return
        request = json.loads(data)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], os.WUNTRACED)
            control.sendall(json.dumps(status).encode() + b"\n")
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            serve(socket.socket(fileno=fds[0]), rules=request["failpoints"])
        os.close(fds[0])
        control.sendall(json.dumps(pid).encode() + b"\n")


def serve(peer: socket.socket, *, rules: str) -> None:
    """One role: carries out commands until told to end, or until the test is gone."""
    failpoints._armed.clear()
    failpoints._armed.update(failpoints.parse(rules))
    stream = wire.Stream(peer)
    actor: Any = None
    while True:
        command = stream.read()
        if command is None or command["do"] == "end":
            os._exit(0)
        try:
            if command["do"] == "open":
                actor = actors.ROLES[command["role"]](*command["args"], **command["with"])
                stream.write({"ok": actor.inc if actor.holder else ""})
            else:
                stream.write({"ok": getattr(actor, command["do"])(*command["args"], **command["with"])})
        except Exception as e:  # noqa: BLE001 - the test gets it
            stream.write({"error": type(e).__name__, "text": str(e)})


if __name__ == "__main__":
    main(int(sys.argv[1]))
