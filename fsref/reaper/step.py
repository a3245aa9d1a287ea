"""The trainer's side, on rank 0 only: takes steps, marks them used, and drops them under the commit policy.

The data ranks' leaders remove the objects of their rank file (``owned``) with ``delete_objects`` after the barrier.
"""

from collections.abc import Iterable, Mapping

from fsref.errors import FsrefError, NotHolder, RunBusy
from fsref.failpoints import failpoint
from fsref.journal.death import how_ended
from fsref.journal.file import now_ms
from fsref.journal.read import LedgerReader
from fsref.journal.secure import sync_ended, sync_journal
from fsref.ledger import records
from fsref.ledger.ids import pack
from fsref.ledger.merge import StepKey
from fsref.ledger.rights import StepRights
from fsref.reaper.adopt import fence
from fsref.reaper.holder import Holder
from fsref.steps import StepInfo


class StepHolder(Holder):
    """Trainer rank 0 = one incarnation. Ranges of steps include both ends, as in the journal."""

    role = "trn"

    def _open(self) -> None:
        super()._open()
        try:
            self._check_creates_once()
            released = self._succeed()
        except FsrefError:
            self._give_up()
            raise
        self._rights = StepRights(self.inc, strict=self._section.strict, released=released)
        self._count = dict.fromkeys(("steps_taken", "steps_used", "steps_dropped", "steps_done", "missed"), 0)

    def _succeed(self) -> dict[StepKey, str]:
        """Adopts the trainers and recoveries before this one and redoes their removals. Returns which batches are released, and by whom.

        Raises ``RunBusy`` if another trainer or a recovery may be alive.
        """
        reader = LedgerReader(self._ledger, run_uuid=self._run.run_uuid, compare=False)
        reader.refresh_all()
        before = {i: j for i, j in reader.journals.items() if i != self.inc and j.fold.role in ("trn", "rec")}
        hows = {inc: how_ended(self._ledger, journal) for inc, journal in before.items()}
        sync_ended(self._ledger, (j for inc, j in before.items() if hows[inc] is not None))
        ends = reader.refresh_all()  # again: one that was alive at the first look may have written before it ended
        merged = reader.merge()
        left = [inc for inc in before if not merged.adopted(inc)]
        if alive := [inc for inc in left if hows[inc] is None]:
            raise RunBusy(f"{', '.join(alive)} may be alive: one trainer at a time; stop it, or have its launcher write its .dead marker")
        for inc in left:
            fence(self._ledger, inc, by=self.inc, ended=before)
            failpoint("succeed.after_fence")
            sync_journal(self._ledger, before[inc])
            self._journal.append(records.Adopt(now_ms(), inc, str(hows[inc]), ends[inc]))
            failpoint("succeed.after_append")
        mine = set(left).union(*(merged.closures.get(inc, ()) for inc in left))
        redo = [f"{inc}/{seq}" for inc, seq in merged.pending() if merged.drops[inc][seq].journal in mine]
        self._deleter.put(redo, attempt=1)
        return merged.released()

    def check_released(self, info: StepInfo) -> None:
        """Raises ``StepReleased`` if the arrays of a step were removed, by this process or one before it."""
        with self._lock:
            self._rights.check(info.step, n=info.n, checksum=info.sum)

    def taken(self, info: StepInfo) -> None:
        """The step file was read and its counts checked: the step's right passes to this trainer. Idempotent for the same batch.

        Raises ``StepReleased`` if its arrays were removed, ``StepError`` if another batch was taken under the same number.
        """
        with self._lock:
            if self._rights.take(info.step, n=info.n, checksum=info.sum):
                failpoint("taken.before_append")
                self._journal.append(records.StepRecord(now_ms(), info.step, "taken", info.n, info.sum))
                failpoint("taken.after_append")
                self._count["steps_taken"] += 1

    def used(self, step: int, miss: Mapping[str, str] | None = None) -> None:
        """Every rank has fetched the step (call after the all-reduce). ``miss`` maps ids that no rank could fetch to their class:
        missing, corrupt or unavailable. Raises ``NotHolder`` for a step that is not held."""
        with self._lock:
            if step not in self._rights.taken:
                raise NotHolder(f"step {step} cannot be used: {self.inc} does not hold it")
            n, checksum = self._rights.taken[step]
            classes = {kind: pack(o for o, k in (miss or {}).items() if k == kind) for kind in sorted(set((miss or {}).values()))}
            if unknown := set(classes) - records.MISS_CLASSES:
                raise ValueError(f"failure classes {sorted(unknown)} are not of {sorted(records.MISS_CLASSES)}")
            failpoint("used.before_append")
            self._journal.append(records.StepRecord(now_ms(), step, "used", n, checksum, classes))
            failpoint("used.after_append")
            self._count["steps_used"] += 1
            self._count["missed"] += len(miss or {})

    def drop_steps(self, lo: int, hi: int) -> int:
        """Decides to remove the arrays of steps ``lo`` to ``hi``, both included; durable on return (W1), so leaders may delete.

        Returns how many steps were new. Steps dropped before are suppressed and counted (strict: ``DoubleDrop``); a step that was
        never taken raises ``NotHolder``.
        """
        with self._lock:
            ranges = self._rights.drop(lo, hi)
            failpoint("drop_steps.before_append")
            for a, b in ranges:
                self._journal.append(records.Drop(now_ms(), "trained", steps=(a, b)))
            self._count["steps_dropped"] += sum(b - a + 1 for a, b in ranges)
        failpoint("drop_steps.after_append")
        self._journal.sync()
        failpoint("drop_steps.after_sync")
        self._deleter.fence()
        return sum(b - a + 1 for a, b in ranges)

    def done_steps(self, lo: int, hi: int, absent: Iterable[str] = (), *, attempt: int = 1) -> None:
        """Every leader reported its share of these steps as gone. ``absent``: ids that a leader found absent at its first attempt."""
        with self._lock:
            if late := [s for s in range(lo, hi + 1) if s not in self._rights.released]:
                raise NotHolder(f"steps {lo}..{hi} cannot be done: step {late[0]} was not dropped")
            failpoint("done_steps.before_append")
            self._journal.append(records.Done(now_ms(), steps=(lo, hi), a=pack(absent), k=attempt))
            failpoint("done_steps.after_append")
            self._count["steps_done"] += hi - lo + 1

    def close(self) -> int:
        """Ends the incarnation. Steps that are taken and not dropped stay for the next trainer, or for the run's close."""
        with self._lock:
            if self._closed:
                return 0
            self._closed = True
            return self._finish(deadline_s=1.0, counters=self.counters)

    @property
    def counters(self) -> dict[str, int]:
        """Counts since this incarnation opened."""
        return {**self._count, "suppressed": self._rights.suppressed}
