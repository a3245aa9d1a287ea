"""Rows of several replies to one array, by absolute token position: never by concatenation.

A reply may start anywhere, repeat what came before, lack rows in the middle, or bring none. A real row replaces a missing one; of two real
rows the earlier piece's stays, and a difference is counted. What no piece brings is missing.

Shape letters: T tokens, R rows of one piece.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fsref.errors import PayloadError
from fsref.refs.export import cut
from fsref.refs.names import TokenRange, flags_of, ranges_where
from fsref.refs.payload import Dense, FieldData, Ragged


@dataclass(frozen=True, eq=False)
class Piece:
    """What one reply, node or object says of one field: rows of successive tokens from ``start`` on."""

    start: int
    """Absolute position of the first row."""
    data: FieldData | None
    """[R, ...]; its ``missing`` counts from the piece's first row. ``None``: nothing came."""
    source: str = ""
    """Who says so, for example ``prefill`` or ``decode``."""

    @property
    def row_count(self) -> int:
        if self.data is None:
            return 0
        return len(self.data.rows) if isinstance(self.data, Dense) else len(self.data.counts)

    @property
    def tokens(self) -> TokenRange:
        return TokenRange(self.start, self.start + self.row_count)

    def within(self, tokens: TokenRange) -> "Piece":
        """The part of this piece that stands at ``tokens``."""
        kept = self.tokens.clip(tokens)
        if self.data is None or not len(kept):
            return Piece(kept.start, None, self.source)
        return replace(self, start=kept.start, data=cut(self.data, kept.start - self.start, kept.stop - self.start))

    def lacking(self, tokens: Iterable[TokenRange]) -> "Piece":
        """This piece with its rows at ``tokens`` marked missing, for example because their cache came from elsewhere."""
        if self.data is None:
            return self
        gone = flags_of(self.data.missing, self.row_count)
        for r in tokens:
            here = r.clip(self.tokens)
            gone[here.start - self.start : here.stop - self.start] = True
        missing = ranges_where(gone)
        if isinstance(self.data, Dense):
            return replace(self, data=replace(self.data, missing=missing))
        keep = np.repeat(~gone, self.data.counts)
        columns = {n: c[keep] for n, c in self.data.columns.items()}
        counts = np.where(gone, 0, self.data.counts).astype(np.int32)
        return replace(self, data=Ragged(counts, columns, missing, self.data.row_columns))


@dataclass(frozen=True, eq=False)
class Merged:
    """One field over all tokens; it shares no memory with the pieces."""

    data: FieldData
    conflicts: int
    """Rows that two pieces gave differently."""
    sources: tuple[tuple[TokenRange, str], ...]
    """Which source each run of real rows comes from, ascending."""


def merge(pieces: Sequence[Piece], *, token_count: int, gaps: Literal["missing", "refuse"] = "missing") -> Merged | None:
    """The rows of ``pieces``, in order of precedence, over ``token_count`` tokens; ``None`` if no piece brings any.

    With ``gaps="refuse"`` missing rows in front of or between real ones raise ``PayloadError`` that names them (the end of a sequence may
    always lack rows: its last sampled token was never fed to the model). Rows beyond the tokens, and pieces of different form, raise too.
    """
    found = [p for p in pieces if p.data is not None and p.row_count]
    if not found:
        return None
    for p in found:
        if p.tokens.stop > token_count:
            raise PayloadError(
                f"rows of tokens [{p.start}, {p.tokens.stop}) found, the sequence has {token_count} tokens: surplus rows are never cut"
            )
    if len({type(p.data) for p in found}) > 1:
        raise PayloadError("dense and ragged pieces of one field")
    owner = np.full(token_count, -1, np.int32)
    takes = []
    for number, p in enumerate(found):
        assert p.data is not None
        here = owner[p.start : p.tokens.stop]
        take = (here < 0) & ~flags_of(p.data.missing, p.row_count)
        here[take] = number
        takes.append(take)
    missing = ranges_where(owner < 0)
    if gaps == "refuse":
        _refuse_gaps(missing, token_count, found)
    conflicts = sum(_conflicts(found, number, owner) for number in range(1, len(found)))
    dense = [(p, p.data) for p in found if isinstance(p.data, Dense)]
    data: FieldData = (
        _dense(dense, takes, missing, token_count)
        if dense
        else _ragged([(p, p.data) for p in found if isinstance(p.data, Ragged)], takes, missing, token_count)
    )
    return Merged(data, conflicts, _sources(found, owner))


def splice(prefill: Piece, decode: Piece, *, prompt_count: int, token_count: int, external: Sequence[TokenRange] = ()) -> Merged | None:
    """Disaggregated serving: prompt rows from ``prefill``, the rest from ``decode``, whose prompt rows are not computed there.

    ``external`` names tokens whose cache was loaded from elsewhere: nobody computed their rows, so they are missing.
    """
    front = replace(prefill, source=prefill.source or "prefill").within(TokenRange(0, prompt_count)).lacking(external)
    rest = replace(decode, source=decode.source or "decode").within(TokenRange(prompt_count, token_count))
    return merge([front, rest], token_count=token_count)


def _refuse_gaps(missing: Sequence[TokenRange], token_count: int, pieces: Sequence[Piece]) -> None:
    inner = [r for r in missing if r.stop < token_count]
    if inner:
        first = inner[0]
        held = ", ".join(f"[{p.start}, {p.tokens.stop})" for p in pieces[:4])
        raise PayloadError(
            f"rows of tokens [{first.start}, {first.stop}) are missing: the pieces hold {held}; keep the rows of earlier replies, "
            "or ask the engine for rows from an earlier start"
        )


