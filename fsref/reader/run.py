"""Runs read plans: fetches byte ranges, checks and decodes them straight into the caller's buffers.

Owns retries and the fetch threads. Refuses policy and allocation of results: the caller's buffers are filled, nothing
is kept. Anything short, damaged or absent raises; a buffer whose plan failed must not be used. A thread that is stuck in a read is given up
at the deadline, with its buffers: whatever it writes later goes to memory that nobody uses.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from itertools import groupby
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from fsref.errors import BadRef, ObjectCorrupt, ObjectMissing, StoreError, StoreUnavailable
from fsref.nodecache import NodeCache
from fsref.objects import Fetch, can_fetch
from fsref.plan import Overlap, ReadPlan, Request, missing_ranges, plan_read, present_fields
from fsref.reader.buffers import Out, allocate, check_buffers, result, shifted
from fsref.reader.chunks import Placer, can_scatter, scattered, sort_chunks
from fsref.reader.source import Source, spans
from fsref.reader.tasks import ReadCounters, Task, cut, request_limits
from fsref.refs import FieldData, PayloadRef, Schema, TokenRange
from fsref.refs.merge import same_rows
from fsref.store import Store
from fsref.store.threads import Threads

HAND_OVER_S: Final = 50e-6
HAND_OVER_BYTES: Final = 2 << 20
"""For so long a thread that submits lets go of the interpreter after a plan of so many bytes or more: the pool's threads, which wake up in
that time, get it else only after the interpreter's switch interval (5 ms) or when all plans are made. It saves 5 to 15 % of a fetch of
samples of 2,048 to 16,384 tokens; with smaller ones it would cost more than it gives."""


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
        cache: NodeCache | None = None,
    ) -> None:
        """``retries_max`` and ``retry_s`` bound the attempts of one read, ``deadline_s`` the wait for a plan, ``abandon_s`` that for
        threads at the end; all in ``[store]``. What a store retries itself is not retried here again. ``cache``: what the ranks of this
        node fetch once for all of them; the caller closes it, after the reader.
        """
        self._store, self._schema = store, schema
        self._retries_max, self._retry_s, self._deadline_s, self._abandon_s = retries_max, retry_s, deadline_s, abandon_s
        self._pool = Threads(threads, name="fsref-fetch")
        self._placer = Placer(schema.codec)
        self._cache = cache
        # Reads that go straight to the places of chunks: a local file's; a cache and a network client have buffers of their own.
        self._direct = schema.codec.name == "none" and store.posix_path is not None and cache is None
        # A network client's buffers are decoded from as they are.
        self._views = store.posix_path is None and cache is None
        # Local files are read and decoded many requests at once.
        self._at_once = can_fetch(schema.codec) and store.posix_path is not None and cache is None
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

    def submit(self, plan: ReadPlan, out: Out, *, step: int = 0, tally: ReadCounters | None = None) -> list[Future[None]]:
        """Starts a plan in the pool. Every field that the plan reads needs its buffers in ``out``.

        One future per object, or per ``TASK_BYTES`` of a larger one, so that one long sample also uses every thread. ``step``: the training
        step that it is for; work of earlier steps goes first, whenever it came. ``tally``: also counts what this plan does, beside
        ``counters``. Raises ``PayloadError`` for a buffer whose dtype does not hold the stored one; dense rows may be read into a wider
        one.
        """
        futures = self._start(plan, out, step, ReadCounters() if tally is None else tally)
        if plan.byte_count >= HAND_OVER_BYTES:
            time.sleep(HAND_OVER_S)
        return futures

    def _start(self, plan: ReadPlan, out: Out, step: int, tally: ReadCounters) -> list[Future[None]]:
        check_buffers(plan, out)
        tasks = list(cut(plan, out, step, tally))
        if self._cache is not None and tasks:
            # Ranks that want the same begin at different places: each fetches a part, and finds the others' when it comes to them.
            first = self._cache.member * len(tasks) // max(1, self._cache.member_count) % len(tasks)
            tasks = tasks[first:] + tasks[:first]
        return [self._pool.submit(partial(self._run, task), priority=step) for task in tasks]

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
        errors = self.collect(self._start(plan, out, 0, ReadCounters()))
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

    def _run(self, task: Task) -> None:
        with Source(self._store, task.to.segment) as source:
            for request in self._run_at_once(source, task) if self._at_once else task.requests:
                self._retry(partial(self._read_request, source, request, task), f"reading {task.to.segment.object_id}", task)

    def _run_at_once(self, source: Source, task: Task) -> Sequence[Request]:
        """Does all that goes without a look at the errors, without coming back to Python in between; returns the requests that are left."""
        reads: list[Fetch] = []
        fetched: list[Request] = []
        left: list[Request] = []
        wide = {place for place, spot in task.to.spots.items() if not can_fetch(self._schema.codec, spot.value_bytes)}
        for request in task.requests:
            chunks = sort_chunks(request, task.to.spots)
            if chunks.others or (wide and any((c.field, c.column) in wide for c in request.chunks)):
                left.append(request)
            else:
                reads.append(Fetch(request.offset, request.size, chunks.jobs))
                fetched.append(request)
        if reads:
            self._retry(source.open, f"opening {task.to.segment.object_id}", task)
        if source.descriptor is None:
            return task.requests
        found = self._placer.fetch(source.descriptor, reads)
        size = sum(r.size for r in reads[: found.read])
        self._count(task, requests=found.read, bytes_fetched=size, retries=int(found.failed))
        return [*fetched[found.done :], *left]

    def _read_request(self, source: Source, request: Request, task: Task) -> None:
        chunks = sort_chunks(request, task.to.spots)
        try:
            if self._views:
                stored = source.read_view(request, self._placer.stored)
                self._count(task, requests=1, bytes_fetched=request.size)
                self._placer.place(stored, request, chunks, task.to)
                return
            stored = self._placer.stored(request.size)
            placed = self._direct and can_scatter(chunks)
            shared = self._load(source, request, task, scattered(stored, request, chunks) if placed else [stored], stored)
            try:
                self._placer.place(stored, request, chunks, task.to, placed=placed)
            except ObjectCorrupt:
                if self._cache is None:
                    raise
                self._cache.discard(task.to.segment.object_id, spans(request))
                if not shared:
                    raise
                source.read_into(request.offset, [stored])
                self._count(task, requests=1, bytes_fetched=request.size)
                self._placer.place(stored, request, chunks, task.to)
        except StoreError:
            source.close()  # a handle may be what is wrong: the next attempt opens the object anew
            raise

    def _load(self, source: Source, request: Request, task: Task, outs: Sequence[NDArray[np.uint8]], stored: NDArray[np.uint8]) -> bool:
        """Fills ``outs`` (with a cache: ``stored``) with the request's bytes; whether any were fetched by another rank, or before."""
        if self._cache is None:
            source.read_into(request.offset, outs)
            self._count(task, requests=1, bytes_fetched=request.size)
            return False

        def fetch(start: int, stop: int) -> None:
            source.read_into(request.offset + start, [stored[start:stop]])
            self._count(task, requests=1, bytes_fetched=stop - start)

        return self._cache.fill(task.to.segment.object_id, spans(request), stored, fetch, step=task.step) > 0

    def _count(self, task: Task, *, requests: int = 0, bytes_fetched: int = 0, retries: int = 0) -> None:
        with self._lock:
            for counters in (self.counters, task.tally):
                counters.requests += requests
                counters.bytes_fetched += bytes_fetched
                counters.retries += retries

    def _retry(self, work: Callable[[], None], asked: str, task: Task) -> None:
        """Runs ``work`` again, with growing random waits, for errors that may heal: a network filesystem's late view, a flipped bit."""
        end = time.monotonic() + self._retry_s
        failures: list[StoreError] = []
        while True:
            try:
                work()
            except (ObjectMissing, ObjectCorrupt, StoreUnavailable) as e:
                failures.append(e)
                same = sum(type(f) is type(e) for f in failures)
                wait_s = random.uniform(0.5, 1.0) * min(0.02 * 4 ** len(failures), 2.0)  # noqa: S311 - jitter, not a secret
                if same > self._retries_of(e) or time.monotonic() + wait_s > end:
                    raise type(e)(f"{asked}, given up after {len(failures)} attempt{'s' * (len(failures) > 1)}: {e}") from e
            else:
                return
            self._count(task, retries=1)
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
