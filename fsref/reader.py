"""Runs read plans: fetches byte ranges, checks and decodes them straight into the caller's buffers.

Owns retries, scratch memory and the fetch threads. Refuses policy and allocation of results: the caller's buffers are filled, nothing
is kept. Anything short, damaged or absent raises; a buffer whose plan failed must not be used. A thread that is stuck in a read is given up
at the deadline, with its buffers: whatever it writes later goes to memory that nobody uses.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fsref.errors import BadRef, ObjectCorrupt, ObjectMissing, PayloadError, StoreError, StoreUnavailable
from fsref.objects import decode_chunk
from fsref.plan import ChunkRead, FieldRead, Overlap, ReadPlan, Request, SegmentRead, missing_ranges, plan_read, present_fields
from fsref.refs import Codec, Dense, Field, FieldData, PayloadRef, Ragged, Schema, TokenRange, object_name
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


@dataclass
class DenseOut:
    """Where a dense field goes: ``rows`` [n, *row_shape] (the layer axis cut to the planned layers), C-contiguous along tokens."""

    rows: NDArray[Any]


@dataclass
class RaggedOut:
    """Where a ragged field goes.

    ``counts`` int32 [n] and ``row_columns`` (one array [n] per row column) are filled, 0 where nothing is known. Each column needs room for
    ``values_max`` values (the sum over the plan's reads); the wanted values of each read stand at ``pieces`` once the plan ran, and
    ``compact`` moves them together.
    """

    counts: NDArray[np.int32]
    columns: Mapping[str, NDArray[Any]]
    row_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    leads: dict[tuple[int, int], int] = field(default_factory=dict)

    def pieces(self, plan: ReadPlan, name: str) -> list[slice]:
        """Per read of the field, in the order of rows: the slice of the column buffers that belongs to the wanted rows."""
        out = []
        for segment, number, read in plan.reads(name):
            start = read.value_base + self.leads.get((segment, number), 0)
            count = int(self.counts[read.out_start : read.out_start + len(read.rows)].sum(dtype=np.int64))
            out.append(slice(start, start + count))
        return out

    def compact(self, plan: ReadPlan, name: str) -> int:
        """Moves the wanted values to the front of every column; returns how many there are."""
        at = 0
        for piece in self.pieces(plan, name):
            size = piece.stop - piece.start
            if piece.start != at:
                for column in self.columns.values():
                    column[at : at + size] = column[piece].copy()
            at += size
        return at


Out = Mapping[str, DenseOut | RaggedOut]


def request_limits(store: Store) -> tuple[int, int]:
    """``request_bytes_max`` and ``gap_bytes_max`` of plans against this store."""
    if store.posix_path is not None:
        return REQUEST_BYTES_LOCAL, GAP_BYTES_LOCAL
    return REQUEST_BYTES_REMOTE, GAP_BYTES_REMOTE


def values_max(plan: ReadPlan, name: str) -> int:
    """Room that each column of a ragged field needs for this plan."""
    return sum(r.values_max for s in plan.segments for r in s.fields if r.field.name == name)


@dataclass
class _Scratch(threading.local):
    """One thread's reusable memory; grows to the largest request and chunk that the thread saw."""

    stored: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    decoded: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    held: int = -1
    """Offset in the request under way of the chunk that ``decoded`` holds; -1 for none."""

    def take_stored(self, size: int) -> NDArray[np.uint8]:
        if len(self.stored) < size:
            self.stored = np.empty(size + size // 4, np.uint8)
        return self.stored[:size]

    def take_decoded(self, size: int) -> NDArray[np.uint8]:
        if len(self.decoded) < size:
            self.decoded = np.empty(size + size // 4, np.uint8)
        return self.decoded[:size]


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
        self._scratch = _Scratch()
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
        _check_buffers(plan, out)
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
        return {n: _result(out[n], plan, self._schema.field(n), _shifted(gaps.get(n, ()), wanted)) for n in names}

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
        stored = self._scratch.take_stored(request.size)
        file.read_into(request.offset, stored)
        self._scratch.held = -1
        with self._lock:
            self.counters.requests += 1
            self.counters.bytes_fetched += request.size
        for chunk in request.chunks:
            read = task.segment.fields[chunk.field]
            target = task.out[read.field.name]
            packed = stored[chunk.offset : chunk.offset + chunk.size]
            try:
                if isinstance(target, DenseOut):
                    self._dense(packed, chunk, read, target)
                elif chunk.flat:
                    self._values(packed, chunk, read, target.columns[chunk.column])
                elif chunk.column == "counts":
                    self._counts(packed, chunk, read, target, task.number)
                elif chunk.column in target.row_columns:
                    self._per_token(packed, chunk, read, target.row_columns[chunk.column])
            except ObjectCorrupt as e:
                raise ObjectCorrupt(f"field {read.field.name!r} rows {chunk.start}..{chunk.stop}: {e}") from e

    @property
    def _codec(self) -> Codec:
        return self._schema.codec

    def _unpacked(self, packed: NDArray[np.uint8], chunk: ChunkRead) -> NDArray[np.uint8]:
        """The chunk in this thread's scratch, where it may stand already: two ranges of a zigzag often want rows of one chunk."""
        decoded = self._scratch.take_decoded(chunk.nbytes)
        if self._scratch.held != chunk.offset:
            decode_chunk(packed, decoded, self._codec)
            self._scratch.held = chunk.offset
        return decoded

    def _dense(self, packed: NDArray[np.uint8], chunk: ChunkRead, read: FieldRead, out: DenseOut) -> None:
        start, stop = max(chunk.start, read.rows.start), min(chunk.stop, read.rows.stop)
        at = read.out_start + start - read.rows.start
        target = out.rows[at : at + (stop - start if read.copies == 1 else read.copies)]
        shape = read.field.row_shape
        whole_rows = (
            read.copies == 1
            and target.dtype == read.field.dtype
            and (not read.field.layers_per_chunk or read.field.layers_per_chunk == shape[0])
        )
        if whole_rows and not read.layers and target.nbytes == chunk.nbytes and target.flags.c_contiguous:
            decode_chunk(packed, target, self._codec)
            return
        decoded = self._unpacked(packed, chunk)
        rows = _as_rows(decoded, read)
        wanted = rows[start - chunk.start : stop - chunk.start]
        if not shape:
            target[...] = wanted
            return
        width = rows.shape[1]
        if read.layers:
            pairs = [(n, p - chunk.layer) for n, p in enumerate(read.layers) if chunk.layer <= p < chunk.layer + width]
            for n, p in pairs:
                target[:, n] = wanted[:, p]
            return
        width = min(width, shape[0] - chunk.layer)
        target[:, chunk.layer : chunk.layer + width] = wanted[:, :width]

    def _counts(self, packed: NDArray[np.uint8], chunk: ChunkRead, read: FieldRead, out: RaggedOut, number: int) -> None:
        counts = self._per_token(packed, chunk, read, out.counts)
        if chunk.start == read.count_lead.start:
            lead = counts[: read.count_lead.stop - chunk.start]
            out.leads[number, chunk.field] = int(lead.sum(dtype=np.int64))

    def _per_token(self, packed: NDArray[np.uint8], chunk: ChunkRead, read: FieldRead, out: NDArray[Any]) -> NDArray[Any]:
        """Counts or flags of the wanted rows; returns those of the whole chunk."""
        decoded = self._unpacked(packed, chunk)
        values = decoded.view(out.dtype)
        start, stop = max(chunk.start, read.rows.start), min(chunk.stop, read.rows.stop)
        at = read.out_start + start - read.rows.start
        out[at : at + stop - start] = values[start - chunk.start : stop - chunk.start]
        return values

    def _values(self, packed: NDArray[np.uint8], chunk: ChunkRead, read: FieldRead, column: NDArray[Any]) -> None:
        start, stop = max(chunk.start, read.value_first), min(chunk.stop, read.value_first + read.values_max)
        at = read.value_base + start - read.value_first
        target = column[at : at + stop - start]
        if target.nbytes == chunk.nbytes and target.flags.c_contiguous:
            decode_chunk(packed, target, self._codec)
            return
        decoded = self._unpacked(packed, chunk)
        target[:] = decoded.view(column.dtype)[start - chunk.start : stop - chunk.start]

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


def _as_rows(decoded: NDArray[np.uint8], read: FieldRead) -> NDArray[Any]:
    """A decoded dense chunk as [rows, layers of the chunk, ...]."""
    dtype, shape = np.dtype(read.field.dtype), read.field.row_shape
    flat = decoded.view(dtype)
    if not shape:
        return flat
    layers = read.field.layers_per_chunk or shape[0]
    return flat.reshape(-1, layers, *shape[1:])


def _sides(overlap: tuple[str, Overlap]) -> tuple[str, int, int]:
    return overlap[0], overlap[1].first, overlap[1].later


def _check_buffers(plan: ReadPlan, out: Out) -> None:
    for segment in plan.segments:
        for read in segment.fields:
            target = out[read.field.name]
            if isinstance(target, DenseOut):
                if target.rows.dtype != read.field.dtype and not np.can_cast(read.field.dtype, target.rows.dtype, "safe"):
                    raise PayloadError(f"field {read.field.name!r}: a buffer of {target.rows.dtype} cannot hold {read.field.dtype}")
                continue
            target.counts[:] = 0
            wanted = {c.name: c.dtype for c in read.field.columns}
            if any(column.dtype != wanted.get(name) for name, column in target.columns.items()):
                raise PayloadError(f"field {read.field.name!r}: columns are {wanted}; buffers of other dtypes were given")


def allocate(plan: ReadPlan, schema: Schema, name: str, *, layers: Sequence[int] | None = None) -> DenseOut | RaggedOut:
    """Fresh buffers for one field of a plan."""
    f = schema.field(name)
    tokens = len(plan.tokens)
    if f.ragged:
        room = values_max(plan, name)
        columns = {c.name: np.empty(room, c.dtype) for c in f.columns}
        return RaggedOut(np.zeros(tokens, np.int32), columns, {c.name: np.zeros(tokens, c.dtype) for c in f.row_columns})
    shape = f.row_shape
    if layers is not None and f.layer_ids:
        shape = (len(layers), *shape[1:])
    return DenseOut(np.empty((tokens, *shape), f.dtype))


def _result(out: DenseOut | RaggedOut, plan: ReadPlan, spec: Field, missing: tuple[TokenRange, ...]) -> FieldData:
    if isinstance(out, DenseOut):
        return Dense(out.rows, missing, spec.id_space)
    count = out.compact(plan, spec.name)
    return Ragged(out.counts, {n: c[:count] for n, c in out.columns.items()}, missing, out.row_columns)


def _shifted(ranges: Sequence[TokenRange], wanted: TokenRange) -> tuple[TokenRange, ...]:
    clipped = (r.clip(wanted) for r in ranges)
    return tuple(TokenRange(r.start - wanted.start, r.stop - wanted.start) for r in clipped if len(r))


def failure_kind(error: StoreError | BadRef) -> str:
    """``missing``, ``corrupt`` or ``unavailable``: how metrics and messages tell failed fetches apart."""
    if isinstance(error, ObjectMissing):
        return "missing"
    return "corrupt" if isinstance(error, ObjectCorrupt | BadRef) else "unavailable"
