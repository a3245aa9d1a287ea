"""Arrays in memory, and their checks against a schema.

Shape letters: T tokens, L layers, K experts per token, N values of a ragged field.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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
    id_space: Literal["", "logical", "physical"] = ""
    """Which expert numbering the ids are in, where whoever made them knows; another one than the schema's is refused."""


@dataclass(frozen=True, eq=False)
class Ragged:
    """A ragged field: ``counts`` int32 [T] and one flat array [N] per column, N = counts.sum()."""

    counts: NDArray[np.int32]
    columns: Mapping[str, NDArray[Any]]
    missing: tuple[TokenRange, ...] = ()
    row_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """One value per token [T] for each of the field's ``row_columns``; an absent one is 0 throughout."""

    @classmethod
    def from_offsets(
        cls,
        offsets: Sequence[int] | NDArray[np.integer[Any]],
        columns: Mapping[str, NDArray[Any]],
        *,
        missing: tuple[TokenRange, ...] = (),
        row_columns: Mapping[str, NDArray[Any]] | None = None,
    ) -> "Ragged":
        """From the usual CSR form: ``offsets`` [T + 1] from 0 on, where each row's values begin. Raises ``PayloadError``."""
        bounds = np.asarray(offsets)
        if bounds.ndim != 1 or not bounds.size or bounds.dtype.kind not in "iu" or int(bounds[0]) != 0:
            raise PayloadError(f"offsets start with 0 and are one more than rows; {bounds.dtype} {bounds[:3].tolist()} found")
        counts = np.diff(bounds.astype(np.int64))
        if counts.size and int(counts.min()) < 0:
            raise PayloadError(f"offsets descend at row {int(np.argmin(counts))}")
        return cls(counts.astype(np.int32), columns, missing, row_columns or {})


FieldData = Dense | Ragged


@dataclass(frozen=True, eq=False)
class Payload:
    """One branch's arrays in memory, by field name. Fields may be absent; what a run needs is checked by the roles.

    Every present field covers exactly ``len(token_ids)`` tokens; see ``checked`` for what that implies.
    """

    token_ids: NDArray[np.int32]
    fields: Mapping[str, FieldData]
    absent: tuple[str, ...] = ()
    """Fields that the engine was asked for and that did not come: another thing than fields that nobody asked for."""

    @property
    def token_count(self) -> int:
        return len(self.token_ids)

    def checked(self, schema: Schema) -> "Payload":
        """This payload normalised to ``schema``: little-endian, C order, storage dtype, missing dense rows filled.

        A missing dense row becomes a copy of the nearest earlier real row, else of the next one, so that every reader sees
        the same bytes whatever part it reads; coverage, not the value, says that it is missing. A missing ragged row has count 0.
        A field without any real row is ``absent``. A field with a layer axis may bring all ``layer_count`` layers.

        Raises ``PayloadError`` (which names the field) for an unknown field, a wrong shape or dtype, values that narrowing
        would change, expert ids outside [0, expert_count), ids of another id space, or counts that do not add up.
        """
        out: dict[str, FieldData] = {}
        absent = set(self.absent)
        for name, data in self.fields.items():
            spec = _field(schema, name)
            if name in absent:
                raise PayloadError(f"field {name!r} is among the absent ones and has arrays")
            if spec.ragged != isinstance(data, Ragged):
                raise PayloadError(f"field {name!r} is {'ragged' if spec.ragged else 'dense'} in the schema, the arrays are not")
            _check_missing(name, data.missing, self.token_count)
            done = (
                _checked_ragged(spec, data, self.token_count) if isinstance(data, Ragged) else _checked_dense(spec, data, self.token_count)
            )
            if done is None:
                absent.add(name)
            else:
                out[name] = done
        for name in self.absent:
            _field(schema, name)
        names = [f.name for f in schema.fields]
        return Payload(
            np.ascontiguousarray(self.token_ids, dtype=np.int32),
            {n: out[n] for n in names if n in out},
            tuple(n for n in names if n in absent),
        )


def _field(schema: Schema, name: str) -> Field:
    try:
        return schema.field(name)
    except KeyError as e:
        raise PayloadError(str(e.args[0])) from None


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


