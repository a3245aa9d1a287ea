"""The background deleter of one holder: batches, W1, fence, deletions, ``done``; failures wait and are tried again.

Owns its thread, and on a root that is no folder the waiting of drops for a seal that comes anyway (a step's): there every W1 of an
orchestrator is a request. Never blocks a caller; ``close`` waits up to a deadline. Refuses to delete once the journal is poisoned or the
own incarnation was adopted; callers see that as ``JournalPoisoned`` or ``Fenced`` at their next call.
"""

import random
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Final

from fsref.config import LedgerSection
from fsref.errors import Fenced, FsrefError, StoreError
from fsref.failpoints import failpoint
from fsref.journal.file import SMALL_SET_MAX, Journal, now_ms, parts_of
from fsref.journal.markers import is_adopted, read_adopted
from fsref.journal.place import Ledger
from fsref.ledger import records
from fsref.ledger.ids import ids_of, pack, pack_known
from fsref.reaper.backlog import Backlog
from fsref.reaper.delete import back_off_s, delete_once
from fsref.store.base import Store

IDS_SET_MAX: Final = 1 << 20
"""Ids that are decided about in one set of records."""


class Deleter:
    """Removes ids whose ``drop`` was appended to ``journal``. Thread-safe; the thread starts with the first id."""

    def __init__(self, store: Store, ledger: Ledger, journal: Journal, section: LedgerSection, *, seal_wait_s: float = 0.0) -> None:
        """``seal_wait_s``: how long drops wait for ``promote``, before they are sealed for their own sake; 0: they do not wait."""
        self._store, self._ledger, self._journal, self._section = store, ledger, journal, section
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._backlog = Backlog(ids_max=section.queue_ids_max)
        self._held = Backlog(ids_max=section.queue_ids_max)  # their drops wait to be sealed
        self._held_since = 0.0
        self._seal_wait_s = seal_wait_s
        self._need = 0  # what must be durable before anything of the backlog is removed: an offset of the journal
        self._unsealed_tries = 0
        self._busy = 0
        self._idle = False
        self._stopping = False
        self._deadline = 0.0
        self._failure: FsrefError | None = None
        self._thread: threading.Thread | None = None
        self._rng = random.Random()  # noqa: S311 - jitter
        self.done = 0
        self.absent_first = 0
        self.retried = 0
        self.problem = ""
        """Why a part of the last batch is not removed yet; empty if all of it is."""

    @property
    def pending(self) -> int:
        """Dropped ids that are not removed yet: the gauge ``pending_delete``."""
        with self._wake:
            return self._left()

    def _left(self) -> int:
        return len(self._backlog) + len(self._held) + self._busy

    def check(self) -> None:
        """Raises what stopped the deleter: ``JournalPoisoned`` or ``Fenced``."""
        if self._failure is not None:
            raise self._failure

    def put(self, object_ids: Sequence[str], *, attempt: int = 0) -> None:
        """Queues ids; ``attempt`` 1 marks the redo of someone else's drop, whose absence proves nothing."""
        if not object_ids:
            return
        with self._lock:
            queue = self._backlog
            if self._seal_wait_s and attempt == 0:
                queue = self._held
                self._held_since = self._held_since if queue.ready else monotonic()
            else:
                self._need = self._journal.size
            queue.add(object_ids, attempt=attempt)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"fsref-deleter-{self._journal.inc}", daemon=True)
                self._thread.start()
            elif self._idle or queue.ready >= self._section.batch_ids_max:
                self._wake.notify_all()  # else it looks again when the batch's time is up: a wake-up per id costs more than the id

    def promote(self) -> None:
        """A seal is coming that covers all that was appended so far: what was dropped before this call waits no longer."""
        with self._wake:
            if self._promote():
                self._wake.notify_all()

    def _promote(self) -> bool:
        if not self._held.ready:
            return False
        self._backlog.add(self._held.take(self._held.ready), attempt=0)
        self._need = self._journal.size
        return True

    def flush(self, *, deadline_s: float) -> int:
        """Waits until nothing is pending, up to ``deadline_s`` seconds. Returns what still is."""
        end = monotonic() + deadline_s
        self.promote()
        with self._wake:
            while self._left() and self._failure is None and monotonic() < end:
                self._wake.wait(min(0.05, max(0.0, end - monotonic())))
        return self.pending

    def close(self, *, deadline_s: float) -> int:
        """Tries everything until the deadline, joins the thread, returns how many ids are still pending (the run's close finishes them)."""
        with self._wake:
            self._stopping = True
            self._deadline = monotonic() + deadline_s
            self._wake.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(deadline_s + 1.0)  # one that is stuck in the kernel is abandoned: it is a daemon
        return self.pending

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            try:
                self._remove(batch)
            except FsrefError as e:
                with self._wake:
                    self._failure = e
                    self._wake.notify_all()
                return

    def _next_batch(self) -> dict[str, int] | None:
        """Waits for ids: until the batch is full or its oldest id waited long enough. None when it is time to stop."""
        size_max, wait_s = self._section.batch_ids_max, self._section.batch_wait_s
        with self._wake:
            first = 0.0
            while True:
                now = monotonic()
                self._backlog.wake(now)
                due = self._due_s(now)
                if self._backlog.ready:
                    first = first or now
                    if self._stopping or self._backlog.ready >= size_max or now - first >= wait_s:
                        break
                    timeout: float | None = wait_s - (now - first)
                elif self._stopping and (due is None or now >= self._deadline):
                    return None
                else:
                    timeout = None if due is None else due - now
                if self._stopping and timeout is not None:
                    timeout = min(timeout, max(0.0, self._deadline - now))
                self._idle = not self._backlog.ready and not self._held.ready
                self._wake.wait(timeout)
                self._idle = False
            batch = self._backlog.take(size_max)
            self._busy = len(batch)
            return batch

    def _due_s(self, now: float) -> float | None:
        """When there is something to do next: a failed id may be tried again, or held ones have waited for a seal long enough."""
        if self._held.ready:
            full = self._held.ready >= self._section.batch_ids_max
            if self._stopping or full or now - self._held_since >= self._seal_wait_s:
                self._promote()
            elif self._backlog.next_due_s is None:
                return self._held_since + self._seal_wait_s
            else:
                return min(self._backlog.next_due_s, self._held_since + self._seal_wait_s)
        return self._backlog.next_due_s

    def _is_safe(self, attempts: dict[str, int]) -> bool:
        """W1 and the fence. False if the store did not say: nothing is removed, and the ids wait as they were."""
        try:
            failpoint("deleter.before_sync")
            self._journal.sync(self._need, retry_s=0.0)
            failpoint("deleter.after_sync")
            self.fence()
        except StoreError:
            with self._wake:
                self._unsealed_tries += 1
                self.retried += len(attempts)
                self._backlog.wait(attempts, due_s=monotonic() + back_off_s(self._unsealed_tries, rng=self._rng))
                self._busy = 0
                self._wake.notify_all()
            return False
        self._unsealed_tries = 0
        return True

    def _remove(self, attempts: dict[str, int]) -> None:
        if not self._is_safe(attempts):
            return
        result = delete_once(self._store, list(attempts), threads=self._section.delete_threads)
        failpoint("deleter.after_delete")
        for attempt in sorted(set(attempts.values())):
            if gone := [o for o in result.done if attempts[o] == attempt]:
                write_done(self._journal, gone, absent=result.absent, attempt=attempt + 1)
        failpoint("deleter.after_done")
        now = monotonic()
        failed: dict[int, dict[str, int]] = {}
        for object_id in result.failed:
            failed.setdefault(attempts[object_id], {})[object_id] = attempts[object_id] + 1
        with self._wake:
            for attempt, ids in failed.items():  # one wait for all that failed at the same attempt: they are tried again in one batch
                self._backlog.wait(ids, due_s=now + back_off_s(attempt + 1, rng=self._rng))
            self.problem = str(next(iter(result.failed.values()))) if result.failed else ""
            self.done += len(result.done)
            self.absent_first += len([o for o in result.absent if attempts[o] == 0])
            self.retried += len(result.failed)
            self._busy = 0
            self._wake.notify_all()

    def fence(self) -> None:
        """One stat, or one HEAD: raises ``Fenced`` if this incarnation was adopted, ``StoreError`` if that cannot be known."""
        check_fence(self._ledger, self._journal.inc)