def _sources(pieces: Sequence[Piece], owner: NDArray[np.int32]) -> tuple[tuple[TokenRange, str], ...]:
    out: list[tuple[TokenRange, str]] = []
    for r in ranges_where(owner >= 0):
        edges = [r.start, *(r.start + 1 + np.flatnonzero(np.diff(owner[r.start : r.stop]))).tolist(), r.stop]
        out += [(TokenRange(a, b), pieces[int(owner[a])].source) for a, b in pairwise(edges)]
    return tuple(out)


def _conflicts(pieces: Sequence[Piece], number: int, owner: NDArray[np.int32]) -> int:
    """Real rows of a piece that an earlier one gave otherwise."""
    p = pieces[number]
    assert p.data is not None
    held = owner[p.start : p.tokens.stop]
    both = (held >= 0) & (held < number) & ~flags_of(p.data.missing, p.row_count)
    out = 0
    for other in np.unique(held[both]).tolist():
        earlier = pieces[other]
        assert earlier.data is not None
        at = np.flatnonzero(both & (held == other))
        out += int((~same_rows(p.data, earlier.data, at, at + p.start - earlier.start)).sum())
    return out


def same_rows(a: FieldData, b: FieldData, rows_a: NDArray[np.intp], rows_b: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Which of the paired rows are equal, bit for bit (dense rows of different width by value)."""
    if isinstance(a, Dense):
        assert isinstance(b, Dense)
        left, right = a.rows[rows_a], b.rows[rows_b]
        if left.dtype == right.dtype:
            left, right = _bits(left), _bits(right)
        equal: NDArray[np.bool_] = (left == right).all(axis=tuple(range(1, left.ndim)))
        return equal
    assert isinstance(b, Ragged)
    same: NDArray[np.bool_] = a.counts[rows_a] == b.counts[rows_b]
    for name, values in a.row_columns.items():
        same &= values[rows_a] == b.row_columns.get(name, np.zeros(len(b.counts), values.dtype))[rows_b]
    rows = np.flatnonzero(same)
    counts = a.counts[rows_a[rows]].astype(np.int64)
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    at_a, at_b = (
        np.repeat((np.cumsum(d.counts, dtype=np.int64) - d.counts)[r[rows]], counts) + within for d, r in ((a, rows_a), (b, rows_b))
    )
    differs = np.zeros(len(at_a), np.bool_)
    for name, values in a.columns.items():
        differs |= (_bits(values[at_a]) != _bits(b.columns[name][at_b])).any(axis=1)
    same[rows] = np.bincount(np.repeat(np.arange(len(rows)), counts), weights=differs, minlength=len(rows)) == 0
    return same


def _bits(rows: NDArray[Any]) -> NDArray[Any]:
    """The bytes of rows [R, ...], so that NaNs equal themselves and -0.0 is not 0.0."""
    return np.ascontiguousarray(rows).reshape(len(rows), math.prod(rows.shape[1:])).view(np.uint8)


def _dense(
    pieces: Sequence[tuple[Piece, Dense]], takes: Sequence[NDArray[np.bool_]], missing: tuple[TokenRange, ...], token_count: int
) -> Dense:
    shapes = {d.rows.shape[1:] for _, d in pieces}
    if len(shapes) > 1:
        raise PayloadError(f"pieces have rows of shapes {sorted(shapes)}")
    spaces = {d.id_space for _, d in pieces if d.id_space}
    if len(spaces) > 1:
        raise PayloadError(f"pieces number experts differently: {sorted(spaces)}")
    out = np.zeros((token_count, *shapes.pop()), np.result_type(*(d.rows.dtype for _, d in pieces)))
    for (p, d), take in zip(pieces, takes, strict=True):
        out[p.start : p.tokens.stop][take] = d.rows[take]
    return Dense(out, missing, spaces.pop() if spaces else "")


def _ragged(
    pieces: Sequence[tuple[Piece, Ragged]], takes: Sequence[NDArray[np.bool_]], missing: tuple[TokenRange, ...], token_count: int
) -> Ragged:
    first = pieces[0][1]
    if any(set(d.columns) != set(first.columns) for _, d in pieces):
        raise PayloadError(f"pieces have columns {[sorted(d.columns) for _, d in pieces]}")
    counts = np.zeros(token_count, np.int32)
    for (p, d), take in zip(pieces, takes, strict=True):
        counts[p.start : p.tokens.stop][take] = d.counts[take]
    offsets = np.cumsum(counts, dtype=np.int64) - counts
    columns = {
        n: np.zeros(int(counts.sum(dtype=np.int64)), np.result_type(*(d.columns[n].dtype for _, d in pieces))) for n in first.columns
    }
    rows = {n: np.zeros(token_count, r.dtype) for _, d in reversed(pieces) for n, r in d.row_columns.items()}
    for (p, d), take in zip(pieces, takes, strict=True):
        kept = d.counts[take]
        within = np.arange(int(kept.sum(dtype=np.int64))) - np.repeat(np.cumsum(kept, dtype=np.int64) - kept, kept)
        to = np.repeat(offsets[p.start : p.tokens.stop][take], kept) + within
        for n, values in d.columns.items():
            columns[n][to] = values[np.repeat(take, d.counts)]
        for n, values in d.row_columns.items():
            rows[n][p.start : p.tokens.stop][take] = values[take]
    return Ragged(counts, columns, missing, rows)
