"""Starting, watching and stopping the processes of a run.

Owns the table of what each role's end means: the end of an env-server replica is no failure (it is restarted, design.md section 5), the
orchestrator and the trainer end with 0 when the run is done, every other end stops the run. Refuses to know what the roles do.
"""

import contextlib
import http.client
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, NoReturn, Protocol, Self
from urllib.parse import urlsplit

from fsref.config import Config
from fsref.errors import ReplicaDown, RoleFailed
from fsref.pipeline.layout import Part, RoleCommand
from fsref.pipeline.logs import last_error, why_of_step
from fsref.pipeline.processes import Child, Command, Family, Hurry

TICK_S: Final = 0.1
FREE_BYTES_MIN: Final = 64 << 10
"""Below this a role that died in silence is taken to have found the disk full."""
STOP_ORDER: Final = (Part.ORCHESTRATOR, Part.TRAINER, Part.ENV, Part.INFERENCE)
"""The orchestrator gives back what it holds while the others still answer; inference goes last."""
ENDS_THE_RUN: Final = frozenset({Part.ORCHESTRATOR, Part.TRAINER})
"""Parts whose exit code 0 means that their work is done."""


class Stopped(Exception):
    """A signal asked for the end of the run."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """Turns the first SIGINT, SIGTERM, SIGHUP or SIGUSR1 (Slurm's word before a time limit) into ``Stopped`` at the next look, and a second
    one into haste. A context manager; main thread only.
    """

    NUMBERS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

    def __init__(self) -> None:
        self.number = 0
        self.hurry = Hurry()
        self._old: dict[int, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.hurry.now = bool(self.number)
        self.number = self.number or number

    def check(self) -> None:
        """Raises ``Stopped`` if a signal came."""
        if self.number:
            raise Stopped(self.number)

    def __enter__(self) -> Self:
        self._old = {n: signal.signal(n, self._note) for n in self.NUMBERS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)


class Watcher(Protocol):
    """Who is told what happens; the launcher's board and ledger."""

    def say(self, text: str) -> None: ...

    def tick(self) -> None:
        """Called about ten times a second."""

    def reaped(self, role: RoleCommand, child: Child, code: int) -> None:
        """Every process of the role is dead and was waited for; called before a restart."""


def answers(address: str) -> bool:
    """Whether ``GET <address>/health`` says 200. Goes straight to the host, never through a proxy."""
    parts = urlsplit(address)
    if parts.scheme != "http" or not parts.hostname:
        return True  # someone else's server, reached in ways that the launcher does not know; the orchestrator will say
    connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=2.0)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False


@dataclass
class _Running:
    role: RoleCommand
    child: Child


