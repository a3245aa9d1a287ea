"""Fetched chunks to their places in the caller's buffers: checked, decoded straight there where they fit whole, else by scratch memory.

Owns scratch memory, one per thread. Refuses I/O: bytes are given.
"""

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsref.errors import ObjectCorrupt
from fsref.objects import CRC_BYTES, ChunkJob, Cut, Fetch, Fetched, Memory, decode_chunk, fetch, unpack
from fsref.plan import ChunkRead, FieldRead, Request, SegmentRead
from fsref.reader.buffers import DenseOut, Out, RaggedOut
from fsref.refs import Codec


class Band(NamedTuple):
    """Layers side by side that a read wants of chunks that hold others too, or not all of them."""

    pitch: int
    """Bytes of a row in a chunk."""
    layer_bytes: int
    chunk_layers: int
    start: int
    stop: int
    """Positions on the layer axis."""


class Spot(NamedTuple):
    """Where the rows or values of one column go that a read wants, if they go there just as they stand in chunks."""

    memory: Memory
    item_bytes: int
    shift: int
    """From a row (value) of the object to its place among the buffer's."""
    start: int
    stop: int
    """Wanted rows (values) of the object."""
    lead: bool
    """Whether what stands in a chunk before the wanted rows must be seen too, as counts must."""
    value_bytes: int
    """Of a single value: what bitshuffle takes at once, or less."""
    band: Band | None = None
    """What of each row a chunk gives, where it is not all of it."""


Spots = Mapping[tuple[int, str], Spot]
"""By index among a segment's fields and column."""


class Destination(NamedTuple):
    """Where a segment's chunks go."""

    segment: SegmentRead
    number: int
    """The segment's place in its plan."""
    out: Out
    spots: Spots

    @classmethod
    def of(cls, segment: SegmentRead, number: int, out: Out) -> "Destination":
        """With the spots of every column whose rows or values stand in chunks as they are wanted."""
        return cls(segment, number, out, _spots(segment, out))


def _spots(segment: SegmentRead, out: Out) -> Spots:
    found: dict[tuple[int, str], Spot] = {}
    for n, read in enumerate(segment.fields):
        target, rows = out[read.field.name], read.rows
        if isinstance(target, DenseOut):
            if (spot := _dense_spot(read, target.rows)) is not None:
                found[n, ""] = spot
            continue
        for column, values in (("counts", target.counts), *target.row_columns.items()):
            if values.flags.c_contiguous:
                found[n, column] = _spot(values, read.out_start - rows.start, rows.start, rows.stop, lead=column == "counts")
        first, shift = read.value_first, read.value_base - read.value_first
        for column, values in target.columns.items():
            if values.flags.c_contiguous:
                found[n, column] = _spot(values, shift, first, first + read.values_max)
    return found


def _dense_spot(read: FieldRead, rows: NDArray[Any]) -> Spot | None:
    """None for a dense field of which another form is wanted, or layers that do not lie side by side."""
    shape = read.field.row_shape
    layers = read.layers or tuple(range(shape[0] if shape else 0))
    if read.copies != 1 or rows.dtype != read.field.dtype or not rows.flags.c_contiguous:
        return None
    if rows.shape[1:] != ((len(layers), *shape[1:]) if shape else ()) or layers != tuple(
        range(layers[0], layers[-1] + 1) if layers else ()
    ):
        return None
    spot = _spot(rows, read.out_start - read.rows.start, read.rows.start, read.rows.stop)
    if not shape or (len(layers) == shape[0] and read.field.layers_per_chunk in (0, shape[0])):
        return spot
    chunk_layers = read.field.layers_per_chunk or shape[0]
    layer_bytes = rows.dtype.itemsize * math.prod(shape[1:])
    return spot._replace(band=Band(chunk_layers * layer_bytes, layer_bytes, chunk_layers, layers[0], layers[-1] + 1))


def _spot(values: NDArray[Any], shift: int, start: int, stop: int, *, lead: bool = False) -> Spot:
    value_bytes = values.dtype.itemsize
    return Spot(Memory(values), value_bytes * math.prod(values.shape[1:]), shift, start, stop, lead, value_bytes)


class Sorted(NamedTuple):
    """A request's chunks by the way they go."""

    jobs: Sequence[ChunkJob]
    """Of which a run of bytes, or the same part of every row, is wanted just as it stands: straight to their places."""
    numbers: Sequence[int]
    """Of ``jobs``, among the request's chunks."""
    others: Sequence[ChunkRead]
    """Of which layers are wanted that do not lie side by side, or another form, or something by several reads."""


def sort_chunks(request: Request, spots: Spots) -> Sorted:
    """Which of a request's chunks go straight to their places; the others go through scratch memory."""
    jobs: list[ChunkJob] = []
    numbers: list[int] = []
    others: list[ChunkRead] = []
    shared = () if once_each(request) else {offset for offset, count in Counter(c.offset for c in request.chunks).items() if count > 1}
    for n, chunk in enumerate(request.chunks):
        offset, size, nbytes, number, column, _, first, last, layer = chunk
        spot = spots.get((number, column))
        if spot is not None and offset not in shared:
            memory, item, shift, start, stop, lead, _, band = spot
            begin, end = max(first, start), min(last, stop)
            if begin == first or not lead:
                at = (begin + shift) * item
                if band is None:
                    jobs.append(ChunkJob(offset, size, nbytes, (begin - first) * item, (end - begin) * item, memory, at))
                else:
                    cut, left = _cut(band, layer, item)
                    run = ((begin - first) * cut.pitch, (end - begin) * cut.pitch)
                    jobs.append(ChunkJob(offset, size, nbytes, *run, memory, at + left, cut))
                numbers.append(n)
                continue
        others.append(chunk)
    return Sorted(jobs, numbers, others)


