"""When a step's arrays are removed, and the order in which the ranks do it.

Owns the policy and the sequence: rank 0 records the drop durably, barrier, every data rank's leader removes its own share in the
background, counts are gathered, rank 0 records ``done``. Refuses a second drop of a step, and a ``done`` while anything may still be there:
what could not be removed is left to the run's close.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

from fsref.config import TrainerSection
from fsref.errors import ObjectMissing, StepReleased, StoreUnavailable
from fsref.failpoints import failpoint
from fsref.loader.ranks import Ranks
from fsref.reaper import Outcome, delete_objects
from fsref.steps import RankFile, StepInfo, read_info, read_rank
from fsref.store import Store
from fsref.store.threads import Threads

_log: Final = logging.getLogger(__name__)


class StepLedger(Protocol):
    """What the trainer needs of ``fsref.reaper.StepHolder``; rank 0 only. Step ranges include both ends."""

    def taken(self, info: StepInfo) -> object: ...
    def used(self, step: int, miss: Mapping[str, str]) -> object: ...
    def drop_steps(self, lo: int, hi: int) -> object: ...
    def done_steps(self, lo: int, hi: int, *, absent: Sequence[str]) -> object: ...


@dataclass(frozen=True)
class Removed:
    """What one ``settle`` found finished, over all data ranks."""

    objects: int = 0
    bytes: int = 0
    absent: int = 0
    failed: int = 0
    pending: int = 0
    """Objects whose removal still runs."""

    def __add__(self, later: "Removed") -> "Removed":
        """Both; what is pending is what the later one says."""
        objects, size = self.objects + later.objects, self.bytes + later.bytes
        return Removed(objects, size, self.absent + later.absent, self.failed + later.failed, later.pending)


@dataclass
class _Share:
    """One drop of steps ``lo`` to ``hi`` and this rank's part of it."""

    lo: int
    hi: int
    sizes: dict[str, int]
    over: "Future[None]"
    outcome: list[Outcome]
    """What the removal came to, once it is over."""


