"""The compact forms inside a reference: an object's chunk index and the missing token ranges.

Index (one per segment): varint stored tokens, varint bit map of present fields in schema order; per present ragged field, for each
token range, varint values in it; then, in file order, each chunk's stored size as a zigzag varint of the difference to the previous
chunk of the same array. Missing: varint bit map of fields that have missing ranges; per such field varint count, then per range
varint gap since the last stop and varint length.

Decoding treats the bytes as hostile: every number and sum is bounded before anything is allocated.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final

from fsref.errors import BadRef
from fsref.plan.layout import ZIP_HEADER_BYTES, Layout, chunk_tokens
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
    layout, coded = _decode_layout(segment, schema)
    chunks = layout.chunks
    if len(coded) != len(chunks):
        raise BadRef(f"{segment.object_id}: the chunk index gives {len(coded)} sizes, the object has {len(chunks)} chunks")
    last = [0] * len(layout.arrays)
    bounds = [a.chunk_nbytes + 64 for a in layout.arrays]
    sizes, starts = [], []
    cursor = 0
    for (array, _, name, _, _, _), n in zip(chunks, coded, strict=True):
        size = last[array] + ((n >> 1) ^ -(n & 1))
        last[array] = size
        if not 4 < size <= bounds[array]:
            raise BadRef(f"{segment.object_id}: chunk {name} cannot have {size} bytes")
        sizes.append(size)
        cursor += ZIP_HEADER_BYTES + len(name)
        starts.append(cursor)
        cursor += size
    if cursor > segment.byte_count:
        raise BadRef(f"{segment.object_id}: the chunk index does not fit the object's {segment.byte_count} bytes")
    return layout, sizes, starts


def _decode_layout(segment: Segment, schema: Schema) -> tuple[Layout, list[int]]:
    """The layout, and the numbers behind it: the chunks' sizes."""
    numbers = _numbers(segment.index)
    if len(numbers) < 2:
        raise BadRef(f"{segment.object_id}: the chunk index is cut off")
    tokens, bits = numbers[:2]
    if tokens > TOKENS_MAX or bits >> len(schema.fields):
        raise BadRef(
            f"{segment.object_id}: the chunk index names {tokens} tokens and fields {bits:#x}; the schema has {len(schema.fields)}"
        )
    if segment.row_stop > tokens:
        raise BadRef(f"{segment.object_id}: rows up to {segment.row_stop} of an object that holds {tokens}")
    present = tuple(f.name for n, f in enumerate(schema.fields) if bits >> n & 1)
    ranges = -(-tokens // chunk_tokens(tokens)) if tokens else 0
    sums: dict[str, list[int]] = {}
    at = 2
    for field in schema.fields:
        if field.ragged and field.name in present:
            sums[field.name] = list(accumulate(numbers[at : at + ranges]))
            at += ranges
            if at > len(numbers):
                raise BadRef(f"{segment.object_id}: the chunk index is cut off")
    layout = Layout(schema, present, tokens, sums)
    if excess := layout.excess:
        raise BadRef(f"{segment.object_id}: the chunk index names {excess}")
    return layout, numbers[at:]


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
    numbers = iter(_numbers(data))
    bits = next(numbers)
    if bits >> len(schema.fields):
        raise BadRef(f"{segment.object_id}: missing ranges name fields {bits:#x}; the schema has {len(schema.fields)}")
    out = {}
    try:
        for n, field in enumerate(schema.fields):
            if not bits >> n & 1:
                continue
            count = next(numbers)
            if not 0 < count <= len(data):
                raise BadRef(f"{segment.object_id}: {count} missing ranges in {len(data)} bytes")
            ranges, stop = [], 0
            for _ in range(count):
                start = stop + next(numbers)
                stop = start + next(numbers)
                ranges.append(TokenRange(start, stop))
            out[field.name] = tuple(ranges)
    except StopIteration:
        raise BadRef(f"{segment.object_id}: the missing ranges are cut off") from None
    if next(numbers, None) is not None:
        raise BadRef(f"{segment.object_id}: the missing ranges have trailing bytes")
    return out


def _put(out: bytearray, value: int) -> None:
    assert value >= 0
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _numbers(data: bytes) -> list[int]:
    """All varints of ``data``, which is not empty."""
    out: list[int] = []
    value = shift = 0
    for byte in data:
        if byte < 0x80:
            out.append(value | byte << shift)
            value = shift = 0
            continue
        value |= (byte & 0x7F) << shift
        shift += 7
        if shift >= 7 * _VARINT_BYTES_MAX:
            break
    if shift:
        raise BadRef("a varint of the reference is cut off or too long")
    return out


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
