"""Child processes that are always reaped whole: each in a session of its own, with its log, its descendants, and a guard.

Owns starting, watching, stopping and reaping. Refuses to know roles: a ``Command`` is a name, an argument list and a log. Linux only.

The launcher makes itself the subreaper of its descendants, so that the orphans of a dead child become its own children: when
``Child.reap`` returns, every process of that child's group has been waited for. That is what makes a death provable (ledger.md section
7, the death oracle).
"""

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from fsref.errors import RoleFailed
from fsref.pipeline import guard

PR_SET_CHILD_SUBREAPER: Final = 36
POLL_S: Final = 0.02


@dataclass(frozen=True)
class Command:
    """What to start."""

    name: str
    """For people, for example ``trainer/rank_0``."""
    argv: tuple[str, ...]
    log: Path
    """stdout and stderr are appended to it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the launcher's own environment."""
    server: bool = False
    """Others need it to end in order: if the launcher is killed, it is stopped after them."""
    keep_fds: tuple[int, ...] = ()
    """Descriptors of the launcher that stay open in it: locks that last as long as it does."""
    stop_signal: int = signal.SIGTERM
    """What asks it to end."""
    reports: tuple[Path, ...] = ()
    """Logs of what it starts elsewhere, which say more than its own about why it ended."""


@contextlib.contextmanager
def shielded(stop_signal: int = signal.SIGTERM) -> Iterator[None]:
    """What is started in this block never gets SIGUSR1, unless it is its own stop signal. srun hands the signal to every process of a task
    at once; the launcher among them tells its children itself, in its order.
    """
    if stop_signal == signal.SIGUSR1:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Child:
    """One started command. ``reap`` must be called once it has ended (``Family`` does)."""

    def __init__(self, command: Command, process: "subprocess.Popen[bytes]", *, log_start: int) -> None:
        self.command = command
        self.log_start = log_start
        """Where its output begins in the log, which earlier lives of the same role may share."""
        self.reports = {path: _size(path) for path in command.reports}
        """The same for its reports."""
        self.pid = process.pid
        self._process = process
        self.reaped_pids: list[int] = []
        """Every process of its group that was waited for."""

    @property
    def name(self) -> str:
        return self.command.name

    def ended(self) -> bool:
        """Whether the process has ended; it stays unreaped, so that its pid and its group cannot be reused yet."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def signal(self, number: int) -> None:
        """To the command's own process: it tells its children itself, in its own order."""
        if self._process.returncode is None:
            os.kill(self.pid, number)

    def reap(self, *, deadline_s: float = 10.0) -> int:
        """Kills what is left of the group and waits for every process of it; returns the exit code (negative: the signal).

        Raises ``RoleFailed`` if a process of the group cannot be waited for within ``deadline_s`` seconds (stuck in the kernel).
        """
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # the group's id cannot have been reused: its leader is not reaped yet
            end = time.monotonic() + deadline_s
            while not self._wait_group():
                if time.monotonic() >= end:
                    raise RoleFailed(f"{self.name}: a process of group {self.pid} does not die; log: {self.command.log}")
                time.sleep(POLL_S)
        code = self._process.returncode
        assert code is not None
        return code

    def _wait_group(self) -> bool:
        """Waits for whatever has ended of the group, orphans that became ours included; True once nobody is left in it."""
        while True:
            try:
                pid, status = os.waitpid(-self.pid, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            self.reaped_pids.append(pid)
            if pid == self.pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)


class Family:
    """Starts, finds and stops the children of one launch. A context manager: nothing of it survives the block, or the launcher.

    Not safe from several threads.
    """

    def __init__(self, *, grace_s: float) -> None:
        self.mark = secrets.token_hex(16)
        self.children: list[Child] = []
        self._grace_s = grace_s
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise RoleFailed(
                f"this kernel has no child subreaper (errno {ctypes.get_errno()}): the local launcher needs Linux 3.4 or newer"
            )
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "fsref.pipeline.guard", self.mark, str(grace_s)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def start(self, command: Command) -> Child:
        """Starts a command in a new session; its log's folder is made. Raises ``RoleFailed`` if that cannot be done."""
        try:
            command.log.parent.mkdir(parents=True, exist_ok=True)
            with command.log.open("ab") as log, shielded(command.stop_signal):
                log_start = log.tell()
                process = subprocess.Popen(
                    command.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, **command.env, guard.MARK: self.mark},
                    pass_fds=command.keep_fds,
                )
        except OSError as e:
            raise RoleFailed(f"{command.name} cannot be started: {e.strerror}: {e.filename}; its log would be {command.log}") from e
        self._tell(f"{'=' if command.server else '+'}{process.pid}")
        child = Child(command, process, log_start=log_start)
        self.children.append(child)
        return child

    def reap(self, child: Child) -> int:
        """``Child.reap``, and forgets the child."""
        code = child.reap()
        self._tell(f"-{child.pid}")
        self.children.remove(child)
        return code

    def stop(self, children: Sequence[Child], *, grace_s: float, hurry: "Hurry | None" = None) -> dict[str, int]:
        """Their stop signal, up to ``grace_s`` seconds, SIGKILL; returns exit codes by name. ``hurry`` cuts the wait short."""
        for child in children:
            child.signal(child.command.stop_signal)
        end = time.monotonic() + grace_s
        while not all(c.ended() for c in children) and time.monotonic() < end and not (hurry and hurry.now):
            time.sleep(POLL_S)
        return {c.name: self.reap(c) for c in children}

    def close(self) -> None:
        """Stops what is left, then the guard. Idempotent."""
        if self._guard.returncode is not None:
            return
        try:
            self.stop(list(self.children), grace_s=0.0)
            guard.sweep(self.mark, set(), grace_s=0.0)  # whatever left its group and still carries the mark
        finally:
            self._tell("done")
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait()

    def _tell(self, line: str) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(line.encode() + b"\n")
            self._guard.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class Hurry:
    """Set by a second signal: no more waiting."""

    now = False