class Committer:
    """Removes the arrays of trained steps. Every method but ``fetched`` is collective. A context manager."""

    def __init__(
        self,
        ranks: Ranks,
        store: Store,
        ledger: StepLedger | None,
        config: TrainerSection,
        *,
        delete_threads: int = 1,
        abandon_s: float = 5.0,
    ) -> None:
        """``ledger``: rank 0's holder, None elsewhere. ``abandon_s``: how long a close waits for a removal that is stuck."""
        self._ranks, self._store, self._ledger = ranks, store, ledger
        self._policy, self._keep_last, self._delete_threads = config.commit, config.keep_last, delete_threads
        self._owned: dict[int, dict[str, int]] = {}
        self._shares: list[_Share] = []
        self._stop = threading.Event()
        self._settle_s, self._abandon_s = config.collective_s / 2, abandon_s
        self._pool = Threads(1, name="fsref-commit")

    def fetched(self, rank_file: RankFile) -> None:
        """Every rank has this step's tensors, or has agreed to go without: its removal may follow, by policy."""
        sizes = {s.object_id: s.byte_count for m in rank_file.micro_batches for q in m.sequences if q.ref for s in q.ref.segments}
        self._owned[rank_file.step] = {i: sizes.get(i, 0) for i in rank_file.owned if self._ranks.is_leader}

    def inherit(self, version: int) -> None:
        """Takes over the steps below ``version`` that an earlier trainer has trained and not dropped, and applies the policy to them.

        Removal goes by ascending steps, so the search goes down from ``version`` and ends at the first step that is released or gone.
        """
        steps = self._ranks.gather(self._ranks.together("taking over earlier steps", lambda: self._left_below(version)))[0]
        for step in steps:
            self.fetched(read_rank(self._store, read_info(self._store, step), self._ranks.data_rank))
        if steps:
            self._drop_through(version - 1 - (self._keep_last if self._policy == "keep_last" else 0))

    def after_fetch(self, step: int) -> None:
        """Policy ``fetched``."""
        if self._policy == "fetched":
            self._drop_through(step)

    def after_step(self, step: int) -> None:
        """Policy ``keep_last``: all but the newest steps."""
        if self._policy == "keep_last":
            self._drop_through(step - self._keep_last)

    def after_checkpoint(self, version: int) -> None:
        """Policy ``checkpoint``: the steps below a durable checkpoint."""
        if self._policy == "checkpoint":
            self._drop_through(version - 1)

    def finish(self, step: int) -> None:
        """The run's clean end: whatever the policy, nothing will be read again."""
        self._drop_through(step)

    def settle(self, *, wait: bool) -> Removed:
        """Records what has been removed since the last call; with ``wait`` all of it. Counts are over all data ranks.

        A rank that waits keeps the others in a collective, so it waits for half of ``trainer.collective_s`` at most; what is not removed
        then has failed, and is left to the run's close.
        """
        removed = Removed()
        end = time.monotonic() + self._settle_s
        for share in list(self._shares):
            if not wait and self._ranks.maximum([0 if share.over.done() else 1])[0]:
                break  # in order, so that every rank settles the same shares
            removed += self._settle(share, end)
            self._shares.remove(share)
        pending = self._ranks.gather(sum(len(s.sizes) for s in self._shares)) if self._shares else [0]
        return Removed(removed.objects, removed.bytes, removed.absent, removed.failed, sum(pending))

    def close(self) -> None:
        """Stops removing; what is left stays dropped and not done, for the run's close. Waits ``abandon_s`` for a removal under way."""
        self._stop.set()
        self._pool.close(deadline_s=self._abandon_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _left_below(self, version: int) -> list[int]:
        found: list[int] = []
        if self._ledger is None:
            return found
        for step in reversed(range(version)):
            try:
                self._ledger.taken(read_info(self._store, step))
            except (ObjectMissing, StepReleased):
                break
            found.insert(0, step)
        return found

    def _drop_through(self, hi: int) -> None:
        steps = sorted(s for s in self._owned if s <= hi)
        if not steps:
            return
        ledger = self._ledger  # W1: the drop is durable before any rank removes
        self._ranks.together("recording the drop", lambda: ledger and ledger.drop_steps(steps[0], steps[-1]))
        sizes: dict[str, int] = {}
        for step in steps:
            sizes.update(self._owned.pop(step))
        outcome: list[Outcome] = []
        over = self._pool.submit(lambda: outcome.append(self._remove(list(sizes))))
        self._shares.append(_Share(steps[0], steps[-1], sizes, over, outcome))

    def _remove(self, share: list[str]) -> Outcome:
        """In the thread: this leader's objects; none on other ranks."""
        failpoint("leader.before_delete")
        outcome = delete_objects(self._store, share, threads=self._delete_threads, stop=self._stop)
        failpoint("leader.after_delete")
        return outcome

    def _settle(self, share: _Share, end: float) -> Removed:
        try:
            share.over.result(max(0.0, end - time.monotonic()))
            outcome = share.outcome[0]
        except (StoreUnavailable, TimeoutError, CancelledError) as e:
            late = e if isinstance(e, StoreUnavailable) else StoreUnavailable(f"its removal did not end within {self._settle_s:g} s")
            outcome = Outcome(failed=dict.fromkeys(share.sizes, late))
        parts = self._ranks.gather(
            (len(outcome.done), sum(share.sizes[i] for i in outcome.done), list(outcome.absent), len(outcome.failed))
        )
        absent = [i for p in parts for i in p[2]]
        failed = sum(p[3] for p in parts)
        for object_id, error in list(outcome.failed.items())[:3]:
            _log.warning("object %s of steps %d to %d is not removed yet: %s", object_id, share.lo, share.hi, error)
        ledger = self._ledger if not failed else None
        self._ranks.together("recording the removal", lambda: ledger and ledger.done_steps(share.lo, share.hi, absent=absent))
        return Removed(sum(p[0] for p in parts), sum(p[1] for p in parts), len(absent), failed)
