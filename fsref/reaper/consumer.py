"""The consumer's side (orchestrator, or the standalone eval command): takes replies, drops, ships steps."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from fsref.config import LedgerSection
from fsref.errors import FsrefError
from fsref.failpoints import ARMED, failpoint
from fsref.journal.file import SMALL_SET_MAX, now_ms, parts_of
from fsref.journal.markers import read_adopted
from fsref.journal.read import LedgerReader
from fsref.journal.run import RunInfo
from fsref.ledger import records
from fsref.ledger.ids import pack_known, split, sum_of
from fsref.ledger.recovery import adopt_records, settle
from fsref.ledger.rights import ConsumerRights
from fsref.reaper.adopt import Adopted, fence_and_read
from fsref.reaper.ended import EndedReplicas
from fsref.reaper.holder import Holder
from fsref.reaper.succession import Inheritance, is_published, succeed
from fsref.reaper.watch import DeathWatch
from fsref.store.base import Store


class ConsumerHolder(Holder):
    """One orchestrator (``role="orc"``) or eval (``role="evl"``) process. Thread-safe; only ``ship`` and ``close`` wait for a disk."""

    def __init__(
        self, store: Store, ledger_dir: Path, *, run: RunInfo, role: str = "orc", label: str = "main", section: LedgerSection | None = None
    ) -> None:
        if role not in ("orc", "evl"):
            raise ValueError(f"a consumer's role is 'orc' or 'evl', not {role!r}")
        self.role = role
        self._watch: DeathWatch | None = None
        super().__init__(store, ledger_dir, run=run, label=label, section=section)
        if role == "orc":
            seconds = self._section
            self._watch = DeathWatch(self.dead_incarnations, self.adopt, poll_s=seconds.adopt_poll_s, drain_s=seconds.adopt_drain_s)

    def _open(self) -> None:
        super()._open()
        self._adopted: dict[str, Adopted] = {}
        self._rights = ConsumerRights(self.inc, strict=self._section.strict)
        self._settled = self._shipped = self._shipped_bytes = 0  # settled: dropped of what was adopted
        self._others = LedgerReader(self._ledger, run_uuid=self._run.run_uuid, compare=False)
        self._ended = EndedReplicas(self._ledger, root_poll_s=self._section.seal_wait_s)
        self.inherited = Inheritance()
        """What was taken over from the orchestrators before this one."""
        if self.role == "orc":
            try:
                self._check_creates_once()
                self._succeed()
            except FsrefError:
                self._give_up()
                raise

    def _succeed(self) -> None:
        """One orchestrator at a time: adopts those before this one and settles what they left (``succession``)."""
        found = succeed(self._ledger, self._journal, run_uuid=self._run.run_uuid, visible=lambda key: is_published(self._store, key))
        for inc in found.replicas:
            self._rights.refuse(inc)
        self._settled += len(found.recovered) + len(found.orphans) + len(found.unjournaled)
        self._drop(found.recovered, "recovered")
        self._drop(found.orphans, "orphan")
        self._drop(found.unjournaled, "unjournaled")
        self._deleter.put(found.redo, attempt=1)
        self.inherited = found

    def take(self, request_id: str, sizes: Mapping[str, int]) -> list[str]:
        """The reply to ``request_id`` was received: takes the right to its objects, given as id to bytes.

        Returns the ids that are new here, in order. Ids that were taken before are ignored (``dup_reply``), ids of an adopted
        producer are refused (``late_refused``): an episode that lost any id this way must not be used.
        """
        with self._lock:
            self._deleter.check()
            if self.role == "evl":
                self._refuse_adopted(sizes)
            fresh = self._rights.take(sizes)
            if fresh:
                request = records.request_text(request_id)
                if ARMED:
                    failpoint("take.before_append")
                if len(fresh) <= SMALL_SET_MAX:
                    self._journal.append(records.Take(now_ms(), request, pack_known(fresh)))
                else:
                    self._journal.append_all(parts_of(lambda piece, part: records.Take(now_ms(), request, piece, part), fresh))
                if ARMED:
                    failpoint("take.after_append")
            return fresh

    def _refuse_adopted(self, object_ids: Iterable[str]) -> None:
        """The orchestrator knows whom it adopted; an eval process beside it sees the fence only."""
        for inc in {split(o)[0] for o in object_ids}:
            if read_adopted(self._ledger, inc) is not None:
                self._rights.refuse(inc)

    def drop(self, object_ids: Iterable[str], reason: str) -> int:
        """Decides to remove held ids; the removal happens in the background. Returns how many were new.

        ``reason``: filtered, group_dropped, untrained, pruned, stale, late, eval or shutdown. A second drop of an id is counted
        (``suppressed``), in strict mode ``DoubleDrop``; an id that is not held raises ``NotHolder``, and then nothing is dropped.
        """
        self._check_reason(reason, records.CONSUMER_REASONS)
        with self._lock:
            self._deleter.check()
            ids = self._rights.drop(object_ids)
            self._drop(ids, reason)
            return len(ids)

    def ship(self, step: int, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Moves the right to the step; durable on return (W2), so the batch may be published. Returns (n, sum) for ``STEP.json``.

        ``sizes`` maps every object of the step, each once, to its bytes. Raises ``NotHolder`` if one is not held; nothing moved then.
        """
        with self._lock:
            self._deleter.check()
            if self._ledger.store is None:
                self._deleter.fence()  # on another root sealing fails once an adopter has taken the next segment's name
            ids = self._rights.ship(step, sizes)
            n, checksum, byte_count = len(ids), sum_of(ids), sum(sizes.values())
            failpoint("ship.before_append")
            self._journal.append_all(parts_of(lambda piece, part: records.Ship(now_ms(), step, n, byte_count, checksum, piece, part), ids))
            self._shipped += n
            self._shipped_bytes += byte_count
            self._deleter.promote()
        failpoint("ship.after_append")
        self._journal.sync()
        failpoint("ship.after_sync")
        return n, checksum

    def adopt(self, inc: str, *, force: bool = False) -> Adopted:
        """Takes over what an env incarnation left: call it once its replica was reaped (``write_dead``) or closed, after draining its
        receive queue. Drops its orphans, redoes its removals, and refuses its later replies. Idempotent.

        Blocks for one listing of ``obj/<inc>``. Raises ``LedgerError`` if it may be alive (unless ``force``), ``Fenced`` if another
        incarnation adopted it, ``StoreError`` if the listing failed: nothing was decided then, call again.
        """
        with self._lock:
            self._deleter.check()
            if inc in self._adopted:
                return self._adopted[inc]
        remains = fence_and_read(
            self._store,
            self._ledger,
            inc,
            by=self.inc,
            run_uuid=self._run.run_uuid,
            ended=self.inherited.ended,
            force=force,
        )
        elsewhere = self._taken_by_others(inc)
        fold = remains.journal.fold
        dropped = fold.drops.get(inc, {})
        with self._lock:
            view, spoken_for = remains.view, elsewhere.union(self._rights.took(inc))
            found = settle(
                fold,
                view.present.get(inc, ()),
                dropped=dropped,
                spoken_for=spoken_for,
                staged=view.staged(inc),
                partial=remains.partial,
            )
            self._rights.refuse(inc)
            self._journal.append_all(adopt_records(inc, how=remains.how, end=remains.journal.end, settlement=found, ms=now_ms()))
            failpoint("adopt.after_append")
            orphans, unjournaled = [f"{inc}/{s}" for s in found.orphans], [f"{inc}/{s}" for s in found.unjournaled]
            self._settled += len(orphans) + len(unjournaled)
            self._drop(orphans, "orphan")
            self._drop(unjournaled, "unjournaled")
            done = fold.done.get(inc, {})
            redo = [f"{inc}/{s}" for s in dropped if s not in done]
            self._deleter.put(redo, attempt=1)
            staging = list(remains.view.staging)
            self._adopted[inc] = Adopted(inc, remains.how, len(orphans), len(unjournaled), len(redo), len(found.lost), len(staging))
        failpoint("adopt.before_staging")
        self._store.delete(staging)
        failpoint("adopt.after_staging")
        return self._adopted[inc]

    def _taken_by_others(self, inc: str) -> set[int]:
        """What an orchestrator before this one, or an eval process, took of a producer: theirs, or of a step."""
        taken: set[int] = set()
        self._others.refresh(lambda other: other != self.inc and other.startswith(("orc.", "evl.")))
        for other in self._others.journals.values():
            taken.update(other.fold.taken.get(inc, ()))
        return taken

    def dead_incarnations(self) -> list[str]:
        """Env incarnations that ended and that nobody else adopted: what ``adopt`` should be called for, after draining.

        Ended is who has a ``.dead`` marker or wrote a close record (its replica stopped, or rotated for a new orchestrator). An
        orchestrator adopts them by itself (``ledger.adopt_poll_s``).
        """
        return self._ended.find(by=self.inc, adopted=self._adopted, heirs_of=self.inherited.ended, settled=self.inherited.settled)

    def holds(self, object_id: str) -> bool:
        """Whether this process holds the right to an object now."""
        with self._lock:
            return object_id in self._rights.held

    def close(self, *, discard: bool = True, deadline_s: float = 30.0) -> int:
        """Ends the incarnation: with ``discard`` drops everything that it still holds (``shutdown``, an eval process ``eval``).

        Driven by the ledger, so no queue can be forgotten. Removes up to the deadline; returns how many removals are still pending.
        """
        if self._watch is not None:
            self._watch.close(deadline_s=deadline_s)
        with self._lock:
            if self._closed:
                return 0
            self._closed = True
            if discard and not self._journal.poisoned and not self._fenced():
                ids = self._rights.drop(list(self._rights.held))
                self._drop(ids, "eval" if self.role == "evl" else "shutdown")
            return self._finish(deadline_s=deadline_s, counters=self.counters)

    @property
    def counters(self) -> dict[str, int]:
        """Gauges and counts since this incarnation opened."""
        return {
            "taken": self._rights.taken_count,
            "taken_bytes": self._rights.taken_bytes,
            "dropped": self._rights.dropped_count + self._settled,
            "shipped": self._shipped,
            "shipped_bytes": self._shipped_bytes,
            "held": len(self._rights.held),
            "held_bytes": self._rights.held_bytes,
            "done": self._deleter.done,
            "pending_delete": self._deleter.pending,
            "retried": self._deleter.retried,
            "suppressed": self._rights.suppressed,
            "dup_reply": self._rights.dup_reply,
            "late_refused": self._rights.late_refused,
            "adopted": len(self._adopted),
            "adoption_failures": self._watch.failed if self._watch else 0,
        }
