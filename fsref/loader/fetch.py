"""Fetches a step's arrays ahead of the step and hands out packed tensors.

Owns the order of fetches, the byte budget, the deadline and the times that metrics report. Refuses the decision what a failed fetch
means: that is agreed between ranks by the trainer.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Final

from fsref.config import StoreSection
from fsref.errors import BadRef, StoreError, StoreUnavailable
from fsref.plan import ReadPlan, missing_ranges
from fsref.reader import Reader, failure_kind
from fsref.refs import Schema, TokenRange
from fsref.steps import MicroBatch, RankFile, SampleSequence
from fsref.store import Store
from fsref.tensors import Assembly, PackedMicroBatch, fields_wanted, pack_tokens

ASSEMBLERS: Final = 2
"""Micro batches in flight: one is decoded while the next one's buffers are made."""


@dataclass(frozen=True, eq=False)
class FetchFailure:
    """A micro batch whose arrays could not be fetched."""

    error: StoreError | BadRef
    kind: str
    """``missing``, ``corrupt`` or ``unavailable``."""
    object_ids: tuple[str, ...]
    """Every object of the micro batch."""
    batch: PackedMicroBatch
    """Its tokens, without fields: shapes for a forward that does not count."""


Fetched = PackedMicroBatch | FetchFailure


