"""Keeping an episode's arrays: all of its branches, or nothing.

The work runs in a bounded thread pool and belongs to a ``KeepJob``, whose state one lock guards. Whoever gives the job up (a client
cancelled, the server stops) never waits for the thread: if the job is done its objects are handed back to be discarded, else
the thread discards them itself as soon as it notices. So every kept object has exactly one party that decides about it.

Owns that state. Refuses to know verifiers and the transport.
"""

import enum
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Executor, Future
from typing import Protocol

from fsref.episodes.branches import Branch
from fsref.errors import FsrefError
from fsref.refs import Payload, PayloadRef


class PutPayload(Protocol):
    """The part of a writer that is used here."""

    def put(self, payload: Payload, *, stop: threading.Event) -> PayloadRef: ...


class Discards(Protocol):
    """The part of a ledger holder that is used here."""

    def discard(self, object_ids: Iterable[str], reason: str = ...) -> int: ...


class _State(enum.Enum):
    RUNNING = "running"
    KEPT = "kept"
    GIVEN_UP = "given up"


Kept = dict[tuple[str, int], PayloadRef]
"""References by (trace id, branch index)."""


class KeepJob:
    """One episode's keep. ``run`` once in a thread; ``give_up`` at most once from anywhere."""

    def __init__(self, branches: Callable[[], Iterator[tuple[Branch, Payload]]], writer: PutPayload, holder: Discards) -> None:
        """``branches`` yields what to keep; it is called in the thread."""
        self._branches, self._writer, self._holder = branches, writer, holder
        self._lock = threading.Lock()
        self._state = _State.RUNNING
        self._objects: list[str] = []
        self._unwanted = threading.Event()

    def run(self) -> Kept:
        """Puts every branch. Raises what a put raises, named by its branch, after discarding what this job kept.

        ``CancelledError`` if it was given up.
        """
        kept: Kept = {}
        try:
            for branch, payload in self._branches():
                self._check_wanted()
                kept[branch.trace_id, branch.index] = self._put(branch, payload)
            with self._lock:
                self._check_wanted()
                self._state = _State.KEPT
        except BaseException:
            with self._lock:
                wanted, self._state = self._state is not _State.GIVEN_UP, _State.GIVEN_UP
            self._holder.discard(self._objects, "encode_error" if wanted else "never_sent")
            raise
        return kept

    def give_up(self) -> None:
        """The reply will not be sent: discards what is kept, or makes the thread do it."""
        with self._lock:
            state, self._state = self._state, _State.GIVEN_UP
        self._unwanted.set()  # a put that waits for room need not
        if state is _State.KEPT:
            self._holder.discard(self._objects, "never_sent")

    def start(self, executor: Executor) -> "Future[Kept]":
        """Hands ``run`` to a pool."""
        return executor.submit(self.run)

    def _check_wanted(self) -> None:
        if self._state is _State.GIVEN_UP:
            raise CancelledError

    def _put(self, branch: Branch, payload: Payload) -> PayloadRef:
        try:
            ref = self._writer.put(payload, stop=self._unwanted)
        except FsrefError as e:
            raise type(e)(f"branch {branch.name}: {e}") from e
        self._objects.extend(ref.object_ids)
        return ref
