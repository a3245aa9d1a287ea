"""Fetches a rank's part of a step's micro batches ahead of the step, and hands out packed tensors.

Owns the deadline, the memory of the arrays and the times that metrics report; order and room are those of ``ahead``. A rank reads its rows
of its layers of its fields (``fsref.parallel``); a data parallel rank reads all of its micro batches. Refuses the decision what a failed
fetch means: that is agreed between ranks (``agreement``).
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Final

from fsref.buffers import Allocate, BufferPool, pageable
from fsref.config import StoreSection
from fsref.errors import BadRef, StoreError, StoreUnavailable
from fsref.loader.ahead import Ahead, Room
from fsref.nodecache import NodeCache
from fsref.parallel import Coordinate, Parallel, StepRows
from fsref.plan import PackedRows, SlicePlan
from fsref.reader import ReadCounters, Reader, failure_kind
from fsref.refs import Schema, TokenRange
from fsref.slices import SliceBuffers, buffer_bytes, fields_wanted
from fsref.steps import MicroBatch, RankFile, step_name
from fsref.store import Store
from fsref.tensors import ExpertIds, PackedMicroBatch, rank_batch, rank_tokens, slice_dtype

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


@dataclass
class _StepFetch:
    """One step's fetches and their clock."""

    rank: RankFile
    rows: StepRows
    futures: list[Future[PackedMicroBatch]] = field(default_factory=list)
    exposed_s: float = 0.0
    hidden_s: float = 0.0
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
        allocate: Allocate = pageable,
        expert_ids: ExpertIds = "int32",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``parallel``, ``at``: the layout and this rank's place in it; without, all of every micro batch. ``cache``: what the ranks of
        this node fetch once for all of them; the caller closes it, after this. ``allocate`` makes the memory of arrays, which is used
        again when no tensor refers to it. ``expert_ids``: their form in the tensors. ``now``: the clock of the metrics.

        Raises ``ConfigError`` for a layout, or a form of ids, that does not fit the schema.
        """
        self.expert_ids: ExpertIds = expert_ids
        self.expert_dtype = slice_dtype(schema, expert_ids)
        self.schema, self._config = schema, config
        self.parallel, self._at = parallel or Parallel(), at or Coordinate()
        self.parallel.check(schema)
        self.reader = Reader(
            store,
            schema,
            threads=config.fetch_threads,
            retries_max=config.retries_max,
            retry_s=config.retry_s,
            deadline_s=config.fetch_deadline_s,
            abandon_s=config.abandon_s,
            cache=cache,
        )
        self._cache, self._now = cache, now
        self.memory = BufferPool(allocate=allocate)
        self._ahead: Ahead[PackedMicroBatch] = Ahead(
            workers=ASSEMBLERS, bytes_max=config.bytes_inflight_max, name="fsref-assemble", now=now
        )
        self._steps: dict[int, _StepFetch] = {}

    def prefetch(self, rank: RankFile) -> None:
        """Starts the fetch of a step's micro batches in order, if it has not been started. Returns at once.

        Raises ``ConfigError`` for micro batches that the layout does not divide.
        """
        if rank.step in self._steps:
            return
        fetch = _StepFetch(rank, StepRows(self.parallel, self._at, rank.micro_batches))
        for number in range(len(rank.micro_batches)):
            fetch.rows.of(number)
        self._steps[rank.step] = fetch
        fetch.futures += self._ahead.add(rank.step, [_MicroBatchFetch(self, fetch, n) for n in range(len(rank.micro_batches))])

    def take(self, rank: RankFile) -> list[Fetched]:
        """The step's micro batches in order, waiting for those that are not there yet; at most ``store.fetch_deadline_s`` seconds.

        A micro batch that is not there then is a ``FetchFailure`` of kind ``unavailable``; its threads are left to end by themselves.
        """
        self.prefetch(rank)
        fetch = self._steps[rank.step]
        end = time.monotonic() + self._config.fetch_deadline_s
        start, fetch.hidden_s = self._now(), self._ahead.spent_s(rank.step)
        self._ahead.want(rank.step)
        out = [self._result(fetch, n, end) for n in range(len(fetch.futures))]
        fetch.exposed_s += self._now() - start
        fetch.futures = []
        return out

    def whole_rows(self, step: int) -> list[PackedRows]:
        """Each micro batch of a step before it was split over ranks: all of its rows, padding of sequences included."""
        rows = self._steps[step].rows
        return [rows.whole(n) for n in range(len(rows.micro_batches))]

    def metrics(self, step: int) -> dict[str, float]:
        """Seconds and bytes of a step that was taken.

        ``payload/fetch_time``: in which at least one of its micro batches was being fetched, whoever waited. ``_hidden``: the part of it
        before the step was taken. ``_exposed``: for how long ``take`` waited.
        """
        fetch = self._steps[step]
        return {
            "payload/fetch_time": self._ahead.spent_s(step),
            "payload/fetch_time_exposed": fetch.exposed_s,
            "payload/fetch_time_hidden": fetch.hidden_s,
            "payload/bytes_fetched": float(fetch.read.bytes_fetched),
            "payload/requests": float(fetch.read.requests),
            "payload/abandoned_threads": float(self.reader.counters.abandoned),
            "payload/conflicting_rows": float(fetch.conflicts),
        }

    def release(self, step: int) -> None:
        """Forgets a step, and lets the node's cache do so once every rank has."""
        if self._steps.pop(step, None) is None:
            return
        self._ahead.release(step)
        if self._cache is not None:
            self._cache.release(step)

    def close(self) -> None:
        """Stops the threads; running fetches end first, those that are stuck are given up."""
        self._ahead.stop()
        self.reader.close()
        self._ahead.close()

    def __enter__(self) -> "StepFetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _result(self, fetch: _StepFetch, number: int, end: float) -> Fetched:
        try:
            return fetch.futures[number].result(max(0.0, end - time.monotonic()))
        except (StoreError, BadRef) as e:
            return self._failure(e, fetch, number)
        except FutureTimeoutError:
            late = StoreUnavailable(f"not fetched within store.fetch_deadline_s = {self._config.fetch_deadline_s:g} s")
            return self._failure(late, fetch, number)

    def compare(self, fetch: _StepFetch, micro_batch: MicroBatch, plan: SlicePlan) -> None:
        """Counts rows that segments of one reference give differently; nothing to do for references of one segment."""
        found = 0
        for span in plan.rows.spans():
            ref = micro_batch.sequences[span.sequence].ref
            if ref is None or len(ref.segments) < 2:
                continue
            names = [n for n in fields_wanted(micro_batch.sequences[span.sequence], self.schema) if n in plan.fields]
            alone = self.reader.plan(ref, tokens=span.tokens.clip(TokenRange(0, ref.token_count)), fields=names)
            if alone.overlaps:
                found += self.reader.count_conflicts(ref, alone)
        with fetch.lock:
            fetch.conflicts += found

    def _failure(self, error: StoreError | BadRef, fetch: _StepFetch, number: int) -> FetchFailure:
        micro_batch, kind = fetch.rank.micro_batches[number], failure_kind(error)
        _log.warning("%s micro batch %d is %s: %s", step_name(fetch.rank.step), number, kind, error)
        ids = dict.fromkeys(i for s in micro_batch.sequences if s.ref is not None for i in s.ref.object_ids)
        tokens = rank_tokens(micro_batch, fetch.rows.of(number), targets_ahead=self.parallel.targets_ahead)
        return FetchFailure(error, kind, tuple(ids), tokens)


