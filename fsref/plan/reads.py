"""Read plans: which byte ranges of which objects hold the wanted tokens, fields and layers, and where the decoded bytes go.

A plan is plain data. Ragged values are planned by whole token ranges (their exact bounds are in ``counts``, which come in the same
requests); ``FieldRead.values_max`` is the room that they need, and a reader says how many leading values to skip.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from fsref.errors import BadRef
from fsref.plan.coverage import Overlap, Piece, field_coverage, gaps_of, is_whole
from fsref.plan.index import check_schema, decode_index
from fsref.plan.layout import Array, Layout
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
    """Index into ``SegmentRead.fields``."""
    column: str
    """``""`` dense, ``counts``, or a column name."""
    flat: bool
    """Whether it holds values rather than rows."""
    start: int
    stop: int
    """Rows (flat values) of the object that it holds."""
    layer: int
    """First layer position that it holds."""


WantedChunk = tuple[int, int, int, int, str, bool, int, int, int]
"""A ``ChunkRead`` whose offset is from the object's first byte."""


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
    value_base: int = 0
    """Ragged: where the decoded values begin in the caller's columns."""
    copies: int = 1
    """Dense: rows of the caller's buffer that the one wanted row goes to, as their filler; 1 where it stands for itself."""


class SegmentRead(NamedTuple):
    """Requests against one object."""

    object_id: str
    byte_count: int
    fields: tuple[FieldRead, ...]
    """A field may stand in it several times, with other rows each time."""
    requests: tuple[Request, ...]


class ReadPlan(NamedTuple):
    """Everything that has to be read for one token range of one reference."""

    tokens: TokenRange
    segments: tuple[SegmentRead, ...]
    overlaps: tuple[tuple[str, Overlap], ...] = ()
    """(field, tokens) for which several segments have real rows; a reader can compare them."""

    def reads(self, name: str) -> list[tuple[int, int, FieldRead]]:
        """(segment, index among its fields, read) of one field, by position in the caller's buffer."""
        found = [(n, i, r) for n, s in enumerate(self.segments) for i, r in enumerate(s.fields) if r.field.name == name]
        return sorted(found, key=lambda item: item[2].out_start) if len(found) > 1 else found

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
    no_layer = layers is not None and not layers  # nothing of a field that has layers
    wanted = tuple(f for f in schema.fields if f.name in fields and not (no_layer and f.layer_ids))
    wants = _Wants(wanted, layers, request_bytes_max, gap_bytes_max)
    if is_whole(ref):
        if not len(tokens) and ref.hashed_count:
            return ReadPlan(tokens, ())
        jobs = [_Job(f, tokens, 0, 1) for f in wants.fields]
        read = _plan_segment(ref.segments[0], schema, jobs, wants)
        return ReadPlan(tokens, (read,) if read.fields else ())
    return _plan_merged(ref, schema, tokens, wants)


class _Wants(NamedTuple):
    """What is asked for, whatever the segment."""

    fields: tuple[Field, ...]
    layers: Sequence[int] | None
    request_bytes_max: int
    gap_bytes_max: int


class _Job(NamedTuple):
    """Rows of one object that go to one place."""

    field: Field
    rows: TokenRange
    out_start: int
    copies: int


def _plan_merged(ref: PayloadRef, schema: Schema, tokens: TokenRange, wants: _Wants) -> ReadPlan:
    """Several segments: each token's row from the segment that counts, each missing dense row from the row that fills it."""
    jobs: dict[int, list[_Job]] = {}
    overlaps: list[tuple[str, Overlap]] = []
    for field in wants.fields:
        coverage = field_coverage(ref, schema, field.name)
        for p in coverage.pieces:
            start, stop = max(p.start, tokens.start), min(p.stop, tokens.stop)
            if start < stop:
                rows = TokenRange(start + p.shift, stop + p.shift)
                jobs.setdefault(p.segment, []).append(_Job(field, rows, start - tokens.start, 1))
        if not field.ragged and coverage.pieces:
            for gap in gaps_of(coverage, tokens):
                segment, row = _filler(coverage.pieces, gap)
                jobs.setdefault(segment, []).append(_Job(field, TokenRange(row, row + 1), gap.start - tokens.start, len(gap)))
        overlaps += [(field.name, o) for o in coverage.overlaps if o.start < tokens.stop and o.stop > tokens.start]
    reads = [_plan_segment(ref.segments[n], schema, jobs[n], wants) for n in sorted(jobs)]
    return ReadPlan(tokens, tuple(with_bases(reads)), tuple(overlaps))


def _filler(pieces: Sequence[Piece], gap: TokenRange) -> tuple[int, int]:
    """Segment and row that fill a gap: the nearest earlier real row, else the next one."""
    earlier = [p for p in pieces if p.stop <= gap.start]
    if earlier:
        return earlier[-1].segment, earlier[-1].stop - 1 + earlier[-1].shift
    return pieces[0].segment, pieces[0].start + pieces[0].shift


