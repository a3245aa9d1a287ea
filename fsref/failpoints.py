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
POINTS: Final[dict[str, str]] = {
    # Stores, journals and markers, whoever uses them.
    "store.put.before": "a file's put: nothing is there yet",
    "store.put.mid": "a file's put: the staging file holds the first of several buffers",
    "store.put.written": "a file's put: the staging file is whole, not synced, not renamed",
    "store.put.renamed": "a file's put: under its final name, the folder not synced",
    "store.delete.before": "before each removal of an object's file",
    "store.delete.after": "after each removal of an object's file, before the next one",
    "store.list.before": "before a listing of files",
    "journal.open.before": "a journal that has its first line and its lock, and no name yet",
    "journal.open.after": "a journal that can be seen",
    "journal.append.before": "before each record's write",
    "journal.append.after": "after each record's write",
    "journal.sync.before": "before a journal is made durable",
    "journal.sync.after": "after a journal was made durable",
    "segment.put.before": "the root is no folder: before a piece of a journal is put there",
    "segment.put.after": "the root is no folder: a piece of a journal is there",
    "marker.create.before": "before a fence, a .dead marker or the recovery's lock appears",
    "marker.create.after": "a fence, a .dead marker or the recovery's lock is there and durable",
    "marker.release.before": "before the recovery's lock is removed",
    "marker.release.after": "the recovery's lock is removed",
    # Every holder.
    "drop.before_append": "ids were chosen for removal, nothing is recorded",
    "drop.after_append": "the drop is appended, the deleter does not know it yet",
    "deleter.before_sync": "a batch is due, its drop may not be durable (before W1)",
    "deleter.after_sync": "its drop is durable, nothing is removed (after W1)",
    "deleter.after_delete": "a batch is removed, before done",
    "deleter.after_done": "done is appended",
    "close.before_append": "the deleter has stopped, close is not appended",
    "close.after_sync": "close is durable",
    # Env worker.
    "keep.before_append": "the object has its final name, no keep",
    "keep.after_append": "the keep is appended",
    "sent.before": "the reply is ready, the right is still the worker's",
    "sent.after": "the reply counts as sent, the transport has not got it",
    # Orchestrator.
    "take.before_append": "a reply was received, no take",
    "take.after_append": "the take is appended",
    "ship.before_append": "a step is packed, no ship",
    "ship.after_append": "the ship is appended, not durable",
    "ship.after_sync": "the ship is durable (after W2), no step file",
    "steps.before_info": "the rank files are there, STEP.json is not",
    "steps.after_info": "the step can be seen",
    "succession.after_fence": "a new orchestrator has fenced one before it, no adopt",
    "succession.after_append": "a new orchestrator has adopted those before it, no drop",
    "adopt.after_fence": "an orchestrator's adoption: the fence is up",
    "adopt.after_list": "an orchestrator's adoption: journal read, objects listed, nothing recorded",
    "adopt.after_append": "an orchestrator's adoption: adopt is appended, no drop",
    "adopt.before_staging": "an orchestrator's adoption: drops are with the deleter, staging files are there",
    "adopt.after_staging": "an orchestrator's adoption: the end",
    # Trainer.
    "succeed.after_fence": "a new trainer has fenced one before it, no adopt",
    "succeed.after_append": "a new trainer has adopted one before it",
    "taken.before_append": "a step file was read and checked, the step is not taken",
    "taken.after_append": "the step is taken, nothing is fetched",
    "agree.before": "a rank has its arrays, before the all-reduce",
    "agree.after": "the ranks have agreed on what failed",
    "used.before_append": "before the step counts as used",
    "used.after_append": "the step counts as used",
    "checkpoint.after": "a checkpoint is durable, its steps are not dropped",
    "drop_steps.before_append": "a commit is due, nothing is recorded",
    "drop_steps.after_append": "the commit is appended, not durable (before W1)",
    "drop_steps.after_sync": "the commit is durable (after W1), no leader removes yet",
    "leader.before_delete": "before a data rank's leader removes its share",
    "leader.after_delete": "a data rank's leader has removed its share",
    "done_steps.before_append": "every leader has removed its share, no done",
    "done_steps.after_append": "done is appended",
    # The ranks of a node.
    "nodecache.open.empty": "a node cache has its size and no header yet",
    "nodecache.fetch.claimed": "chunks are claimed for this rank, nothing is fetched",
    "nodecache.leave.placed": "under the node's lock: a place was given out, the chunk's bytes are not there",
    # Recovery.
    "recover.after_open": "its journal is open, it has no lock",
    "recover.after_lock": "it is the only recovery",
    "recover.after_look": "everyone's end is proved, journals read, objects listed",
    "recover.after_fence": "one more incarnation is fenced, not adopted",
    "recover.after_adopt": "one more incarnation is adopted",
    "recover.after_sync": "all decisions are durable (after W1), nothing is removed",
    "recover.after_delete": "a batch is removed, before done",
    "recover.after_done": "done is appended for a batch",
    "recover.before_close": "all is removed, its close is not appended",
    "recover.after_close": "its close is durable, it still has the lock",
}
"""Every place: its name, and what is true there."""
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
        return lambda: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # to this thread: it goes no step further
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


def armed(name: str) -> bool:
    """Whether something is to happen at a place: for code that must go slower to have that place at all."""
    return name in _armed


ARMED: Final = bool(_armed)
"""Whether any place is armed: what runs several times for each object asks this before it calls ``failpoint``."""
failpoint: Final[Callable[[str], None]] = _on if ARMED else _off
"""Marks a place in the product's code; a call that returns at once where nothing is armed."""
