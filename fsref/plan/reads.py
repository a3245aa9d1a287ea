"""Read plans: which byte ranges of which objects hold the wanted tokens, fields and layers, and where the decoded bytes go.

A plan is plain data. Ragged values are planned by whole token ranges (their exact bounds are in ``counts``, which come in the same
requests); ``FieldRead.values_max`` is the room that they need, and a reader says how many leading values to skip.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fsref.errors import BadRef
from fsref.plan.index import check_schema, decode_index
from fsref.plan.layout import Chunk, Layout
from fsref.refs import Field, PayloadRef, Schema, Segment, TokenRange


class ChunkRead(NamedTuple):
    """One chunk inside a request."""

    offset: int
    """From the request's first byte."""
    size: int
    """Stored bytes, crc included."""
    nbytes: int
    """Decoded bytes."""
    field: int
    """Index into ``ReadPlan.fields``."""
    column: str
    """``""`` dense, ``counts``, or a column name."""
    start: int
    stop: int
    """Rows (flat values) of the object that it holds."""
    layer: int
    """First layer position that it holds."""


class Request(NamedTuple):
    """One ranged read and the chunks in it."""

    offset: int
    size: int
    chunks: tuple[ChunkRead, ...]


class FieldRead(NamedTuple):
    """What a plan reads of one field in one segment."""

    field: Field
    rows: TokenRange
    """Rows of the object that are wanted."""
    out_start: int
    """Row of the caller's buffer that the first wanted row goes to."""
    layers: tuple[int, ...]
    """Positions on the layer axis, in the order of the caller's buffer; empty means all."""
    value_first: int
    """Ragged: the first value of the object that is decoded (start of a token range)."""
    values_max: int
    """Ragged: decoded values, at most this many belong to the wanted rows."""
    count_lead: TokenRange
    """Ragged: rows of the first token range that precede the wanted ones; their values are skipped."""


class SegmentRead(NamedTuple):
    """Requests against one object."""

    object_id: str
    byte_count: int
    fields: tuple[FieldRead, ...]
    requests: tuple[Request, ...]


class ReadPlan(NamedTuple):
    """Everything that has to be read for one token range of one reference."""

    tokens: TokenRange
    segments: tuple[SegmentRead, ...]

    @property
    def byte_count(self) -> int:
        """Bytes that the requests fetch."""
        return sum(r.size for s in self.segments for r in s.requests)

    @property
    def request_count(self) -> int:
        return sum(len(s.requests) for s in self.segments)


def plan_read(
    ref: PayloadRef,
    schema: Schema,
    *,
    tokens: TokenRange,
    fields: Sequence[str],
    layers: Sequence[int] | None,
    request_bytes_max: int,
    gap_bytes_max: int,
) -> ReadPlan:
    """The requests for ``tokens`` (positions in the sample) of ``fields`` at global layer ids ``layers`` (None: all).

    Chunks that lie at most ``gap_bytes_max`` bytes apart share a request, up to ``request_bytes_max`` bytes (a single larger chunk is
    one request). Order of results: segments by position, requests by offset. Raises ``BadRef`` for tokens beyond the kept ones,
    a field or layer that the schema does not have, or a reference that does not add up.
    """
    check_schema(ref, schema)
    if tokens.stop > ref.token_count:
        raise BadRef(f"tokens [{tokens.start}, {tokens.stop}) asked for, the reference keeps {ref.token_count}")
    known = {f.name for f in schema.fields}
    if unknown := [n for n in fields if n not in known]:
        raise BadRef(f"fields {unknown} asked for, the schema has {sorted(known)}")
    out = []
    for segment in ref.segments:
        wanted = segment.tokens.clip(tokens)
        if len(wanted) or not len(segment.tokens):
            shift = segment.row_start - segment.token_start
            rows = TokenRange(wanted.start + shift, wanted.stop + shift)
            read = _plan_segment(
                segment,
                schema,
                rows,
                out_start=wanted.start - tokens.start,
                names=set(fields),
                layers=layers,
                request_bytes_max=request_bytes_max,
                gap_bytes_max=gap_bytes_max,
            )
            if read.fields:
                out.append(read)
    return ReadPlan(tokens, tuple(out))


def _plan_segment(
    segment: Segment,
    schema: Schema,
    rows: TokenRange,
    *,
    out_start: int,
    names: set[str],
    layers: Sequence[int] | None,
    request_bytes_max: int,
    gap_bytes_max: int,
) -> SegmentRead:
    layout, sizes, starts = decode_index(segment, schema)
    reads: list[FieldRead] = []
    number: dict[str, int] = {}
    for field in schema.fields:
        if field.name in names and field.name in layout.present:
            number[field.name] = len(reads)
            reads.append(_field_read(layout, field, rows, out_start, _layer_positions(field, layers)))
    wanted: list[tuple[int, ChunkRead]] = []
    if len(rows):
        for chunk, size, start in zip(layout.chunks, sizes, starts, strict=True):
            array = layout.arrays[chunk.array]
            n = number.get(array.field.name)
            if n is not None and _touches(chunk, array.column, array.chunk_shape, reads[n], layout):
                wanted.append((start, ChunkRead(0, size, array.chunk_nbytes, n, array.column, chunk.start, chunk.stop, chunk.layer)))
    requests = _coalesce(wanted, request_bytes_max, gap_bytes_max)
    return SegmentRead(segment.object_id, segment.byte_count, tuple(reads), requests)


def _layer_positions(field: Field, layers: Sequence[int] | None) -> tuple[int, ...]:
    if layers is None or field.ragged or not field.layer_ids:
        return ()
    position = {layer: n for n, layer in enumerate(field.layer_ids)}
    if lost := [layer for layer in layers if layer not in position]:
        raise BadRef(f"layers {lost} asked for, field {field.name!r} has {list(field.layer_ids)}")
    return tuple(position[layer] for layer in layers)


def _field_read(layout: Layout, field: Field, rows: TokenRange, out_start: int, layers: tuple[int, ...]) -> FieldRead:
    if not field.ragged or not len(rows):
        return FieldRead(field, rows, out_start, layers, 0, 0, TokenRange(0, 0))
    first, last = rows.start // layout.range_tokens, (rows.stop - 1) // layout.range_tokens
    begin = layout.value_start(field.name, first)
    end = layout.value_sums[field.name][last]
    return FieldRead(field, rows, out_start, layers, begin, end - begin, TokenRange(layout.tokens_of(first).start, rows.start))


def _touches(chunk: Chunk, column: str, chunk_shape: tuple[int, ...], read: FieldRead, layout: Layout) -> bool:
    if column and column != "counts":
        return chunk.start < read.value_first + read.values_max and chunk.stop > read.value_first
    first, last = read.rows.start // layout.range_tokens, (read.rows.stop - 1) // layout.range_tokens
    if not first <= chunk.range_index <= last:
        return False
    return not read.layers or any(chunk.layer <= p < chunk.layer + chunk_shape[1] for p in read.layers)


def _coalesce(wanted: list[tuple[int, ChunkRead]], request_bytes_max: int, gap_bytes_max: int) -> tuple[Request, ...]:
    out: list[Request] = []
    begin = end = 0
    group: list[ChunkRead] = []
    for start, chunk in wanted:
        if group and (start - end > gap_bytes_max or start + chunk.size - begin > request_bytes_max):
            out.append(Request(begin, end - begin, tuple(group)))
            group = []
        if not group:
            begin = start
        group.append(chunk._replace(offset=start - begin))
        end = start + chunk.size
    if group:
        out.append(Request(begin, end - begin, tuple(group)))
    return tuple(out)
