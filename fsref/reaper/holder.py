"""What the three holders share: an open journal, a background deleter, and the checks at the start.

Owns the order *decide, append, hand to the deleter*. Refuses to open in a folder of another run.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from fsref.config import LedgerSection
from fsref.errors import Fenced, JournalPoisoned, StoreError
from fsref.failpoints import ARMED, failpoint
from fsref.journal.file import Journal, make_folder, now_ms
from fsref.journal.identity import label_of, mint
from fsref.journal.place import Ledger
from fsref.journal.run import RunInfo
from fsref.ledger import records
from fsref.reaper.deleter import Deleter, write_drop
from fsref.refs import check_run
from fsref.store.base import Deletion, Store
from fsref.store.capabilities import probe as probe_root

_log = logging.getLogger(__name__)


class Holder:
    """One incarnation with its journal. A context manager; ``close`` is idempotent."""

    role: str

    def __init__(self, store: Store, ledger_dir: Path, *, run: RunInfo, label: str = "main", section: LedgerSection | None = None) -> None:
        self._store, self._ledger, self._run = store, Ledger.of(store, ledger_dir), run
        self._section = section or LedgerSection()
        self._label = label_of(label)
        self._lock = threading.RLock()
        check_run(run.run)
        make_folder(ledger_dir)
        self._open()

    def _open(self) -> None:
        self.inc = mint(self.role, self._label)
        self._journal = Journal(self._ledger, self.inc, run_uuid=self._run.run_uuid, retry_s=self._section.seal_retry_s)
        # An orchestrator's W1 costs a request where the root is no folder, so its drops wait for a step's. Trainers drop by whole steps,
        # env workers seal at their close only.
        wait_s = self._section.seal_wait_s if self._ledger.store is not None and self.role in ("orc", "evl") else 0.0
        self._deleter = Deleter(self._store, self._ledger, self._journal, self._section, seal_wait_s=wait_s)
        self._closed = False

    @property
    def pending_delete(self) -> int:
        """Dropped ids that are not removed yet."""
        return self._deleter.pending

    @property
    def pending_why(self) -> str:
        """Why the last removals failed; empty if they did not. For logs."""
        return self._deleter.problem

    def flush(self, *, deadline_s: float = 30.0) -> int:
        """Waits until everything dropped is removed, up to the deadline. Returns how many ids are still pending."""
        return self._deleter.flush(deadline_s=deadline_s)

    def _drop(self, object_ids: Sequence[str], reason: records.Reason) -> None:
        """Records the decision and hands the ids to the deleter."""
        if object_ids:
            if ARMED:
                failpoint("drop.before_append")
            write_drop(self._journal, object_ids, reason)
            if ARMED:
                failpoint("drop.after_append")
            self._deleter.put(object_ids)

    def _check_reason(self, reason: str, legal: frozenset[str]) -> None:
        if reason not in legal:
            raise ValueError(f"reason {reason!r} is not one that a {self.role} incarnation may give: {sorted(legal)}")

    def _finish(self, *, deadline_s: float, n: int | None = None, void: str = "", counters: dict[str, int]) -> int:
        pending = self._deleter.close(deadline_s=deadline_s)
        try:
            self._deleter.check()
            self._deleter.fence()
            failpoint("close.before_append")
            self._journal.append(records.Close(now_ms(), n=n, void=void, counters={k: v for k, v in counters.items() if v}))
            self._journal.sync()
            self._journal.seal()
            failpoint("close.after_sync")
        finally:
            self._journal.close()
        return pending

    def _fenced(self) -> bool:
        """Whether another process adopted this incarnation: then it decides nothing more, not even at its end."""
        try:
            self._deleter.check()
            self._deleter.fence()
        except Fenced:
            return True
        except (JournalPoisoned, StoreError):
            return False  # not known: its removals ask again, before each batch
        return False

    def _check_creates_once(self) -> None:
        """Whoever fences asks the root once whether it can: a store that ignores the condition of a put is named in the log."""
        if self._ledger.store is not None and not probe_root(self._ledger.store).create_only:
            _log.warning(
                "%s lets a put replace an object that is there (it ignores If-None-Match): only one process at a time may adopt or "
                "recover on this root, see docs/ledger.md",
                self._store.url,
            )

    def _give_up(self) -> None:
        """The start failed after the journal was opened: closes it, so that nobody takes this incarnation for a live one."""
        self._closed = True
        with contextlib.suppress(JournalPoisoned):  # the caller raises why it gives up
            self._finish(deadline_s=0.0, counters={})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> int:
        raise NotImplementedError


def probe(store: Store, inc: str) -> None:
    """Creates and removes a file under ``obj/``: whoever holds rights must be able to remove. Raises ``StoreError`` subclasses."""
    name = f"obj/{inc}/.probe-{os.urandom(4).hex()}.tmp"
    store.put(name, [b"probe"], durability="process")
    outcome = store.delete([name])[name]
    if not isinstance(outcome, Deletion):
        raise outcome
    if outcome is Deletion.ABSENT:
        raise StoreError(f"{store.url}/{name} was written and is not there: the store does not show its own writes")
