"""Other forms of the same arrays, for code that wants a sentinel, a rectangle or a prefix instead of coverage, counts and references.

None of them is ever stored. Shape letters: T tokens, W width, N values.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fsref.errors import PayloadError
from fsref.refs.names import TokenRange, flags_of, ranges_where
from fsref.refs.payload import Dense, FieldData, Ragged

_SIGNED: Final[Mapping[str, str]] = {"uint8": "int16", "uint16": "int32", "uint32": "int64"}


def with_sentinel(data: Dense, sentinel: int = -1) -> NDArray[Any]:
    """A copy of ``data.rows`` with ``sentinel`` in every missing row, in the next wider signed dtype (uint8 becomes int16)."""
    dtype = np.dtype(_SIGNED.get(data.rows.dtype.name, data.rows.dtype.name))
    if dtype.kind != "i" or not np.iinfo(dtype).min <= sentinel <= np.iinfo(dtype).max:
        raise PayloadError(f"rows of {data.rows.dtype} have no signed form that holds the sentinel {sentinel}")
    out = data.rows.astype(dtype)
    out[flags_of(data.missing, len(out))] = sentinel
    return out


def without_sentinel(rows: NDArray[Any], sentinel: int = -1) -> Dense:
    """Inverse of ``with_sentinel``: rows that are ``sentinel`` throughout are missing, with 0 in them.

    Raises ``PayloadError`` for a row that mixes the sentinel with values: no engine means that.
    """
    rows = np.asarray(rows)
    marked = (rows == sentinel).reshape(len(rows), -1)
    gone = marked.all(axis=1) if len(rows) else np.zeros(0, np.bool_)
    mixed = marked.any(axis=1) & ~gone
    if mixed.any():
        at = int(np.argmax(mixed))
        raise PayloadError(f"row {at} mixes the sentinel {sentinel} with values: {rows[at].tolist()!r:.120}")
    out = rows.copy()
    out[gone] = 0
    return Dense(out, ranges_where(gone))


def cut(data: FieldData, start: int, stop: int) -> FieldData:
    """Rows [start, stop) with their values and missing ranges. Raises ``PayloadError`` beyond the rows that there are."""
    count = len(data.rows) if isinstance(data, Dense) else len(data.counts)
    if not 0 <= start <= stop <= count:
        raise PayloadError(f"rows [{start}, {stop}) asked for, there are {count}")
    wanted = TokenRange(start, stop)
    clipped = (r.clip(wanted) for r in data.missing)
    missing = tuple(TokenRange(r.start - start, r.stop - start) for r in clipped if len(r))
    if isinstance(data, Dense):
        return Dense(data.rows[start:stop], missing, data.id_space)
    before = int(data.counts[:start].sum(dtype=np.int64))
    values = slice(before, before + int(data.counts[start:stop].sum(dtype=np.int64)))
    columns = {n: c[values] for n, c in data.columns.items()}
    return Ragged(data.counts[start:stop], columns, missing, {n: r[start:stop] for n, r in data.row_columns.items()})


def rectangle(data: Ragged, column: str, *, width: int, fill: Any = 0) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """One column as [T, W] in slot order, ``fill`` behind each row's values, and bool [T, W]: True where a value stands.

    Rows of different lengths (heads of another k, masks with ties) so stand side by side. Raises ``PayloadError`` for a row that is wider:
    a width that drops values is chosen by cutting the counts, not silently.
    """
    counts, values = data.counts, data.columns[column]
    if counts.size and int(counts.max()) > width:
        at = int(np.argmax(counts > width))
        raise PayloadError(f"row {at} has {int(counts[at])} values, which do not fit a width of {width}")
    valid = np.arange(width) < counts[:, None]
    out = np.full((len(counts), width), fill, values.dtype)
    out[valid] = values
    return out, valid
