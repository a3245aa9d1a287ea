"""Places at which a test can have a process die, fail or wait: ``failpoint("journal.append.before")``.

Owns the list of places and the actions. Does nothing unless ``FSREF_FAILPOINTS`` is set when the process starts; this is the one
environment variable that is read below the config, because it has to work in processes that never see one. Refuses unknown names, so
that a test cannot pass because its place does not exist.

    FSREF_FAILPOINTS="ship.after_append=kill:2;journal.sync=raise(ENOSPC)"

Actions: ``kill`` (SIGKILL to itself), ``exit`` (without cleaning up, status 70), ``raise(ERRNO)`` (an ``OSError``), ``sleep(SECONDS)``,
``pause`` (SIGSTOP to itself; the parent sees the stop with ``waitid`` and sends SIGCONT). ``:N`` acts at the N-th time only, from 1; for
``raise``, ``:N+`` from the N-th time on. Without it every time.
"""

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fsref.errors import ConfigError

VARIABLE: Final = "FSREF_FAILPOINTS"
POINTS: Final[dict[str, str]] = {}
"""Every place: its name, and where it is."""
_RULE: Final = re.compile(
    r"(?P<name>[a-z_.]+)=(?P<action>kill|exit|raise|sleep|pause)(\((?P<value>[A-Za-z0-9_.]+)\))?(:(?P<n>\d+)(?P<on>\+?))?"
)


@dataclass
class _Point:
    action: Callable[[], None]
    n: int
    """0: every time."""
    on: bool
    """Also every time after the n-th."""
    hits: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def hit(self) -> None:
        with self.lock:
            self.hits += 1
            due = self.n in (0, self.hits) or (self.on and self.hits > self.n)
        if due:
            self.action()


def parse(text: str) -> dict[str, _Point]:
    """Rules by name. Raises ``ConfigError`` for a rule that cannot be read or a place that does not exist."""
    out: dict[str, _Point] = {}
    for rule in filter(None, text.split(";")):
        match = _RULE.fullmatch(rule)
        if match is None:
            raise ConfigError(f"{VARIABLE}: {rule!r} is not of the form name=action or name=action:N")
        if match["name"] not in POINTS:
            raise ConfigError(f"{VARIABLE}: there is no failpoint {match['name']!r}")
        out[match["name"]] = _Point(_action(match["action"], match["value"] or ""), int(match["n"] or 0), bool(match["on"]))
    return out


def _action(word: str, value: str) -> Callable[[], None]:
    if word == "kill":
        return lambda: os.kill(os.getpid(), signal.SIGKILL)
    if word == "exit":
        return lambda: os._exit(70)
    if word == "pause":
        return lambda: os.kill(os.getpid(), signal.SIGSTOP)
    if word == "sleep":
        seconds = float(value)
        return lambda: time.sleep(seconds)
    if value not in errno.errorcode.values():
        raise ConfigError(f"{VARIABLE}: raise({value}) names no errno")
    number = getattr(errno, value)

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail


_armed = parse(os.environ.get(VARIABLE, ""))


def _off(name: str) -> None:
    """Nothing is armed."""


def _on(name: str) -> None:
    point = _armed.get(name)
    if point is not None:
        point.hit()


failpoint: Final[Callable[[str], None]] = _on if _armed else _off
"""Marks a place in the product's code."""