def _checked_dense(spec: Field, data: Dense, token_count: int) -> Dense | None:
    rows = _own_layers(spec, np.asarray(data.rows), token_count)
    if data.id_space and spec.id_space and data.id_space != spec.id_space:
        raise PayloadError(
            f"field {spec.name!r}: ids are {data.id_space}, the schema says {spec.id_space}: map them through the balancer's table"
        )
    real = ~flags_of(data.missing, token_count)
    if token_count and not real.any():
        return None
    if data.missing:
        rows = rows[filler_rows(real)]
    if spec.expert_count and rows.size:
        _check_ids(spec, rows)
    return Dense(narrow(spec.name, rows, spec.dtype), data.missing, spec.id_space)


def _own_layers(spec: Field, rows: NDArray[Any], token_count: int) -> NDArray[Any]:
    """``rows`` with the schema's layers, of all layers or of exactly those."""
    if rows.shape == (token_count, *spec.row_shape):
        return rows
    if spec.layer_count and rows.shape == (token_count, spec.layer_count, *spec.row_shape[1:]):
        return rows[:, list(spec.layer_ids)]
    others = f", or all {spec.layer_count} layers" if spec.layer_count else ""
    raise PayloadError(f"field {spec.name!r}: shape {rows.shape} found, {(token_count, *spec.row_shape)} needed{others}")


def _check_ids(spec: Field, rows: NDArray[Any]) -> None:
    low, high = int(rows.min()), int(rows.max())
    if low >= 0 and high < spec.expert_count:
        return
    hint = ""
    if low < 0:
        negative = (rows < 0).reshape(len(rows), -1)
        at = int(np.argmax(negative.any(axis=1)))
        hint = (
            f"; row {at} mixes them with real ids, which is corruption"
            if not negative[at].all()
            else f"; row {at} is a sentinel: name it in ``missing`` (fsref.refs.export.without_sentinel does)"
        )
    raise PayloadError(f"field {spec.name!r}: expert ids {low}..{high} found, 0..{spec.expert_count - 1} are legal{hint}")


def filler_rows(real: NDArray[np.bool_]) -> NDArray[np.intp]:
    """For each row the row to copy: itself if real, else the nearest earlier real row, else the next one."""
    index = np.where(real, np.arange(len(real)), -1)
    index = np.maximum.accumulate(index)
    first = int(np.argmax(real))
    return np.where(index < 0, first, index)


def _checked_ragged(spec: Field, data: Ragged, token_count: int) -> Ragged | None:
    name = spec.name
    counts = np.asarray(data.counts)
    if counts.shape != (token_count,):
        raise PayloadError(f"field {name!r}: counts of shape {counts.shape} found, ({token_count},) needed")
    if counts.size and int(counts.min()) < 0:
        raise PayloadError(f"field {name!r}: a count is negative ({int(counts.min())})")
    if set(data.columns) != {c.name for c in spec.columns}:
        raise PayloadError(f"field {name!r}: columns {sorted(data.columns)} found, {[c.name for c in spec.columns]} needed")
    if foreign := set(data.row_columns) - {c.name for c in spec.row_columns}:
        raise PayloadError(f"field {name!r}: row columns {sorted(foreign)} found, {[c.name for c in spec.row_columns]} are declared")
    total = int(counts.sum(dtype=np.int64))
    columns = {c.name: _column(f"{name}.{c.name}", data.columns[c.name], c.dtype, total, "values by its counts") for c in spec.columns}
    missing = flags_of(data.missing, token_count)
    if bool(counts[missing].any()):
        raise PayloadError(f"field {name!r}: a token range is declared missing but has values")
    if token_count and bool(missing.all()):
        return None
    rows = {c.name: _row_column(name, c.name, c.dtype, data, missing) for c in spec.row_columns}
    return Ragged(narrow(f"{name}.counts", counts, "int32"), columns, data.missing, rows)


def _column(what: str, values: Any, dtype: str, size: int, why: str) -> NDArray[Any]:
    array = np.asarray(values)
    if array.shape != (size,):
        raise PayloadError(f"field {what!r}: {size} {why}, shape {array.shape} found")
    return narrow(what, array, dtype)


def _row_column(name: str, column: str, dtype: str, data: Ragged, missing: NDArray[np.bool_]) -> NDArray[Any]:
    if column not in data.row_columns:
        return np.zeros(len(missing), dtype)
    values = _column(f"{name}.{column}", data.row_columns[column], dtype, len(missing), "tokens")
    return np.where(missing, values.dtype.type(0), values) if data.missing else values