class _Budget:
    """Admits work while fewer than ``limit`` bytes are in flight; a single larger piece is admitted alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()
        self.peak = 0

    def acquire(self, size: int) -> None:
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            self._changed.wait_for(lambda: self._waiting[0] is ticket and (self._used == 0 or self._used + size <= self._limit))
            self._waiting.popleft()
            self._used += size
            self.peak = max(self.peak, self._used)
            self._changed.notify_all()

    def release(self, size: int) -> None:
        with self._changed:
            self._used -= size
            self._changed.notify_all()


@dataclass
class _StepFetch:
    """One step's fetches and their clock."""

    rank: RankFile
    futures: list[Future[Fetched]]
    begun: float
    ended: float = 0.0
    exposed_s: float = 0.0
    bytes_fetched: int = 0
    requests: int = 0
    conflicts: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class StepFetcher:
    """Prefetches and assembles the micro batches of rank files. One per trainer rank; close it."""

    def __init__(self, store: Store, schema: Schema, *, config: StoreSection) -> None:
        self._schema, self._config = schema, config
        self._reader = Reader(
            store,
            schema,
            threads=config.fetch_threads,
            retries_max=config.retries_max,
            retry_s=config.retry_s,
            deadline_s=config.fetch_deadline_s,
            abandon_s=config.abandon_s,
        )
        self._pool = ThreadPoolExecutor(ASSEMBLERS, thread_name_prefix="fsref-assemble")
        self._budget = _Budget(config.bytes_inflight_max)
        self._steps: dict[int, _StepFetch] = {}

    def prefetch(self, rank: RankFile) -> None:
        """Starts the fetch of a step's micro batches in order, if it has not been started. Returns at once."""
        if rank.step in self._steps:
            return
        fetch = _StepFetch(rank, [], time.monotonic())
        self._steps[rank.step] = fetch
        fetch.futures += [self._pool.submit(self._fetch, fetch, micro_batch) for micro_batch in rank.micro_batches]

    def take(self, rank: RankFile) -> list[Fetched]:
        """The step's micro batches in order, each as tensors or as the reason why there are none. Blocks up to ``store.fetch_deadline_s``.

        What is still missing then is a ``FetchFailure`` of kind ``unavailable``; its threads are left to end by themselves.
        """
        self.prefetch(rank)
        fetch = self._steps[rank.step]
        start = time.monotonic()
        end = start + self._config.fetch_deadline_s
        out = [self._result(f, mb, end) for f, mb in zip(fetch.futures, rank.micro_batches, strict=True)]
        fetch.exposed_s += time.monotonic() - start
        fetch.futures = []
        return out

    def metrics(self, step: int) -> dict[str, float]:
        """Seconds and bytes of a step that was taken: ``payload/fetch_time`` is its wall time from the first request to the last tensor."""
        fetch = self._steps[step]
        total = max(0.0, fetch.ended - fetch.begun)
        return {
            "payload/fetch_time": total,
            "payload/fetch_time_exposed": fetch.exposed_s,
            "payload/fetch_time_hidden": max(0.0, total - fetch.exposed_s),
            "payload/bytes_fetched": float(fetch.bytes_fetched),
            "payload/requests": float(fetch.requests),
            "payload/abandoned_threads": float(self._reader.counters.abandoned),
            "payload/conflicting_rows": float(fetch.conflicts),
        }

    def release(self, step: int) -> None:
        """Forgets a step."""
        self._steps.pop(step, None)

    def close(self) -> None:
        """Stops the threads; running fetches end first, those that are stuck are given up."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._reader.close()
        self._pool.shutdown(wait=True)

    def __enter__(self) -> "StepFetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _result(self, future: "Future[Fetched]", micro_batch: MicroBatch, end: float) -> Fetched:
        try:
            return future.result(max(0.0, end - time.monotonic()))
        except FutureTimeoutError:
            late = StoreUnavailable(f"not fetched within store.fetch_deadline_s = {self._config.fetch_deadline_s:g} s")
            return _failure(late, micro_batch)

    def _fetch(self, fetch: _StepFetch, micro_batch: MicroBatch) -> Fetched:
        try:
            plans = [self._plan(s) for s in micro_batch.sequences]
            missing: list[dict[str, tuple[TokenRange, ...]]] = [
                missing_ranges(s.ref, self._schema) if s.ref is not None else {} for s in micro_batch.sequences
            ]
            size = sum(p.byte_count for p in plans if p is not None)
            self._budget.acquire(size)
            try:
                return self._read(fetch, micro_batch, plans, missing)
            finally:
                self._budget.release(size)
        except (StoreError, BadRef) as e:
            return _failure(e, micro_batch)
        finally:
            with fetch.lock:
                fetch.ended = max(fetch.ended, time.monotonic())

    def _plan(self, sequence: SampleSequence) -> ReadPlan | None:
        ref = sequence.ref
        if ref is None:
            return None
        tokens = TokenRange(0, min(ref.token_count, sequence.token_count))
        return self._reader.plan(ref, tokens=tokens, fields=fields_wanted(sequence, self._schema))

    def _read(
        self,
        fetch: _StepFetch,
        micro_batch: MicroBatch,
        plans: Sequence[ReadPlan | None],
        missing: Sequence[dict[str, tuple[TokenRange, ...]]],
    ) -> PackedMicroBatch:
        assembly = Assembly(micro_batch, self._schema, plans=plans, missing=missing)
        futures = [f for n, p in enumerate(plans) if p is not None for f in self._reader.submit(p, assembly.out(n))]
        errors = self._reader.collect(futures)
        with fetch.lock:
            fetch.bytes_fetched += sum(p.byte_count for p in plans if p is not None)
            fetch.requests += sum(p.request_count for p in plans if p is not None)
        if errors:
            raise errors[0]
        self._compare(fetch, micro_batch, plans)
        return assembly.finish()

    def _compare(self, fetch: _StepFetch, micro_batch: MicroBatch, plans: Sequence[ReadPlan | None]) -> None:
        """Counts rows that segments of one reference give differently; nothing to do for references of one segment."""
        found = 0
        for sequence, plan in zip(micro_batch.sequences, plans, strict=True):
            if sequence.ref is not None and plan is not None and plan.overlaps:
                found += self._reader.count_conflicts(sequence.ref, plan)
        with fetch.lock:
            fetch.conflicts += found


def _failure(error: StoreError | BadRef, micro_batch: MicroBatch) -> FetchFailure:
    ids = dict.fromkeys(i for s in micro_batch.sequences if s.ref is not None for i in s.ref.object_ids)
    return FetchFailure(error, failure_kind(error), tuple(ids), pack_tokens(micro_batch))
