"""A payload to the bytes of one object. Pure CPU work: no I/O, no torch, no Zarr import; runs in writer threads.

The order is that of ``fsref.plan.layout``: chunks by token range and field, then the metadata documents, then the ZIP directory.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsref.errors import PayloadError
from fsref.objects.codec import crc32c, encode_chunk
from fsref.objects.metadata import documents
from fsref.objects.native import CRC_BYTES
from fsref.objects.zipfile import ZipWriter
from fsref.plan import Array, Chunk, Layout, chunk_tokens, encode_index, encode_missing
from fsref.refs import BYTES_OBJECT_MAX, Dense, Payload, Ragged, Schema, TokenRange, token_hash


@dataclass(frozen=True, eq=False)
class EncodedObject:
    """Buffers to write back to back, and what the reference and the ledger need to know of them."""

    buffers: list[Any]
    byte_count: int
    checksum: int
    """crc32c of the whole object."""
    index: bytes
    missing: bytes
    token_hash: bytes
    token_count: int
    fields: tuple[str, ...]
    stats: tuple[tuple[int, int], ...]


def encode(payload: Payload, schema: Schema, *, bytes_max: int = BYTES_OBJECT_MAX) -> EncodedObject:
    """Encodes a payload that ``Payload.checked`` has normalised. Raises ``PayloadError`` if the object would exceed ``bytes_max``."""
    layout = _layout(payload, schema)
    if excess := layout.excess:
        raise PayloadError(f"a payload of {payload.token_count} tokens has {excess}")
    zip_ = ZipWriter()
    sizes = []
    for chunk in layout.chunks:
        array = layout.arrays[chunk.array]
        packed, crc = encode_chunk(_chunk_values(payload, array, chunk), schema.codec)
        size = len(packed) + CRC_BYTES
        sizes.append(size)
        zip_.add(chunk.name, (packed, crc), size)
        if zip_.byte_count > bytes_max:
            raise PayloadError(f"a payload of {payload.token_count} tokens encodes to more than {bytes_max} bytes (store.bytes_object_max)")
    stats = {name: _stats(data) for name, data in payload.fields.items() if isinstance(data, Ragged)}
    hashed = token_hash(payload.token_ids)
    missing = {name: data.missing for name, data in payload.fields.items()}
    if payload.token_count:
        missing |= {name: (TokenRange(0, payload.token_count),) for name in payload.absent}
    for name, document in documents(layout, token_hash=hashed, missing=missing, stats=stats):
        zip_.add(name, (document,), len(document))
    zip_.finish()
    checksum = 0
    for buffer in zip_.buffers:
        checksum = crc32c(buffer if isinstance(buffer, bytes) else np.frombuffer(buffer, np.uint8), checksum)
    return EncodedObject(
        buffers=zip_.buffers,
        byte_count=zip_.byte_count,
        checksum=checksum,
        index=encode_index(layout, sizes),
        missing=encode_missing(missing, schema),
        token_hash=hashed,
        token_count=payload.token_count,
        fields=layout.present,
        stats=tuple(stats.get(f.name, (0, 0)) for f in schema.fields if f.ragged),
    )


def _layout(payload: Payload, schema: Schema) -> Layout:
    tokens = payload.token_count
    step = chunk_tokens(tokens)
    sums: dict[str, list[int]] = {}
    for name, data in payload.fields.items():
        if isinstance(data, Ragged):
            starts = np.arange(0, tokens, step)
            per_range = np.add.reduceat(data.counts.astype(np.int64), starts) if tokens else np.zeros(0, np.int64)
            sums[name] = [int(n) for n in np.cumsum(per_range)]
    return Layout(schema, tuple(payload.fields), tokens, sums)


def _chunk_values(payload: Payload, array: Array, chunk: Chunk) -> NDArray[Any]:
    """The chunk's values, padded to the chunk shape with zeros where the array ends inside it."""
    data = payload.fields[array.field.name]
    if isinstance(data, Dense):
        rows = data.rows[chunk.start : chunk.stop]
        source = rows[:, chunk.layer : chunk.layer + array.chunk_shape[1]] if rows.ndim > 1 else rows
    elif array.flat:
        source = data.columns[array.column][chunk.start : chunk.stop]
    else:
        source = (data.counts if array.column == "counts" else data.row_columns[array.column])[chunk.start : chunk.stop]
    if source.shape == array.chunk_shape:
        return np.ascontiguousarray(source)
    padded = np.zeros(array.chunk_shape, source.dtype)
    padded[tuple(slice(n) for n in source.shape)] = source
    return padded


def _stats(data: Ragged) -> tuple[int, int]:
    return int(np.count_nonzero(data.counts)), int(data.counts.sum(dtype=np.int64))