@dataclass
class Supervisor:
    """The processes of one run. ``start``, ``watch`` until it returns or raises, then ``stop`` on every path."""

    config: Config
    family: Family
    signals: Signals
    watcher: Watcher
    healthy: Callable[[str], bool] = field(default=answers)
    """Whether the inference server at an address answers."""
    elsewhere: bool = False
    """Other nodes serve every source too: the last replica of one here is missed by nobody, once everything has started."""
    _started: bool = False
    _running: list[_Running] = field(default_factory=list)
    _restarts: dict[str, int] = field(default_factory=dict)

    def start(self, roles: Sequence[RoleCommand]) -> None:
        """Starts the servers, waits until they serve, then starts who works with them; so that nobody's patience runs while a model loads.

        Raises ``RoleFailed`` if one dies or does not serve in time, ``Stopped`` for a signal.
        """
        servers = [r for r in roles if r.part not in ENDS_THE_RUN]
        self._start_all(servers)
        self._wait("inference", lambda: self.healthy(self.config.inference.address), self.config.inference.start_s)
        addresses = [a for r in servers for a in (*r.addresses, *([r.address] if r.address is not None else []))]
        self._wait("env servers", lambda: all(a.exists() for a in addresses), self.config.orchestrator.replica_wait_s)
        self._started = True
        self._start_all([r for r in roles if r.part in ENDS_THE_RUN])

    def run_to_end(self, command: Command) -> None:
        """Runs a preparing command; raises ``RoleFailed`` unless it ends with 0."""
        child = self.family.start(command)
        while not child.ended():
            self._pause()
        if code := self.family.reap(child):
            raise RoleFailed(describe(child, code))

    def watch(self) -> None:
        """Returns when the orchestrator and every trainer rank have ended with 0. Raises ``RoleFailed`` or ``Stopped``."""
        while any(r.role.part in ENDS_THE_RUN for r in self._running):
            self._pause()
            self._look()

    def serve(self) -> NoReturn:
        """Goes on until a signal (``Stopped``) or a failure (``RoleFailed``) ends it: for servers whose clients are elsewhere."""
        while True:
            self._pause()
            self._look()

    def stop(self) -> None:
        """Part by part: the stop signal, ``launcher.stop_s`` seconds, SIGKILL. Nothing runs when it returns."""
        for part in STOP_ORDER:
            running = [r for r in self._running if r.role.part is part]
            if not running:
                continue
            self.watcher.say(f"stopping {', '.join(r.child.name for r in running)}")
            codes = self.family.stop([r.child for r in running], grace_s=self.config.launcher.stop_s, hurry=self.signals.hurry)
            for r in running:
                self._running.remove(r)
                self.watcher.reaped(r.role, r.child, codes[r.child.name])
                if code := codes[r.child.name]:
                    self.watcher.say(f"while it was stopped, {describe(r.child, code)}")

    def _start_all(self, roles: Sequence[RoleCommand]) -> None:
        if roles:
            self.watcher.say(f"starting {', '.join(r.command.name for r in roles)}")
        for role in roles:
            self._start(role)

    def _start(self, role: RoleCommand) -> None:
        if role.address is not None:
            role.address.unlink(missing_ok=True)  # of the replica's earlier life
        self._running.append(_Running(role, self.family.start(role.command)))

    def _wait(self, what: str, ready: Callable[[], bool], wait_s: float) -> None:
        start = time.monotonic()
        while not ready():
            self._look()
            if time.monotonic() - start >= wait_s:
                logs = sorted({str(r.role.command.log) for r in self._running if r.role.part in {Part.INFERENCE, Part.ENV}})
                raise RoleFailed(f"{what}: not ready after {wait_s:g} s; see {', '.join(logs) or self.config.inference.address}")
            self._pause()
        self.watcher.say(f"{what} ready after {time.monotonic() - start:.1f} s")

    def _pause(self) -> None:
        self.signals.check()
        self.watcher.tick()
        time.sleep(TICK_S)

    def _look(self) -> None:
        """Handles every process that has ended since the last look; of several failures the one that explains itself is raised."""
        self.signals.check()  # the same signal may have reached the children: their end is no failure then
        failures = []
        for r in [r for r in self._running if r.child.ended()]:
            self._running.remove(r)
            code = self.family.reap(r.child)
            self.watcher.reaped(r.role, r.child, code)
            if r.role.part is Part.ENV:
                failures += self._replica_ended(r, code)
            elif code or r.role.part not in ENDS_THE_RUN:
                failures.append(RoleFailed(describe(r.child, code)))
            else:
                self.watcher.say(f"{r.child.name} is done")
        if failures:
            raise min(failures, key=lambda e: ": error: " not in str(e))

    def _replica_ended(self, ended: _Running, code: int) -> list[RoleFailed]:
        """Restarts a replica while it may be; a failure once none of its source is left."""
        role = ended.role
        name = role.command.name
        why = describe(ended.child, code)
        used = self._restarts.get(name, 0)
        if used < self.config.launcher.restarts_max:
            self._restarts[name] = used + 1
            self.watcher.say(f"{why}; restart {used + 1} of {self.config.launcher.restarts_max}")
            self._start(role)
            return []
        if role.address is not None:
            role.address.unlink(missing_ok=True)
        if (self.elsewhere and self._started) or any(r.role.part is Part.ENV and r.role.env == role.env for r in self._running):
            self.watcher.say(f"{why}; it is not restarted any more, its runs go to the other replicas")
            return []
        return [ReplicaDown(f"no replica of env {role.env!r} is left after {used} restarts: {why}")]


def describe(child: Child, code: int) -> str:
    """``trainer/rank_1 exited with code 1: error: ...; log: ...``."""
    command = child.command
    if command.reports and (said := why_of_step(command.log, child.log_start, child.reports)):
        return f"{command.name} {said}"
    if code == -signal.SIGKILL:
        # it had no chance to say why: whatever stands last in its log is about something else
        return f"{command.name} was killed by SIGKILL (by someone, or for lack of memory); log: {command.log}"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    line = last_error(command.log, start=child.log_start) or _why_silent(command.log)
    return f"{command.name} {how}{': ' + line if line else ''}; log: {command.log}"


def _why_silent(log: Path) -> str:
    """A full disk takes the role's last words with it."""
    try:
        free = os.statvfs(log.parent)
    except OSError:
        return ""
    if free.f_bavail * free.f_frsize < FREE_BYTES_MIN:
        return f"nothing in its log, and the disk that holds it is full ({free.f_bavail * free.f_frsize} bytes free)"
    return ""