class _MicroBatchFetch:
    """The fetch of one micro batch, as a job of ``Ahead``."""

    def __init__(self, owner: StepFetcher, fetch: _StepFetch, number: int) -> None:
        self._owner, self._fetch, self._number = owner, fetch, number
        self._plan: SlicePlan | None = None
        self._buffers: SliceBuffers | None = None
        self._reads: list[Future[None]] = []

    def prepare(self) -> Room:
        owner, reader = self._owner, self._owner.reader
        self._plan = self._fetch.rows.plan(
            self._number, owner.schema, request_bytes_max=reader.request_bytes_max, gap_bytes_max=reader.gap_bytes_max
        )
        return Room(held=buffer_bytes(self._plan, owner.schema, expert_dtype=owner.expert_dtype), passing=self._plan.read.byte_count)

    def start(self) -> None:
        assert self._plan is not None
        owner, fetch = self._owner, self._fetch
        self._buffers = SliceBuffers(
            self._plan,
            owner.schema,
            step=fetch.rank.step * owner.parallel.data + fetch.rank.data_rank,
            expert_shards=owner.parallel.expert_shards,
            expert_dtype=owner.expert_dtype,
            empty=owner.memory.empty,
        )
        self._reads = owner.reader.submit(self._plan.read, self._buffers.out, step=fetch.rank.step, tally=fetch.read)

    def finish(self) -> PackedMicroBatch:
        assert self._plan is not None
        assert self._buffers is not None
        owner = self._owner
        if errors := owner.reader.collect(self._reads):
            raise errors[0]
        micro_batch = self._fetch.rank.micro_batches[self._number]
        owner.compare(self._fetch, micro_batch, self._plan)
        got, byte_count = self._buffers.finish(), self._plan.read.byte_count
        return rank_batch(
            micro_batch,
            got,
            owner.schema,
            expert_ids=owner.expert_ids,
            bytes_read=byte_count,
            targets_ahead=owner.parallel.targets_ahead,
        )
