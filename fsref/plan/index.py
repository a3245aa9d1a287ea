"""The compact forms inside a reference: an object's chunk index and the missing token ranges.

Index (one per segment): varint stored tokens, varint bit map of present fields in schema order; per present ragged field, for each
token range, varint values in it; then, in file order, each chunk's stored size as a zigzag varint of the difference to the previous
chunk of the same array. Missing: varint bit map of fields that have missing ranges; per such field varint count, then per range
varint gap since the last stop and varint length.

Decoding treats the bytes as hostile: every number and sum is bounded before anything is allocated.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from fsref.errors import BadRef
from fsref.plan.layout import Layout, offsets
from fsref.refs import TOKENS_MAX, PayloadRef, Schema, Segment, TokenRange

_VARINT_BYTES_MAX: Final = 7


def encode_index(layout: Layout, sizes: Sequence[int]) -> bytes:
    """The index of an object with the given stored chunk sizes, in file order."""
    out = bytearray()
    _put(out, layout.token_count)
    _put(out, sum(1 << n for n, f in enumerate(layout.schema.fields) if f.name in layout.present))
    for field in layout.schema.fields:
        if field.ragged and field.name in layout.present:
            before = 0
            for total in layout.value_sums[field.name]:
                _put(out, total - before)
                before = total
    last = [0] * len(layout.arrays)
    for chunk, size in zip(layout.chunks, sizes, strict=True):
        delta = size - last[chunk.array]
        last[chunk.array] = size
        _put(out, (delta << 1) ^ (delta >> 63))
    return bytes(out)


def decode_index(segment: Segment, schema: Schema) -> tuple[Layout, list[int], list[int]]:
    """Layout, stored sizes and offsets of a segment's chunks. Raises ``BadRef`` for anything that cannot be."""
    layout, at = _decode_layout(segment, schema)
    data = segment.index
    last = [0] * len(layout.arrays)
    bounds = [a.chunk_nbytes + 64 for a in layout.arrays]
    sizes = []
    for chunk in layout.chunks:
        array = chunk.array
        coded, at = _get(data, at)
        size = last[array] + ((coded >> 1) ^ -(coded & 1))
        last[array] = size
        if not 4 < size <= bounds[array]:
            raise BadRef(f"{segment.object_id}: chunk {chunk.name} cannot have {size} bytes")
        sizes.append(size)
    starts = offsets(layout, sizes)
    if at != len(data) or (sizes and starts[-1] + sizes[-1] > segment.byte_count):
        raise BadRef(f"{segment.object_id}: the chunk index does not fit the object's {segment.byte_count} bytes")
    return layout, sizes, starts


def _decode_layout(segment: Segment, schema: Schema) -> tuple[Layout, int]:
    data = segment.index
    tokens, at = _get(data, 0)
    bits, at = _get(data, at)
    if tokens > TOKENS_MAX or bits >> len(schema.fields):
        raise BadRef(
            f"{segment.object_id}: the chunk index names {tokens} tokens and fields {bits:#x}; the schema has {len(schema.fields)}"
        )
    if segment.row_stop > tokens:
        raise BadRef(f"{segment.object_id}: rows up to {segment.row_stop} of an object that holds {tokens}")
    present = tuple(f.name for n, f in enumerate(schema.fields) if bits >> n & 1)
    ranges = Layout(schema, present, tokens, {}).range_count
    sums: dict[str, list[int]] = {}
    for field in schema.fields:
        if not field.ragged or field.name not in present:
            continue
        total, values = 0, []
        for _ in range(ranges):
            n, at = _get(data, at)
            total += n
            values.append(total)
        sums[field.name] = values
    layout = Layout(schema, present, tokens, sums)
    if excess := layout.excess:
        raise BadRef(f"{segment.object_id}: the chunk index names {excess}")
    return layout, at


def stored_tokens(segment: Segment) -> int:
    """Tokens that the segment's object holds."""
    return _get(segment.index, 0)[0]


def held_fields(segment: Segment, schema: Schema) -> tuple[str, ...]:
    """Fields that the segment's object holds, in schema order."""
    _, at = _get(segment.index, 0)
    bits, _ = _get(segment.index, at)
    return tuple(f.name for n, f in enumerate(schema.fields) if bits >> n & 1)


def check_schema(ref: PayloadRef, schema: Schema) -> None:
    """Raises ``BadRef`` if the reference was written under another schema."""
    if ref.schema_hash != schema.hash:
        raise BadRef(
            f"the reference has schema {ref.schema_hash.hex()}, the run has {schema.hash.hex()}: it is of another run or configuration"
        )


def encode_missing(missing: Mapping[str, Sequence[TokenRange]], schema: Schema) -> bytes:
    """The missing ranges of each field (ascending, apart), or ``b""`` if there are none."""
    bits = sum(1 << n for n, f in enumerate(schema.fields) if missing.get(f.name))
    if not bits:
        return b""
    out = bytearray()
    _put(out, bits)
    for field in schema.fields:
        ranges = missing.get(field.name)
        if not ranges:
            continue
        _put(out, len(ranges))
        stop = 0
        for r in ranges:
            _put(out, r.start - stop)
            _put(out, len(r))
            stop = r.stop
    return bytes(out)


def decode_missing(segment: Segment, schema: Schema) -> dict[str, tuple[TokenRange, ...]]:
    """Missing rows of the segment's object, per field that has any. Raises ``BadRef``."""
    data = segment.missing
    if not data:
        return {}
    bits, at = _get(data, 0)
    if bits >> len(schema.fields):
        raise BadRef(f"{segment.object_id}: missing ranges name fields {bits:#x}; the schema has {len(schema.fields)}")
    out = {}
    for n, field in enumerate(schema.fields):
        if not bits >> n & 1:
            continue
        count, at = _get(data, at)
        if not 0 < count <= len(data):
            raise BadRef(f"{segment.object_id}: {count} missing ranges in {len(data)} bytes")
        ranges, stop = [], 0
        for _ in range(count):
            gap, at = _get(data, at)
            length, at = _get(data, at)
            ranges.append(TokenRange(stop + gap, stop + gap + length))
            stop = ranges[-1].stop
        out[field.name] = tuple(ranges)
    if at != len(data):
        raise BadRef(f"{segment.object_id}: the missing ranges have trailing bytes")
    return out


def _put(out: bytearray, value: int) -> None:
    assert value >= 0
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _get(data: bytes, at: int) -> tuple[int, int]:
    if at < len(data) and data[at] < 0x80:
        return data[at], at + 1
    value = shift = 0
    for n in range(at, min(at + _VARINT_BYTES_MAX, len(data))):
        byte = data[n]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, n + 1
        shift += 7
    raise BadRef("a varint of the reference is cut off or too long")
