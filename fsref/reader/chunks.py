"""One fetched chunk to its place in the caller's buffers: checked, decoded straight there where it fits whole, else through scratch memory.

Owns scratch memory, one per thread. Refuses I/O: bytes are given.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsref.errors import ObjectCorrupt
from fsref.objects import CRC_BYTES, check_chunk, decode_chunk
from fsref.plan import ChunkRead, FieldRead, Request, SegmentRead
from fsref.reader.buffers import DenseOut, Out, RaggedOut
from fsref.refs import Codec

Direct = Mapping[int, NDArray[np.uint8]]
"""Position in a request's chunks to the place of the chunk's bytes."""


@dataclass
class Scratch(threading.local):
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


def scattered(stored: NDArray[np.uint8], request: Request, direct: Direct) -> list[NDArray[np.uint8]]:
    """Where a request's bytes go, in order: ``direct`` chunks to their places, everything else to its own offset in ``stored``."""
    outs: list[NDArray[np.uint8]] = []
    at = 0
    for n, place in sorted(direct.items(), key=lambda item: request.chunks[item[0]].offset):
        start = request.chunks[n].offset
        outs += [stored[at:start], place]
        at = start + len(place)
    return [*outs, stored[at : request.size]]


class Placer:
    """Decodes the chunks of requests. Thread-safe: each thread has its own scratch memory."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._scratch = Scratch()

    def stored(self, size: int) -> NDArray[np.uint8]:
        """This thread's memory for a request's bytes, [size]; what was in it before is lost."""
        return self._scratch.take_stored(size)

    def direct(self, request: Request, segment: SegmentRead, out: Out) -> Direct:
        """The chunks of a request that are stored as they are and fit their place whole, so that a read can go there and no copy is made.

        By their position in the request. None of a codec that packs, and none where a chunk is wanted twice.
        """
        if self._codec.name != "none" or len({c.offset for c in request.chunks}) < len(request.chunks):
            return {}
        found: dict[int, NDArray[np.uint8]] = {}
        for n, chunk in enumerate(request.chunks):
            place = _whole(chunk, segment.fields[chunk.field], out)
            if place is not None and chunk.size == chunk.nbytes + CRC_BYTES:
                found[n] = place.reshape(-1).view(np.uint8)
        return found

    def place(
        self,
        stored: NDArray[np.uint8],
        request: Request,
        segment: SegmentRead,
        number: int,
        out: Out,
        *,
        direct: Direct = MappingProxyType({}),
    ) -> None:
        """Decodes all chunks of a request, whose bytes are ``stored``, into ``out``. ``number``: the segment's place in its plan.

        ``direct``: chunks that stand in their places already and are only checked. Raises ``ObjectCorrupt`` that names field and rows; may
        be called again with other bytes then.
        """
        self._scratch.held = -1
        for n, chunk in enumerate(request.chunks):
            read = segment.fields[chunk.field]
            target = out[read.field.name]
            packed = stored[chunk.offset : chunk.offset + chunk.size]
            try:
                if n in direct:
                    check_chunk(direct[n], packed[chunk.nbytes :])
                elif isinstance(target, DenseOut):
                    self._dense(packed, chunk, read, target)
                elif chunk.flat:
                    self._values(packed, chunk, read, target.columns[chunk.column])
                elif chunk.column == "counts":
                    self._counts(packed, chunk, read, target, number)
                elif chunk.column in target.row_columns:
                    self._per_token(packed, chunk, read, target.row_columns[chunk.column])
            except ObjectCorrupt as e:
                raise ObjectCorrupt(f"field {read.field.name!r} rows {chunk.start}..{chunk.stop}: {e}") from e

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
        if _is_whole(chunk, read, target):
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


def _as_rows(decoded: NDArray[np.uint8], read: FieldRead) -> NDArray[Any]:
    """A decoded dense chunk as [rows, layers of the chunk, ...]."""
    dtype, shape = np.dtype(read.field.dtype), read.field.row_shape
    flat = decoded.view(dtype)
    if not shape:
        return flat
    layers = read.field.layers_per_chunk or shape[0]
    return flat.reshape(-1, layers, *shape[1:])


def _is_whole(chunk: ChunkRead, read: FieldRead, target: NDArray[Any]) -> bool:
    """Whether a dense chunk's bytes are exactly those of ``target``, its rows in the caller's buffer."""
    shape = read.field.row_shape
    return (
        read.copies == 1
        and not read.layers
        and target.dtype == read.field.dtype
        and (not read.field.layers_per_chunk or read.field.layers_per_chunk == shape[0])
        and target.nbytes == chunk.nbytes
        and target.flags.c_contiguous
    )


def _whole(chunk: ChunkRead, read: FieldRead, out: Out) -> NDArray[Any] | None:
    """The place of a chunk that fits it whole, of rows or of values."""
    target = out[read.field.name]
    if isinstance(target, DenseOut):
        start, stop = max(chunk.start, read.rows.start), min(chunk.stop, read.rows.stop)
        at = read.out_start + start - read.rows.start
        rows = target.rows[at : at + stop - start]
        return rows if _is_whole(chunk, read, rows) else None
    if not chunk.flat:
        return None
    start, stop = max(chunk.start, read.value_first), min(chunk.stop, read.value_first + read.values_max)
    at = read.value_base + start - read.value_first
    values = target.columns[chunk.column][at : at + stop - start]
    return values if values.nbytes == chunk.nbytes and values.flags.c_contiguous else None
