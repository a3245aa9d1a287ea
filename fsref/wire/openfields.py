"""Fields that no engine has a form for yet: declared under ``[[field]]``, sent under their own name in a choice.

A dense field is base64 of .npy bytes, rows [R, *row_shape] of successive tokens: aligned to the input they follow the rule of routed
experts (from the request's start on, the last sampled token may be absent); aligned to the target they are one row per completion
token. A ragged field is an object of base64 .npy arrays: ``counts`` and each column, one count per completion token (target) or
per token from the start on (input). Values keep their dtype as long as it widens into the declared one.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsref.errors import WireError
from fsref.refs import Alignment, Field, Ragged
from fsref.wire.npy import decode_npy, encode_npy
from fsref.wire.text import decode_base64, encode_base64

BYTES_MAX = 1 << 31


def decode_open_field(
    value: Any, field: Field, *, start: int, prompt_count: int, token_count: int
) -> tuple[int, NDArray[Any]] | Ragged | None:
    """Dense: (position of the first row, rows). Ragged: counts and columns. None where the engine sent nothing. Raises ``WireError``.

    ``start`` is the request's first wanted position, ``token_count`` prompt plus completion.
    """
    if value is None:
        return None
    first = prompt_count if field.alignment is Alignment.TARGET else start
    if field.ragged:
        return _ragged(value, field, rows=token_count - first)
    rows = _array(value, field.name)
    if rows.shape[1:] != field.row_shape:
        raise WireError(f"{field.name}: rows of shape {rows.shape[1:]} found, {field.row_shape} declared")
    _check_count(field, len(rows), token_count - first)
    return first, rows


def encode_open_field(data: NDArray[Any] | Ragged) -> str | dict[str, str]:
    """The form that ``decode_open_field`` reads."""
    if isinstance(data, Ragged):
        return {"counts": encode_base64(encode_npy(data.counts)), **{n: encode_base64(encode_npy(c)) for n, c in data.columns.items()}}
    return encode_base64(encode_npy(data))


def _array(value: Any, what: str) -> NDArray[Any]:
    if not isinstance(value, str | bytes | memoryview):
        raise WireError(f"{what}: base64 of .npy bytes expected, {type(value).__name__} found")
    return decode_npy(decode_base64(value, what=what, bytes_max=BYTES_MAX), what=what)


def _check_count(field: Field, found: int, most: int) -> None:
    least = most if field.alignment is Alignment.TARGET else max(most - 1, 0)
    if not least <= found <= most:
        raise WireError(f"{field.name}: {found} rows found, {least} to {most} needed; the engine lost rows or answered another request")


def _ragged(value: Any, field: Field, *, rows: int) -> Ragged:
    names = {"counts", *(c.name for c in field.columns)}
    if not isinstance(value, Mapping) or set(value) != names:
        found = sorted(value) if isinstance(value, Mapping) else type(value).__name__
        raise WireError(f"{field.name}: an object with {sorted(names)} expected, {found} found")
    counts = _array(value["counts"], f"{field.name}.counts")
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or (counts.size and int(counts.min()) < 0):
        raise WireError(f"{field.name}.counts: whole numbers from 0 on expected, {counts.dtype} {counts.shape} found")
    _check_count(field, len(counts), rows)
    if len(counts) < rows:
        counts = np.concatenate([counts, np.zeros(rows - len(counts), counts.dtype)])
    total = int(counts.sum(dtype=np.int64))
    columns = {c.name: _array(value[c.name], f"{field.name}.{c.name}") for c in field.columns}
    for name, column in columns.items():
        if column.shape != (total,):
            raise WireError(f"{field.name}.{name}: {total} values by the counts, shape {column.shape} found")
    return Ragged(counts.astype(np.int32), columns)
