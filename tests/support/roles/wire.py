"""JSON lines over a socket, with a deadline on the reader's side."""

import json
import socket
from typing import Any


class Stream:
    """One end."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self._buffer = b""

    def fileno(self) -> int:
        return self.peer.fileno()

    def write(self, message: Any) -> None:
        self.peer.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> Any:
        """The next message; None if the other end is gone (a message that was cut off counts as none)."""
        while b"\n" not in self._buffer:
            try:
                data = self.peer.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    @property
    def waiting(self) -> bool:
        """Whether a whole message was received already."""
        return b"\n" in self._buffer

    def close(self) -> None:
        self.peer.close()
