"""Fetches a rank's part of a step's micro batches ahead of the step, and hands out packed tensors.

Owns the order of fetches, the byte budget, the deadline and the times that metrics report. A rank reads its rows of its layers of its
fields (``fsref.parallel``); a data parallel rank reads all of its micro batches. Refuses the decision what a failed fetch means: that is
agreed between ranks (``agreement``).
"""

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Final

from fsref.config import StoreSection
from fsref.errors import BadRef, StoreError, StoreUnavailable
from fsref.nodecache import NodeCache
from fsref.parallel import Coordinate, Parallel, StepRows
from fsref.plan import PackedRows, SlicePlan
from fsref.reader import ReadCounters, Reader, failure_kind
from fsref.refs import Schema, TokenRange
from fsref.slices import SliceBuffers, fields_wanted
from fsref.steps import MicroBatch, RankFile, step_name
from fsref.store import Store
from fsref.tensors import PackedMicroBatch, rank_batch, rank_tokens

_log: Final = logging.getLogger(__name__)
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
    """This rank's tokens, without fields: shapes for a forward that does not count."""


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
    rows: StepRows
    begun: float
    futures: list[Future[Fetched]] = field(default_factory=list)
    ended: float = 0.0
    exposed_s: float = 0.0
    read: ReadCounters = field(default_factory=ReadCounters)
    conflicts: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class StepFetcher:
    """Prefetches and assembles this rank's part of the micro batches of rank files. One per trainer rank; close it."""

    def __init__(
        self,
        store: Store,
        schema: Schema,
        *,
        config: StoreSection,
        parallel: Parallel | None = None,
        at: Coordinate | None = None,
        cache: NodeCache | None = None,
    ) -> None:
        """``parallel``, ``at``: the layout and this rank's place in it; without, all of every micro batch. ``cache``: what the ranks of
        this node fetch once for all of them; the caller closes it, after this.

        Raises ``ConfigError`` for a layout that does not fit the schema.
        """
        self._schema, self._config = schema, config
        self._parallel, self._at = parallel or Parallel(), at or Coordinate()
        self._parallel.check(schema)
        self._reader = Reader(
            store,
            schema,
            threads=config.fetch_threads,
            retries_max=config.retries_max,
            retry_s=config.retry_s,
            deadline_s=config.fetch_deadline_s,
            abandon_s=config.abandon_s,
            cache=cache,
        )
        self._cache = cache
        self._pool = ThreadPoolExecutor(ASSEMBLERS, thread_name_prefix="fsref-assemble")
        self._budget = _Budget(config.bytes_inflight_max)
        self._steps: dict[int, _StepFetch] = {}

    def prefetch(self, rank: RankFile) -> None:
        """Starts the fetch of a step's micro batches in order, if it has not been started. Returns at once.

        Raises ``ConfigError`` for micro batches that the layout does not divide.
        """
        if rank.step in self._steps:
            return
        fetch = _StepFetch(rank, StepRows(self._parallel, self._at, rank.micro_batches), time.monotonic())
        for number in range(len(rank.micro_batches)):
            fetch.rows.of(number)
        self._steps[rank.step] = fetch
        fetch.futures += [self._pool.submit(self._fetch, fetch, n) for n in range(len(rank.micro_batches))]

    def take(self, rank: RankFile) -> list[Fetched]:
        """The step's micro batches in order, waiting for those that are not there yet; at most ``store.fetch_deadline_s`` seconds.

        A micro batch that is not there then is a ``FetchFailure`` of kind ``unavailable``; its threads are left to end by themselves.
        """
        self.prefetch(rank)
        fetch = self._steps[rank.step]
        start = time.monotonic()
        end = start + self._config.fetch_deadline_s
        out = [self._result(fetch, n, end) for n in range(len(fetch.futures))]
        fetch.exposed_s += time.monotonic() - start
        fetch.futures = []
        return out

    def whole_rows(self, step: int) -> list[PackedRows]:
        """Each micro batch of a step before it was split over ranks: all of its rows, padding of sequences included."""
        rows = self._steps[step].rows
        return [rows.whole(n) for n in range(len(rows.micro_batches))]

    def metrics(self, step: int) -> dict[str, float]:
        """Seconds and bytes of a step that was taken: ``payload/fetch_time`` is its wall time from the first request to the last tensor."""
        fetch = self._steps[step]
        total = max(0.0, fetch.ended - fetch.begun)
        return {
            "payload/fetch_time": total,
            "payload/fetch_time_exposed": fetch.exposed_s,
            "payload/fetch_time_hidden": max(0.0, total - fetch.exposed_s),
            "payload/bytes_fetched": float(fetch.read.bytes_fetched),
            "payload/requests": float(fetch.read.requests),
            "payload/abandoned_threads": float(self._reader.counters.abandoned),
            "payload/conflicting_rows": float(fetch.conflicts),
        }

    def release(self, step: int) -> None:
        """Forgets a step, and lets the node's cache do so once every rank has."""
        if self._steps.pop(step, None) is not None and self._cache is not None:
            self._cache.release(step)

    def close(self) -> None:
        """Stops the threads; running fetches end first, those that are stuck are given up."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._reader.close()
        self._pool.shutdown(wait=True)

    def __enter__(self) -> "StepFetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _result(self, fetch: _StepFetch, number: int, end: float) -> Fetched:
        try:
            return fetch.futures[number].result(max(0.0, end - time.monotonic()))
        except FutureTimeoutError:
            late = StoreUnavailable(f"not fetched within store.fetch_deadline_s = {self._config.fetch_deadline_s:g} s")
            return self._failure(late, fetch, number)

    def _fetch(self, fetch: _StepFetch, number: int) -> Fetched:
        try:
            plan = fetch.rows.plan(
                number, self._schema, request_bytes_max=self._reader.request_bytes_max, gap_bytes_max=self._reader.gap_bytes_max
            )
            self._budget.acquire(plan.read.byte_count)
            try:
                return self._read(fetch, number, plan)
            finally:
                self._budget.release(plan.read.byte_count)
        except (StoreError, BadRef) as e:
            return self._failure(e, fetch, number)
        finally:
            with fetch.lock:
                fetch.ended = max(fetch.ended, time.monotonic())

    def _read(self, fetch: _StepFetch, number: int, plan: SlicePlan) -> PackedMicroBatch:
        micro_batch = fetch.rank.micro_batches[number]
        buffers = SliceBuffers(
            plan,
            self._schema,
            step=fetch.rank.step * self._parallel.data + fetch.rank.data_rank,
            expert_shards=self._parallel.expert_shards,
            expert_dtype="int32",
        )
        errors = self._reader.collect(self._reader.submit(plan.read, buffers.out, step=fetch.rank.step, tally=fetch.read))
        if errors:
            raise errors[0]
        self._compare(fetch, micro_batch, plan)
        return rank_batch(micro_batch, buffers.finish(), self._schema, bytes_read=plan.read.byte_count)

    def _compare(self, fetch: _StepFetch, micro_batch: MicroBatch, plan: SlicePlan) -> None:
        """Counts rows that segments of one reference give differently; nothing to do for references of one segment."""
        found = 0
        for span in plan.rows.spans():
            ref = micro_batch.sequences[span.sequence].ref
            if ref is None or len(ref.segments) < 2:
                continue
            names = [n for n in fields_wanted(micro_batch.sequences[span.sequence], self._schema) if n in plan.fields]
            alone = self._reader.plan(ref, tokens=span.tokens.clip(TokenRange(0, ref.token_count)), fields=names)
            if alone.overlaps:
                found += self._reader.count_conflicts(ref, alone)
        with fetch.lock:
            fetch.conflicts += found

    def _failure(self, error: StoreError | BadRef, fetch: _StepFetch, number: int) -> FetchFailure:
        micro_batch, kind = fetch.rank.micro_batches[number], failure_kind(error)
        _log.warning("%s micro batch %d is %s: %s", step_name(fetch.rank.step), number, kind, error)
        ids = dict.fromkeys(i for s in micro_batch.sequences if s.ref is not None for i in s.ref.object_ids)
        return FetchFailure(error, kind, tuple(ids), rank_tokens(micro_batch, fetch.rows.of(number)))
