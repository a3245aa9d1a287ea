"""Finds step files as they are published and starts their fetches, beside the training of earlier steps.

Owns one thread. A step is handed out only after its fetch has been started, so the loader is never touched by two threads for one step.
Refuses to decide how long to wait and what a failure means: the trainer polls, and gets the error that stopped the thread.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

from fsref.errors import FsrefError, MissingArrays, ObjectMissing, StepError, StoreUnavailable
from fsref.plan import present_fields
from fsref.steps import RankFile, StepInfo, read_info, read_rank, step_name
from fsref.store import Store

POLL_S: Final = 0.05
POLL_ROOT_S: Final = 1.0
"""On a root that is no folder each look is a request: the wait between them doubles from ``POLL_S`` up to this."""


class Prefetcher(Protocol):
    """What the feed needs of ``StepFetcher``."""

    def prefetch(self, rank: RankFile) -> None: ...


@dataclass(frozen=True)
class Published:
    """A step that is there and being fetched."""

    info: StepInfo
    rank_file: RankFile


class StepFeed:
    """Looks for steps ``first`` to ``last`` (inclusive), at most ``ahead`` steps past the one that trains. Close it."""

    def __init__(
        self,
        store: Store,
        loader: Prefetcher,
        *,
        run: str,
        run_uuid: str,
        data_rank: int,
        first: int,
        last: int,
        ahead: int,
        fields: Sequence[str] = (),
        abandon_s: float = 5.0,
    ) -> None:
        """``fields``: what every sample that trains must bring, where the schema has it; one without any array is refused anyway."""
        self._store, self._loader = store, loader
        self._run, self._run_uuid, self._data_rank = run, run_uuid, data_rank
        self._next, self._last, self._ahead, self._abandon_s = first, last, ahead, abandon_s
        self._fields = tuple(fields)
        self._current = first
        self._ready: dict[int, Published] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._error: FsrefError | None = None
        self._trouble = ""
        self._thread = threading.Thread(target=self._run_thread, name="fsref-step-feed", daemon=True)
        self._thread.start()

    def wait(self, step: int, *, timeout_s: float) -> Published | None:
        """Makes ``step`` the one that trains and returns it, or None if it was not published in time.

        Raises what ended the search: ``StepError`` for a step of another run, ``StoreError``, ``MissingArrays``.
        """
        with self._changed:
            self._current = step
            self._changed.notify_all()
            self._changed.wait_for(lambda: step in self._ready or self._error is not None, timeout_s)
            if step in self._ready:
                return self._ready[step]
            if self._error is not None:
                raise self._error
            return None

    @property
    def trouble(self) -> str:
        """What the store said when it could not be asked for the wanted step; empty if it answered."""
        with self._changed:
            return self._trouble

    def release(self, step: int) -> None:
        """Forgets a step that was trained."""
        with self._changed:
            self._ready.pop(step, None)

    def close(self) -> None:
        """Stops the thread, or leaves it behind where it is stuck in the store for ``abandon_s`` seconds; idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(self._abandon_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run_thread(self) -> None:
        misses = 0
        while self._may_look():
            try:
                found = self._look(self._next)
            except FsrefError as e:
                with self._changed:
                    self._error = e
                    self._changed.notify_all()
                return
            with self._changed:
                if found is None:
                    self._changed.wait_for(lambda: self._stopping, poll_s(misses, folder=self._store.posix_path is not None))
                    misses += 1
                    continue
                misses = 0
                self._ready[self._next] = found
                self._next += 1
                self._changed.notify_all()

    def _may_look(self) -> bool:
        """Waits until a further step is wanted; False when there is none or the feed closes."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._next > self._last or self._next <= self._current + self._ahead)
            return not self._stopping and self._next <= self._last

    def _note(self, trouble: str) -> None:
        with self._changed:
            self._trouble = trouble

    def _look(self, step: int) -> Published | None:
        try:
            info = read_info(self._store, step)
        except ObjectMissing:
            self._note("")
            return None
        except StoreUnavailable as e:
            self._note(str(e))
            return None
        if (info.run, info.run_uuid) != (self._run, self._run_uuid):
            raise StepError(
                f"{step_name(step)} is of run {info.run!r} ({info.run_uuid}), this trainer is of {self._run!r} ({self._run_uuid}): "
                f"a folder that was used before; start under another run.id"
            )
        try:
            rank_file = read_rank(self._store, info, self._data_rank)
        except (ObjectMissing, StoreUnavailable) as e:  # it was there before STEP.json: this client of the filesystem sees it later
            self._note(str(e))
            return None
        _require_arrays(rank_file, self._fields)
        self._loader.prefetch(rank_file)
        return Published(info, rank_file)


def poll_s(misses: int, *, folder: bool) -> float:
    """Seconds until the next look for a step that was not there ``misses`` + 1 times."""
    return POLL_S if folder else min(POLL_ROOT_S, POLL_S * 2 ** min(misses, 16))


def _require_arrays(rank_file: RankFile, fields: Sequence[str]) -> None:
    """Every sample that trains must bring every field that the run needs: what lost it on the way is found here, not in the loss."""
    needed = [f.name for f in rank_file.schema.fields if f.name in fields]
    for sequence in (s for m in rank_file.micro_batches for s in m.sequences if any(s.loss_mask)):
        where = f"{step_name(rank_file.step)}: sample {sequence.sample} trains"
        if sequence.ref is None:
            raise MissingArrays(
                f"{where} but has no arrays: is its environment served by a plain verifiers server? Serve it with `fsref env-server`"
            )
        held = present_fields(sequence.ref, rank_file.schema)
        if lacking := [name for name in needed if name not in held]:
            raise MissingArrays(
                f"{where} without {lacking}, which run.fields needs; its reference brings {list(held)}: look at who wrote the step file, "
                f"take the fields out of run.fields, or set run.missing = 'fallback'"
            )
