"""Arrays in memory, and their checks against a schema.

Shape letters: T tokens, N values of a ragged field.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsref.errors import PayloadError
from fsref.refs.names import TokenRange, flags_of
from fsref.refs.schema import Field, Schema


@dataclass(frozen=True, eq=False)
class Dense:
    """A dense field's rows [T, *row_shape]; rows inside ``missing`` are fillers, not data."""

    rows: NDArray[Any]
    missing: tuple[TokenRange, ...] = ()


@dataclass(frozen=True, eq=False)
class Ragged:
    """A ragged field: ``counts`` int32 [T] and one flat array [N] per column, N = counts.sum()."""

    counts: NDArray[np.int32]
    columns: Mapping[str, NDArray[Any]]
    missing: tuple[TokenRange, ...] = ()


FieldData = Dense | Ragged


@dataclass(frozen=True, eq=False)
class Payload:
    """One branch's arrays in memory, by field name. Fields may be absent; what a run needs is checked by the roles.

    Every present field covers exactly ``len(token_ids)`` tokens; see ``checked`` for what that implies.
    """

    token_ids: NDArray[np.int32]
    fields: Mapping[str, FieldData]

    @property
    def token_count(self) -> int:
        return len(self.token_ids)

    def checked(self, schema: Schema) -> "Payload":
        """This payload normalised to ``schema``: little-endian, C order, storage dtype, missing dense rows filled.

        A missing dense row becomes a copy of the nearest earlier real row, else of the next one, so that every reader sees
        the same bytes whatever part it reads; coverage, not the value, says that it is missing. A missing ragged row has count 0.
        A dense field without any real row is absent.

        Raises ``PayloadError`` (which names the field) for an unknown field, a wrong shape or dtype, values that narrowing
        would change, expert ids outside [0, expert_count), or counts that do not add up.
        """
        out: dict[str, FieldData] = {}
        for name, data in self.fields.items():
            try:
                field = schema.field(name)
            except KeyError as e:
                raise PayloadError(str(e.args[0])) from None
            if field.ragged != isinstance(data, Ragged):
                raise PayloadError(f"field {name!r} is {'ragged' if field.ragged else 'dense'} in the schema, the arrays are not")
            _check_missing(name, data.missing, self.token_count)
            done = (
                _checked_ragged(field, data, self.token_count)
                if isinstance(data, Ragged)
                else _checked_dense(field, data, self.token_count)
            )
            if done is not None:
                out[name] = done
        return Payload(np.ascontiguousarray(self.token_ids, dtype=np.int32), {f.name: out[f.name] for f in schema.fields if f.name in out})


def _check_missing(name: str, missing: tuple[TokenRange, ...], token_count: int) -> None:
    end = -1
    for r in missing:
        if r.start <= end or len(r) == 0 or r.stop > token_count:
            raise PayloadError(
                f"field {name!r}: missing ranges {missing} must be ascending, apart, not empty and within {token_count} tokens"
            )
        end = r.stop


def narrow(name: str, array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """``array`` as little-endian, C-order ``dtype``; raises ``PayloadError`` where a value would change."""
    want = np.dtype(dtype)
    if array.dtype == want:
        return np.ascontiguousarray(array)
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f") != (want.kind == "f"):
        raise PayloadError(f"field {name!r}: dtype {array.dtype} cannot be stored as {dtype}")
    if want.kind == "f":
        if array.dtype.itemsize > want.itemsize:
            raise PayloadError(f"field {name!r}: {array.dtype} would lose bits as {dtype}; convert it where the loss is meant")
    elif array.size and want.kind != "b":
        low, high, info = int(array.min()), int(array.max()), np.iinfo(want)
        if low < info.min or high > info.max:
            raise PayloadError(f"field {name!r}: values {low}..{high} do not fit {dtype} ({info.min}..{info.max})")
    elif array.size and bool((array > 1).any()):
        raise PayloadError(f"field {name!r}: values above 1 do not fit bool")
    return np.ascontiguousarray(array, dtype=want)


def _checked_dense(field: Field, data: Dense, token_count: int) -> Dense | None:
    rows = np.asarray(data.rows)
    if rows.shape != (token_count, *field.row_shape):
        raise PayloadError(f"field {field.name!r}: shape {rows.shape} found, {(token_count, *field.row_shape)} needed")
    real = ~flags_of(data.missing, token_count)
    if token_count and not real.any():
        return None
    if data.missing:
        rows = rows[filler_rows(real)]
    if field.expert_count and rows.size:
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= field.expert_count:
            raise PayloadError(f"field {field.name!r}: expert ids {low}..{high} found, 0..{field.expert_count - 1} are legal")
    return Dense(narrow(field.name, rows, field.dtype), data.missing)


def filler_rows(real: NDArray[np.bool_]) -> NDArray[np.intp]:
    """For each row the row to copy: itself if real, else the nearest earlier real row, else the next one."""
    index = np.where(real, np.arange(len(real)), -1)
    index = np.maximum.accumulate(index)
    first = int(np.argmax(real))
    return np.where(index < 0, first, index)


def _checked_ragged(field: Field, data: Ragged, token_count: int) -> Ragged:
    counts = np.asarray(data.counts)
    if counts.shape != (token_count,):
        raise PayloadError(f"field {field.name!r}: counts of shape {counts.shape} found, ({token_count},) needed")
    if counts.size and int(counts.min()) < 0:
        raise PayloadError(f"field {field.name!r}: a count is negative ({int(counts.min())})")
    if set(data.columns) != {c.name for c in field.columns}:
        raise PayloadError(f"field {field.name!r}: columns {sorted(data.columns)} found, {[c.name for c in field.columns]} needed")
    total = int(counts.sum(dtype=np.int64))
    columns = {}
    for c in field.columns:
        values = np.asarray(data.columns[c.name])
        if values.shape != (total,):
            raise PayloadError(f"field {field.name!r}: {total} values by its counts, column {c.name!r} has shape {values.shape}")
        columns[c.name] = narrow(f"{field.name}.{c.name}", values, c.dtype)
    missing = flags_of(data.missing, token_count)
    if bool(counts[missing].any()):
        raise PayloadError(f"field {field.name!r}: a token range is declared missing but has values")
    return Ragged(narrow(f"{field.name}.counts", counts, "int32"), columns, data.missing)