def with_bases(reads: Sequence[SegmentRead]) -> list[SegmentRead]:
    """Gives every ragged read its place in the columns, in the order of rows, so that moving values together only moves them down."""
    places = [(r.field.name, r.out_start, n, i) for n, s in enumerate(reads) for i, r in enumerate(s.fields) if r.field.ragged]
    bases: dict[tuple[int, int], int] = {}
    for _, group in groupby(sorted(places), key=lambda p: p[0]):
        base = 0
        for _, _, n, i in group:
            bases[n, i] = base
            base += reads[n].fields[i].values_max
    return [
        s._replace(fields=tuple(r._replace(value_base=bases.get((n, i), 0)) for i, r in enumerate(s.fields))) for n, s in enumerate(reads)
    ]


def _plan_segment(segment: Segment, schema: Schema, jobs: Sequence[_Job], wants: _Wants) -> SegmentRead:
    layout, sizes, starts = decode_index(segment, schema)
    reads: list[FieldRead] = []
    numbers: dict[str, list[int]] = {}
    for job in jobs:
        if job.field.name in layout.present:
            numbers.setdefault(job.field.name, []).append(len(reads))
            reads.append(_field_read(layout, job, _layer_positions(job.field, wants.layers)))
    wanted: list[WantedChunk] = []
    by_array = [[(n, _touched(a, reads[n], layout)) for n in numbers.get(a.field.name, ())] for a in layout.arrays]
    for chunk, size, start in zip(layout.chunks, sizes, starts, strict=True):
        number, range_index, _, first, last, layer = chunk
        for n, touched in by_array[number]:
            if (
                touched.start <= (first if touched.flat else range_index) < touched.stop
                and last > touched.behind
                and (not touched.layers or layer in touched.layers)
            ):
                a = layout.arrays[number]
                wanted.append((start, size, a.chunk_nbytes, n, a.column, a.flat, first, last, layer))
    requests = coalesce(wanted, wants.request_bytes_max, wants.gap_bytes_max)
    return SegmentRead(segment.object_id, segment.byte_count, tuple(reads), requests)


class _Touched(NamedTuple):
    """Which chunks of an array a read wants something of."""

    flat: bool
    start: int
    stop: int
    """Token ranges; of a flat array the first value of a chunk, which also ends ``behind`` this value."""
    behind: int
    layers: frozenset[int]
    """First layer positions of chunks; empty for all."""


def _touched(array: Array, read: FieldRead, layout: Layout) -> _Touched:
    if not len(read.rows):
        return _Touched(array.flat, 0, 0, 0, frozenset())
    if array.flat:
        return _Touched(True, 0, read.value_first + read.values_max, read.value_first, frozenset())
    first, last = read.rows.start // layout.range_tokens, (read.rows.stop - 1) // layout.range_tokens
    width = array.chunk_shape[1] if read.layers else 0
    return _Touched(False, first, last + 1, -1, frozenset(p - p % width for p in read.layers))


def _layer_positions(field: Field, layers: Sequence[int] | None) -> tuple[int, ...]:
    if layers is None or field.ragged or not field.layer_ids:
        return ()
    position = {layer: n for n, layer in enumerate(field.layer_ids)}
    if lost := [layer for layer in layers if layer not in position]:
        raise BadRef(f"layers {lost} asked for, field {field.name!r} has {list(field.layer_ids)}")
    return tuple(position[layer] for layer in layers)


def _field_read(layout: Layout, job: _Job, layers: tuple[int, ...]) -> FieldRead:
    field, rows = job.field, job.rows
    if not field.ragged or not len(rows):
        return FieldRead(field, rows, job.out_start, layers, 0, 0, TokenRange(0, 0), copies=job.copies)
    first, last = rows.start // layout.range_tokens, (rows.stop - 1) // layout.range_tokens
    begin = layout.value_start(field.name, first)
    end = layout.value_sums[field.name][last]
    return FieldRead(field, rows, job.out_start, layers, begin, end - begin, TokenRange(layout.tokens_of(first).start, rows.start))


def coalesce(wanted: Sequence[WantedChunk], request_bytes_max: int, gap_bytes_max: int) -> tuple[Request, ...]:
    """Requests for chunks at ascending offsets; a chunk that several reads want stands in it once for each and is fetched once."""
    out: list[Request] = []
    begin = end = 0
    group: list[ChunkRead] = []
    for start, size, *rest in wanted:
        fetched = start + size <= end
        if group and not fetched and (start - end > gap_bytes_max or start + size - begin > request_bytes_max):
            out.append(Request(begin, end - begin, tuple(group)))
            group = []
        if not group:
            begin = start
        group.append(ChunkRead._make((start - begin, size, *rest)))
        end = start + size
    if group:
        out.append(Request(begin, end - begin, tuple(group)))
    return tuple(out)
