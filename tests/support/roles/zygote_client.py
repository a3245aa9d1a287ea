"""The test's side of the zygote: forks roles, waits for their deaths."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.roles.wire import Stream

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 120.0


class Zygote:
    """One per test session; close it."""

    def __init__(self, *, prefix: Sequence[str] = ()) -> None:
        """``prefix``: a command that runs it elsewhere, for example under the hostname of another node."""
        ours, theirs = socket.socketpair()
        ours.settimeout(DEADLINE_S)
        env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        env["FSREF_FAILPOINTS"] = "store.put.mid=sleep(0)"
        env |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # who forks has no threads
        command = [*prefix, sys.executable, "-W", "error", "-m", "tests.support.roles.zygote", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT, env=env)
        theirs.close()
        self._control = ours
        self._stream = Stream(ours)

    def spawn(self, rules: str = "") -> tuple[int, Stream]:
        """A new process with its failpoints; its pid, and the stream of its commands."""
        ours, theirs = socket.socketpair()
        ours.settimeout(DEADLINE_S)
        socket.send_fds(self._control, [json.dumps({"failpoints": rules}).encode()], [theirs.fileno()])
        theirs.close()
        pid = self._stream.read()
        assert isinstance(pid, int), "the zygote is gone"
        return pid, Stream(ours)

    def wait(self, pid: int) -> int:
        """Blocks until the process dies or stops; its exit code, or minus the signal. 1000 + the signal: it stopped."""
        self._control.sendall(json.dumps({"wait": pid}).encode())
        status = self._stream.read()
        assert isinstance(status, int), "the zygote is gone"
        return 1000 + os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        self._stream.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
