"""Sampling masks: the token ids that top-k, top-p and min-p kept, for each completion token.

Forms: vLLM's (0.32) is one list of ids per completion token; prime-rl's is ``{"ids", "counts"}``, each a packed int32 array, and the usual
CSR form of the same has ``offsets`` (one more than rows, from 0 on) in place of counts.
Ids keep the engine's order; there is no bound by top_k, because ties may keep more. An empty row of a sampled token means that no
truncation was in force: its flags say ``MASK_FULL``, so that it is told from a token that has no mask.
"""

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fsref.errors import WireError
from fsref.refs import MASK_FULL, MASK_TRUNCATED, Ragged
from fsref.refs.lints import rows_without
from fsref.wire.npy import check_shape
from fsref.wire.rows import first_repeat
from fsref.wire.text import decode_base64

_WHAT: Final = "sampling_mask"


def decode_sampling_mask(
    value: object,
    *,
    token_ids: Sequence[int] | NDArray[np.integer[Any]],
    vocab_count: int = 1 << 31,
    truncated: object = None,
    refuse_outside: bool = True,
) -> Ragged | None:
    """Counts int32 [T], ``ids`` int32 [N] and ``flags`` per row; ``None`` if the engine sent none.

    ``truncated`` is one bool per row where the engine says which rows leave ids out. With ``refuse_outside=False`` a row may lack the
    token sampled from it (a lint of the writer then counts it).

    Raises ``WireError`` for an unknown form, a number of rows other than completion tokens, ids outside ``[0, vocab_count)`` or
    repeated within a row, or a row that lacks the token sampled from it.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        counts, ids = _counts(value), _packed(value, "ids")
    elif isinstance(value, list):
        counts, ids = _from_lists(value)
    else:
        raise WireError(
            f"{_WHAT}: a list of lists (vLLM) or an object with ids and counts (prime-rl) expected, {type(value).__name__} found"
        )
    return check_mask(counts, ids, token_ids=token_ids, vocab_count=vocab_count, truncated=truncated, refuse_outside=refuse_outside)


def check_mask(
    counts: NDArray[np.int64],
    ids: NDArray[np.int64],
    *,
    token_ids: Sequence[int] | NDArray[np.integer[Any]],
    vocab_count: int = 1 << 31,
    truncated: object = None,
    refuse_outside: bool = True,
) -> Ragged:
    """``decode_sampling_mask`` from arrays: counts [T] and ids [N]."""
    if len(counts) != len(token_ids):
        raise WireError(f"{_WHAT}: {len(counts)} rows found for {len(token_ids)} completion tokens")
    if (counts.size and int(counts.min()) < 0) or int(counts.sum()) != len(ids):
        raise WireError(f"{_WHAT}: counts that sum to {int(counts.sum())} found for {len(ids)} ids")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_count:
        raise WireError(f"{_WHAT}: ids {int(ids.min())}..{int(ids.max())} found, 0..{vocab_count - 1} are legal")
    if (repeat := first_repeat(counts, ids)) is not None:
        raise WireError(f"{_WHAT}[{repeat[0]}]: token id {repeat[1]} stands twice")
    lacking = rows_without(counts, ids, np.asarray(token_ids, dtype=np.int64)) if refuse_outside else np.zeros(0, np.intp)
    if len(lacking):
        n = int(lacking[0])
        raise WireError(f"{_WHAT}[{n}]: the sampled token {int(token_ids[n])} is not among the {int(counts[n])} ids that were kept")
    flags = np.where(counts == 0, MASK_FULL, 0).astype(np.uint8) | _truncated(truncated, len(counts))
    return Ragged(counts.astype(np.int32), {"ids": ids.astype(np.int32)}, row_columns={"flags": flags})


def _truncated(value: object, rows: int) -> NDArray[np.uint8]:
    if value is None:
        return np.zeros(rows, np.uint8)
    if not isinstance(value, list) or len(value) != rows or any(type(v) is not bool for v in value):
        raise WireError(f"{_WHAT}: one bool per row expected to say which are truncated, {value!r:.80} found for {rows} rows")
    return np.where(value, MASK_TRUNCATED, 0).astype(np.uint8)


def _from_lists(rows: list[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    for n, row in enumerate(rows):
        if not isinstance(row, list):
            raise WireError(f"{_WHAT}[{n}]: a list of token ids expected, {type(row).__name__} found")
    flat = list(chain.from_iterable(rows))
    foreign = set(map(type, flat)) - {int}
    if foreign:
        raise WireError(f"{_WHAT}: token ids expected, {', '.join(sorted(t.__name__ for t in foreign))} found")
    if flat and not 0 <= min(flat) <= max(flat) < 1 << 31:
        raise WireError(f"{_WHAT}: ids {min(flat)}..{max(flat)} are not token ids")
    return np.asarray([len(r) for r in rows], dtype=np.int64), np.asarray(flat, dtype=np.int64)


def _counts(value: Mapping[str, Any]) -> NDArray[np.int64]:
    if "offsets" not in value or "counts" in value:
        return _packed(value, "counts")
    offsets = _packed(value, "offsets")
    if not offsets.size or offsets[0] != 0:
        raise WireError(f"{_WHAT}.offsets: they start with 0 and are one more than rows; {offsets[:3].tolist()} found")
    return np.diff(offsets)


def _packed(value: Mapping[str, Any], name: str) -> NDArray[np.int64]:
    packed, what = value.get(name), f"{_WHAT}.{name}"
    if not isinstance(packed, Mapping) or packed.get("dtype") != "int32":
        raise WireError(f"{what}: a packed int32 array (data, shape, dtype) expected, {packed!r:.80} found")
    shape = packed.get("shape")
    if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int:
        raise WireError(f"{what}: shape {shape!r} is not one whole number in a list")
    data = decode_base64(packed.get("data"), what=what)
    check_shape((shape[0],), byte_count=len(data), itemsize=4, what=what)
    return np.frombuffer(data, "<i4").astype(np.int64)


def encode_sampling_mask(mask: Ragged) -> list[list[int]]:
    """vLLM 0.32's form: one list of ids per completion token."""
    bounds = np.concatenate(([0], np.cumsum(mask.counts, dtype=np.int64))).tolist()
    ids = mask.columns["ids"].tolist()
    return [ids[a:b] for a, b in pairwise(bounds)]
