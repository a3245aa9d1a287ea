"""Runs read plans: fetches byte ranges, checks and decodes them straight into the caller's buffers.

Owns retries and the fetch threads. Refuses policy and allocation of results: the caller's buffers are filled, nothing
is kept. Anything short, damaged or absent raises; a buffer whose plan failed must not be used. A thread that is stuck in a read is given up
at the deadline, with its buffers: whatever it writes later goes to memory that nobody uses.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from fsref.errors import BadRef, ObjectCorrupt, ObjectMissing, StoreError, StoreUnavailable
from fsref.plan import Overlap, ReadPlan, Request, SegmentRead, missing_ranges, plan_read, present_fields
from fsref.reader.buffers import Out, allocate, check_buffers, result, shifted
from fsref.reader.chunks import Placer
from fsref.refs import FieldData, PayloadRef, Schema, TokenRange, object_name
from fsref.refs.merge import same_rows
from fsref.store import ObjectFile, Store
from fsref.store.threads import Threads

REQUEST_BYTES_LOCAL: Final = 2 << 20
"""Ranged reads of 1-2 MiB are fastest on local files: the decoder finds the bytes in cache."""
REQUEST_BYTES_REMOTE: Final = 256 << 20
"""On networks one request per object where ranges touch."""
TASK_BYTES: Final = 8 << 20
GAP_BYTES_LOCAL: Final = 4 << 10
GAP_BYTES_REMOTE: Final = 64 << 10


def request_limits(store: Store) -> tuple[int, int]:
    """``request_bytes_max`` and ``gap_bytes_max`` of plans against this store."""
    if store.posix_path is not None:
        return REQUEST_BYTES_LOCAL, GAP_BYTES_LOCAL
    return REQUEST_BYTES_REMOTE, GAP_BYTES_REMOTE


@dataclass
class ReadCounters:
    """What a reader did; plain numbers that a metrics hook may copy."""

    requests: int = 0
    bytes_fetched: int = 0
    retries: int = 0
    abandoned: int = 0
    """Threads that were stuck in a read and given up."""
    conflicts: int = 0
    """Rows for which a later segment of a reference says otherwise than the one that counts."""


class _Task(NamedTuple):
    """A part of one segment's requests."""

    number: int
    segment: SegmentRead
    requests: tuple[Request, ...]
    out: Out


def _tasks(plan: ReadPlan, out: Out) -> Iterator[_Task]:
    for number, segment in enumerate(plan.segments):
        group: list[Request] = []
        size = 0
        for request in segment.requests:
            if group and size + request.size > TASK_BYTES:
                yield _Task(number, segment, tuple(group), out)
                group, size = [], 0
            group.append(request)
            size += request.size
        if group:
            yield _Task(number, segment, tuple(group), out)