def _cut(band: Band, layer: int, stride: int) -> tuple[Cut, int]:
    """What a chunk whose first layer is ``layer`` gives of each row, and where in the row's place it goes."""
    start, stop = max(band.start, layer), min(band.stop, layer + band.chunk_layers)
    cut = Cut(band.pitch, (start - layer) * band.layer_bytes, (stop - start) * band.layer_bytes, stride)
    return cut, (start - band.start) * band.layer_bytes


def once_each(request: Request) -> bool:
    """Whether no chunk of a request is wanted by several reads."""
    return len({c.offset for c in request.chunks}) == len(request.chunks)


def can_scatter(chunks: Sorted) -> bool:
    """Whether a read may go straight to the places of whole chunks, which are stored as they are."""
    return all(j.size == j.nbytes + CRC_BYTES for j in chunks.jobs)


def scattered(stored: NDArray[np.uint8], request: Request, chunks: Sorted) -> list[NDArray[np.uint8]]:
    """Where a request's bytes go, in order: whole chunks to their places, everything else to its own offset in ``stored``."""
    outs: list[NDArray[np.uint8]] = []
    done = 0
    for job in chunks.jobs:
        if job.whole:
            outs += [stored[done : job.offset], job.out.bytes[job.at : job.at + job.nbytes]]
            done = job.offset + job.nbytes
    return [*outs, stored[done : request.size]]


@dataclass
class Scratch(threading.local):
    """One thread's reusable memory; grows to the largest request and chunk that the thread saw."""

    memory: Memory = field(default_factory=lambda: Memory(np.empty(0, np.uint8)))
    decoded: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    held: int = -1
    """Offset in the request under way of the chunk that ``decoded`` holds; -1 for none."""

    def take_stored(self, size: int) -> Memory:
        """Of at least ``size`` bytes."""
        if len(self.memory.bytes) < size:
            self.memory = Memory(np.empty(size + size // 4, np.uint8))
        return self.memory

    def take_decoded(self, size: int) -> NDArray[np.uint8]:
        if len(self.decoded) < size:
            self.decoded = np.empty(size + size // 4, np.uint8)
        return self.decoded[:size]


class Placer:
    """Decodes the chunks of requests. Thread-safe: each thread has its own scratch memory."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._scratch = Scratch()

    def stored(self, size: int) -> NDArray[np.uint8]:
        """This thread's memory for a request's bytes, [size]; what was in it before is lost."""
        return self._scratch.take_stored(size).bytes[:size]

    def fetch(self, fd: int, reads: Sequence[Fetch]) -> Fetched:
        """``objects.fetch`` with this thread's memory."""
        return fetch(fd, reads, self._scratch.take_stored(max(r.size for r in reads)), self._codec)

    def place(self, stored: NDArray[np.uint8], request: Request, chunks: Sorted, to: Destination, *, placed: bool = False) -> None:
        """Decodes all chunks of a request, whose bytes are ``stored``, into their buffers.

        ``placed``: the whole ones stand in their places already and are only checked. Raises ``ObjectCorrupt`` that names field and rows;
        may be called again with other bytes then.
        """
        failed = unpack(stored, chunks.jobs, self._codec, placed=placed)
        if failed is not None:
            raise _damage(request.chunks[chunks.numbers[failed[0]]], to.segment, failed[1])
        self._scratch.held = -1
        for chunk in chunks.others:
            read = to.segment.fields[chunk.field]
            target = to.out[read.field.name]
            packed = stored[chunk.offset : chunk.offset + chunk.size]
            try:
                if isinstance(target, DenseOut):
                    self._dense(packed, chunk, read, target)
                elif chunk.flat:
                    self._values(packed, chunk, read, target.columns[chunk.column])
                elif chunk.column == "counts":
                    self._counts(packed, chunk, read, target, to.number)
                elif chunk.column in target.row_columns:
                    self._per_token(packed, chunk, read, target.row_columns[chunk.column])
            except ObjectCorrupt as e:
                raise _damage(chunk, to.segment, str(e)) from e

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
        decoded = self._unpacked(packed, chunk)
        target[:] = decoded.view(column.dtype)[start - chunk.start : stop - chunk.start]


def _as_rows(decoded: NDArray[np.uint8], read: FieldRead) -> NDArray[Any]:
    """A decoded dense chunk as [rows, layers of the chunk, ...]."""
    dtype, shape = np.dtype(read.field.dtype), read.field.row_shape
    flat = decoded.view(dtype)
    if not shape:
        return flat
    layers = read.field.layers_per_chunk or shape[0]
    return flat.reshape(-1, layers, *shape[1:])


def _damage(chunk: ChunkRead, segment: SegmentRead, reason: str) -> ObjectCorrupt:
    return ObjectCorrupt(f"field {segment.fields[chunk.field].field.name!r} rows {chunk.start}..{chunk.stop}: {reason}")