def check_fence(ledger: Ledger, inc: str) -> None:
    """Raises ``Fenced`` if an incarnation was adopted: whoever deletes as that one asks right before it does."""
    if is_adopted(ledger, inc):
        raise Fenced(f"{inc} was declared dead and adopted by {read_adopted(ledger, inc)}: this process must stop")


def write_done(journal: Journal, object_ids: Sequence[str], *, absent: Sequence[str] = (), attempt: int = 1) -> None:
    """Appends ``done`` for ids; splits where they do not fit one record. ``absent``: which were, of these and any others."""

    def make(piece: dict[str, str], part: tuple[int, int] | None) -> records.AnyRecord:
        return records.Done(now_ms(), i=piece, a=_within(piece, absent), k=attempt, part=part)

    journal.append_all(parts_of(make, object_ids))


def write_drop(journal: Journal, object_ids: Sequence[str], reason: records.Reason) -> None:
    """Appends ``drop`` for ids; splits where they do not fit one record, and a huge set into several that take effect one by one."""
    if len(object_ids) <= SMALL_SET_MAX:
        journal.append(records.Drop(now_ms(), reason, pack_known(object_ids)))
        return
    for at in range(0, len(object_ids), IDS_SET_MAX):
        some = object_ids[at : at + IDS_SET_MAX]
        journal.append_all(parts_of(lambda piece, part: records.Drop(now_ms(), reason, i=piece, part=part), some))


def _within(piece: dict[str, str], absent: Sequence[str]) -> dict[str, str]:
    if not absent:
        return {}
    here = set(ids_of(piece))
    return pack(o for o in absent if o in here)