class Reader:
    """Reads payloads of one schema from one store with its own bounded thread pool. A context manager; thread-safe."""

    def __init__(
        self,
        store: Store,
        schema: Schema,
        *,
        threads: int = 2,
        retries_max: int = 4,
        retry_s: float = 30.0,
        deadline_s: float = 120.0,
        abandon_s: float = 5.0,
    ) -> None:
        """``retries_max`` and ``retry_s`` bound the attempts of one read, ``deadline_s`` the wait for a plan, ``abandon_s`` that for
        threads at the end; all in ``[store]``. What a store retries itself is not retried here again.
        """
        self._store, self._schema = store, schema
        self._retries_max, self._retry_s, self._deadline_s, self._abandon_s = retries_max, retry_s, deadline_s, abandon_s
        self._pool = Threads(threads, name="fsref-fetch")
        self._placer = Placer(schema.codec)
        self._lock = threading.Lock()
        self.counters = ReadCounters()
        # What this store's plans are made with; whoever makes plans without ``plan`` passes them on.
        self.request_bytes_max, self.gap_bytes_max = request_limits(store)

    def plan(
        self, ref: PayloadRef, *, tokens: TokenRange | None = None, fields: Sequence[str] | None = None, layers: Sequence[int] | None = None
    ) -> ReadPlan:
        """``plan_read`` with this store's request sizes; all kept tokens and all fields by default."""
        return plan_read(
            ref,
            self._schema,
            tokens=TokenRange(0, ref.token_count) if tokens is None else tokens,
            fields=[f.name for f in self._schema.fields] if fields is None else fields,
            layers=layers,
            request_bytes_max=self.request_bytes_max,
            gap_bytes_max=self.gap_bytes_max,
        )

    def submit(self, plan: ReadPlan, out: Out) -> list[Future[None]]:
        """Starts a plan in the pool. Every field that the plan reads needs its buffers in ``out``.

        One future per object, or per ``TASK_BYTES`` of a larger one, so that one long sample also uses every thread. Raises
        ``PayloadError`` for a buffer whose dtype does not hold the stored one; dense rows may be read into a wider one.
        """
        check_buffers(plan, out)
        return [self._pool.submit(partial(self._run, task)) for task in _tasks(plan, out)]

    def collect(self, futures: Sequence[Future[None]]) -> list[Exception]:
        """Waits for what ``submit`` started, at most ``deadline_s`` seconds; returns the errors, none if all is filled.

        What is not done then is a ``StoreUnavailable``: its threads are given up, its buffers must not be used again.
        """
        late = wait_for(futures, self._deadline_s).not_done
        if late:
            given_up = self._pool.abandon(late, f"nothing came within {self._deadline_s:g} s")
            with self._lock:
                self.counters.abandoned += given_up
        return [e for f in futures if (e := _error(f)) is not None]

    def read_into(self, plan: ReadPlan, out: Out) -> None:
        """Runs a plan to its end in the pool. Raises the first ``StoreError``; the buffers must not be used then."""
        errors = self.collect(self.submit(plan, out))
        if errors:
            raise errors[0]

    def read(
        self, ref: PayloadRef, *, tokens: TokenRange | None = None, fields: Sequence[str] | None = None, layers: Sequence[int] | None = None
    ) -> dict[str, FieldData]:
        """The arrays themselves, allocated here: per field ``Dense`` or ``Ragged`` over the wanted tokens, with missing ranges in them.

        Fields that the payload does not hold are absent. Shapes: dense [n, *row_shape]; ragged counts [n] and columns [counts.sum()].
        Rows that several segments give are compared, and differences counted in ``counters.conflicts``.
        """
        wanted = TokenRange(0, ref.token_count) if tokens is None else tokens
        plan = self.plan(ref, tokens=wanted, fields=fields, layers=layers)
        held = set(present_fields(ref, self._schema))
        names = [f.name for f in self._schema.fields if f.name in held and (fields is None or f.name in fields)]
        out = {n: allocate(plan, self._schema, n, layers=layers) for n in names}
        self.read_into(plan, out)
        self.count_conflicts(ref, plan)
        gaps = missing_ranges(ref, self._schema)
        return {n: result(out[n], plan, self._schema.field(n), shifted(gaps.get(n, ()), wanted)) for n in names}

    def count_conflicts(self, ref: PayloadRef, plan: ReadPlan) -> int:
        """Rows of the plan's overlaps that the later segment gives differently, bit for bit; also added to ``counters``.

        Reads both sides' rows; does nothing for a reference whose segments do not overlap. Raises ``StoreError``.
        """
        found = 0
        for (name, first, later), group in groupby(sorted(plan.overlaps, key=_sides), key=_sides):
            ranges = [TokenRange(o.start, o.stop).clip(plan.tokens) for _, o in group]
            span = TokenRange(min(r.start for r in ranges), max(r.stop for r in ranges))
            ours, theirs = self._alone(ref, first, name, span), self._alone(ref, later, name, span)
            rows = np.concatenate([np.arange(r.start - span.start, r.stop - span.start) for r in ranges])
            found += int((~same_rows(ours, theirs, rows, rows)).sum())
        with self._lock:
            self.counters.conflicts += found
        return found

    def _alone(self, ref: PayloadRef, number: int, name: str, tokens: TokenRange) -> FieldData:
        """Rows of one segment, whatever the others say."""
        return self.read(msgspec.structs.replace(ref, segments=(ref.segments[number],)), tokens=tokens, fields=[name])[name]

    def close(self) -> None:
        """Lets running fetches end and stops the threads; one that is stuck is given up after ``abandon_s`` seconds."""
        given_up = self._pool.close(deadline_s=self._abandon_s)
        with self._lock:
            self.counters.abandoned += given_up

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, task: "_Task") -> None:
        segment = task.segment
        file = self._retry(lambda: self._open(segment), f"opening {segment.object_id}")
        try:
            for request in task.requests:
                self._retry(partial(self._read_request, file, request, task), f"reading {segment.object_id}")
        finally:
            file.close()

    def _open(self, segment: SegmentRead) -> ObjectFile:
        file = self._store.open(object_name(segment.object_id), byte_count=segment.byte_count)
        if file.byte_count != segment.byte_count:
            file.close()
            raise ObjectCorrupt(f"the object has {file.byte_count} bytes, its reference says {segment.byte_count}: truncated or replaced")
        return file

    def _read_request(self, file: ObjectFile, request: Request, task: "_Task") -> None:
        stored = self._placer.stored(request.size)
        file.read_into(request.offset, stored)
        with self._lock:
            self.counters.requests += 1
            self.counters.bytes_fetched += request.size
        self._placer.place(stored, request, task.segment, task.number, task.out)

    def _retry(self, work: Callable[[], Any], asked: str) -> Any:
        """Runs ``work`` again, with growing random waits, for errors that may heal: a network filesystem's late view, a flipped bit."""
        end = time.monotonic() + self._retry_s
        failures: list[StoreError] = []
        while True:
            try:
                return work()
            except (ObjectMissing, ObjectCorrupt, StoreUnavailable) as e:
                failures.append(e)
                same = sum(type(f) is type(e) for f in failures)
                wait_s = random.uniform(0.5, 1.0) * min(0.02 * 4 ** len(failures), 2.0)  # noqa: S311 - jitter, not a secret
                if same > self._retries_of(e) or time.monotonic() + wait_s > end:
                    raise type(e)(f"{asked}, given up after {len(failures)} attempt{'s' * (len(failures) > 1)}: {e}") from e
            with self._lock:
                self.counters.retries += 1
            time.sleep(wait_s)

    def _retries_of(self, error: StoreError) -> int:
        """Damage is looked at once more, in case the way was at fault; a store that retries by itself did so already."""
        if isinstance(error, ObjectCorrupt):
            return min(1, self._retries_max)
        if isinstance(error, StoreUnavailable) and self._store.retries_itself:
            return 0
        return self._retries_max


def _error(future: Future[None]) -> Exception | None:
    """Why the work of a future that is over failed; None if it did not."""
    if future.cancelled():
        return StoreUnavailable("the fetch was given up before it began")
    error = future.exception()
    assert error is None or isinstance(error, Exception)
    return error


def _sides(overlap: tuple[str, Overlap]) -> tuple[str, int, int]:
    return overlap[0], overlap[1].first, overlap[1].later


def failure_kind(error: StoreError | BadRef) -> str:
    """``missing``, ``corrupt`` or ``unavailable``: how metrics and messages tell failed fetches apart."""
    if isinstance(error, ObjectMissing):
        return "missing"
    return "corrupt" if isinstance(error, ObjectCorrupt | BadRef) else "unavailable"
