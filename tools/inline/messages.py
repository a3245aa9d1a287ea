"""The arrays of one branch as an inline message carries them, and a micro batch packed from such messages by plain numpy.

Owns these two forms. Refuses objects, references' indices, readers and buffers: what a reference is asked for is how many tokens it keeps.
The product's padding of rows for context and tensor ranks is not here: inline runs are data parallel.

Shape letters: T tokens, R rows of a micro batch, N values.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from fsref.plan import SlicePlan
from fsref.refs import Dense, Field, FieldData, Payload, Ragged, Schema, TokenRange, flags_of, ranges_where
from fsref.slices import RankSlice, fields_wanted
from fsref.steps import MicroBatch, SampleSequence

Arrays = Mapping[str, FieldData]
"""Of one branch, by field name."""


class _Array(msgspec.Struct, array_like=True, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Carried(msgspec.Struct, array_like=True, frozen=True):
    """One field: ``rows`` of a dense one, else ``counts`` and columns."""

    missing: tuple[tuple[int, int], ...]
    rows: _Array | None = None
    counts: _Array | None = None
    columns: dict[str, _Array] = {}
    row_columns: dict[str, _Array] = {}


def packed(payload: Payload) -> bytes:
    """The message form of a checked payload's arrays."""
    return msgspec.msgpack.encode({name: _carried(data) for name, data in payload.fields.items()})


def unpacked(message: bytes) -> dict[str, FieldData]:
    """Inverse of ``packed``; the arrays are views of ``message``."""
    found = msgspec.msgpack.decode(message, type=dict[str, _Carried])
    return {name: _field(carried) for name, carried in found.items()}


def packed_slice(micro_batch: MicroBatch, arrays: Mapping[str, Arrays], plan: SlicePlan, schema: Schema, *, expert_dtype: str) -> RankSlice:
    """What the reader would have left in a rank's buffers, from inline arrays by object id.

    Raises ``ValueError`` for a plan of another layout than all rows of the micro batch in order.
    """
    if plan.rows.row_count != micro_batch.token_count:
        raise ValueError(f"{micro_batch.token_count} tokens, {plan.rows.row_count} rows: inline transport is for data parallel ranks only")
    fields: dict[str, FieldData] = {}
    valid: dict[str, NDArray[np.bool_]] = {}
    for name in plan.fields:
        field = schema.field(name)
        parts = [_part(s, _of(s, arrays), field, schema) for s in micro_batch.sequences]
        valid[name] = np.concatenate([v for _, v in parts])
        fields[name] = _joined([d for d, _ in parts], field, ranges_where(~valid[name]), expert_dtype)
    return RankSlice(plan.rows, fields, valid, plan.rows.padding(), plan.layers)


def _carried(data: FieldData) -> _Carried:
    missing = tuple((r.start, r.stop) for r in data.missing)
    if isinstance(data, Dense):
        return _Carried(missing, rows=_array(data.rows))
    columns, row_columns = ({n: _array(v) for n, v in c.items()} for c in (data.columns, data.row_columns))
    return _Carried(missing, counts=_array(data.counts), columns=columns, row_columns=row_columns)


def _array(values: NDArray[Any]) -> _Array:
    return _Array(values.dtype.str, values.shape, np.ascontiguousarray(values).tobytes())


def _values(array: _Array) -> NDArray[Any]:
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)


def _field(carried: _Carried) -> FieldData:
    missing = tuple(TokenRange(a, b) for a, b in carried.missing)
    if carried.rows is not None:
        return Dense(_values(carried.rows), missing)
    assert carried.counts is not None
    columns, row_columns = ({n: _values(v) for n, v in c.items()} for c in (carried.columns, carried.row_columns))
    return Ragged(_values(carried.counts), columns, missing, row_columns)


def _of(sequence: SampleSequence, arrays: Mapping[str, Arrays]) -> Arrays | None:
    if sequence.ref is None:
        return None
    (object_id,) = sequence.ref.object_ids
    return arrays[object_id]


def _part(sequence: SampleSequence, arrays: Arrays | None, field: Field, schema: Schema) -> tuple[FieldData, NDArray[np.bool_]]:
    """One sequence's rows of a field, and which of them are real."""
    tokens = sequence.token_count
    if arrays is None or sequence.ref is None or field.name not in arrays or field.name not in fields_wanted(sequence, schema):
        return _nothing(field, tokens), np.zeros(tokens, np.bool_)
    data, kept = arrays[field.name], sequence.ref.token_count
    real = np.zeros(tokens, np.bool_)
    if isinstance(data, Dense):
        real[:kept] = ~flags_of(data.missing, len(data.rows))[:kept]
        last = np.repeat(data.rows[kept - 1 : kept], tokens - kept, axis=0)  # tokens after the stored ones repeat the last row
        return Dense(np.concatenate([data.rows[:kept], last])), real
    real[:kept] = ~flags_of(data.missing, len(data.counts))[:kept]
    counts = np.concatenate([data.counts[:kept], np.zeros(tokens - kept, np.int32)])
    total = int(counts.sum(dtype=np.int64))
    rows = {n: np.concatenate([c[:kept], np.zeros(tokens - kept, c.dtype)]) for n, c in data.row_columns.items()}
    return Ragged(counts, {n: c[:total] for n, c in data.columns.items()}, row_columns=rows), real


def _nothing(field: Field, tokens: int) -> FieldData:
    if not field.ragged:
        return Dense(np.zeros((tokens, *field.row_shape), field.dtype))
    return Ragged(
        np.zeros(tokens, np.int32),
        {c.name: np.zeros(0, c.dtype) for c in field.columns},
        row_columns={c.name: np.zeros(tokens, c.dtype) for c in field.row_columns},
    )


def _joined(parts: Sequence[FieldData], field: Field, missing: tuple[TokenRange, ...], expert_dtype: str) -> FieldData:
    dtype = expert_dtype if field.expert_count and expert_dtype != "stored" else field.dtype
    dense = [p for p in parts if isinstance(p, Dense)]
    if dense:
        return Dense(np.concatenate([p.rows for p in dense], dtype=dtype, casting="safe"), missing, field.id_space)
    ragged = [p for p in parts if isinstance(p, Ragged)]
    counts = np.concatenate([p.counts for p in ragged])
    columns = {c.name: _column([p.columns[c.name] for p in ragged], c.dtype) for c in field.columns}
    row_columns = {c.name: _column([p.row_columns[c.name] for p in ragged], c.dtype) for c in field.row_columns}
    return Ragged(counts, columns, missing, row_columns)


def _column(parts: Sequence[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
