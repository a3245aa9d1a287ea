"""The background deleter of one holder: batches, W1, fence, deletions, ``done``; failures wait and are tried again.

Owns its thread. Never blocks a caller; ``close`` waits up to a deadline. Refuses to delete once the journal is poisoned or the own
incarnation was adopted; callers see that as ``JournalPoisoned`` or ``Fenced`` at their next call.
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
from fsref.reaper.delete import Outcome, back_off_s, delete_once
from fsref.store.base import Store

IDS_SET_MAX: Final = 1 << 20
"""Ids that are decided about in one set of records."""


class Deleter:
    """Removes ids whose ``drop`` was appended to ``journal``. Thread-safe; the thread starts with the first id."""

    def __init__(self, store: Store, ledger: Ledger, journal: Journal, section: LedgerSection) -> None:
        self._store, self._ledger, self._journal, self._section = store, ledger, journal, section
        self._wake = threading.Condition()
        self._backlog = Backlog(ids_max=section.queue_ids_max)
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
            return len(self._backlog) + self._busy

    def check(self) -> None:
        """Raises what stopped the deleter: ``JournalPoisoned`` or ``Fenced``."""
        if self._failure is not None:
            raise self._failure

    def put(self, object_ids: Sequence[str], *, attempt: int = 0) -> None:
        """Queues ids; ``attempt`` 1 marks the redo of someone else's drop, whose absence proves nothing."""
        if not object_ids:
            return
        with self._wake:
            self._backlog.add(object_ids, attempt=attempt)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"fsref-deleter-{self._journal.inc}", daemon=True)
                self._thread.start()
            elif self._idle or self._backlog.ready >= self._section.batch_ids_max:
                self._wake.notify_all()  # else it looks again when the batch's time is up: a wake-up per id costs more than the id

    def flush(self, *, deadline_s: float) -> int:
        """Waits until nothing is pending, up to ``deadline_s`` seconds. Returns what still is."""
        end = monotonic() + deadline_s
        with self._wake:
            while (len(self._backlog) or self._busy) and self._failure is None and monotonic() < end:
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
                due = self._backlog.next_due_s
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
                self._idle = not self._backlog.ready
                self._wake.wait(timeout)
                self._idle = False
            batch = self._backlog.take(size_max)
            self._busy = len(batch)
            return batch

    def _attempt(self, object_ids: list[str]) -> Outcome:
        failpoint("deleter.before_sync")
        self._journal.sync()  # W1
        failpoint("deleter.after_sync")
        try:
            self.fence()
        except StoreError as e:  # whether the fence is up cannot be known now: nothing is removed, and it is asked again
            return Outcome(failed=dict.fromkeys(object_ids, e))
        return delete_once(self._store, object_ids, threads=self._section.delete_threads)

    def _remove(self, attempts: dict[str, int]) -> None:
        result = self._attempt(list(attempts))
        by_attempt: dict[int, list[str]] = {}
        for object_id in result.done:
            by_attempt.setdefault(attempts[object_id] + 1, []).append(object_id)
        absent = set(result.absent)
        failpoint("deleter.after_delete")
        for attempt, gone in by_attempt.items():
            write_done(self._journal, gone, absent=[o for o in gone if o in absent], attempt=attempt)
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
            self.absent_first += len([o for o in absent if attempts[o] == 0])
            self.retried += len(result.failed)
            self._busy = 0
            self._wake.notify_all()

    def fence(self) -> None:
        """One stat: raises ``Fenced`` if this incarnation was adopted."""
        check_fence(self._ledger, self._journal.inc)


def check_fence(ledger: Ledger, inc: str) -> None:
    """Raises ``Fenced`` if an incarnation was adopted: whoever deletes as that one asks right before it does."""
    if is_adopted(ledger, inc):
        raise Fenced(f"{inc} was declared dead and adopted by {read_adopted(ledger, inc)}: this process must stop")


def write_done(journal: Journal, object_ids: Sequence[str], *, absent: Sequence[str] = (), attempt: int = 1) -> None:
    """Appends ``done`` for ids; splits where they do not fit one record."""

    def make(piece: dict[str, str], part: tuple[int, int] | None) -> records.AnyRecord:
        return records.Done(now_ms(), i=piece, a=_within(piece, absent), k=attempt, part=part)

    journal.append(*parts_of(make, object_ids))


def write_drop(journal: Journal, object_ids: Sequence[str], reason: records.Reason) -> None:
    """Appends ``drop`` for ids; splits where they do not fit one record, and a huge set into several that take effect one by one."""
    if len(object_ids) <= SMALL_SET_MAX:
        journal.append(records.Drop(now_ms(), reason, pack_known(object_ids)))
        return
    for at in range(0, len(object_ids), IDS_SET_MAX):
        some = object_ids[at : at + IDS_SET_MAX]
        journal.append(*parts_of(lambda piece, part: records.Drop(now_ms(), reason, i=piece, part=part), some))


def _within(piece: dict[str, str], absent: Sequence[str]) -> dict[str, str]:
    if not absent:
        return {}
    here = set(ids_of(piece))
    return pack(o for o in absent if o in here)
