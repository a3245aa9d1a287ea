"""Which segment of a reference gives which token's row, field by field, and what is missing.

Segments may overlap and leave gaps. For each token the first segment, in the reference's order, that has a real row gives it; a token that
none has a row for is missing. Everything is computed on ranges, never per token, so a hostile token count costs nothing.
"""

import enum
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from fsref.plan.index import check_schema, decode_missing, held_fields
from fsref.refs import PayloadRef, Schema, Segment, TokenRange


class State(enum.StrEnum):
    """How much of a field a reference has for its kept tokens."""

    COMPLETE = "complete"
    """Every row."""
    PARTIAL = "partial"
    """Some rows are missing."""
    ABSENT = "absent"
    """The engine was asked for it, and no row came."""
    NOT_REQUESTED = "not requested"
    """Nobody asked for it."""


class Piece(NamedTuple):
    """Successive tokens whose rows stand one after the other in one segment's object."""

    start: int
    stop: int
    segment: int
    """Index into ``PayloadRef.segments``."""
    shift: int
    """Row of the object = token + shift."""


class Overlap(NamedTuple):
    """Tokens for which a later segment has real rows too."""

    start: int
    stop: int
    first: int
    """The segment whose rows count."""
    later: int


class FieldCoverage(NamedTuple):
    """Of all stored tokens, kept or not."""

    pieces: tuple[Piece, ...]
    """Ascending, apart."""
    overlaps: tuple[Overlap, ...]


def is_whole(ref: PayloadRef) -> bool:
    """Whether one object holds all tokens from its first row on: the usual reference, which needs no merging."""
    return len(ref.segments) == 1 and ref.segments[0].row_start == 0 and ref.segments[0].tokens == TokenRange(0, ref.hashed_count)


def field_coverage(ref: PayloadRef, schema: Schema, name: str) -> FieldCoverage:
    """Who gives the rows of one field. Raises ``BadRef`` for a malformed reference."""
    owned: list[Piece] = []
    overlaps: list[Overlap] = []
    for number, segment in enumerate(ref.segments):
        if name not in held_fields(segment, schema):
            continue
        gaps = decode_missing(segment, schema).get(name, ())
        shift = segment.row_start - segment.token_start
        for start, stop in _real_rows(segment, gaps):
            _claim(owned, overlaps, Piece(start - shift, stop - shift, number, shift))
    return FieldCoverage(tuple(owned), tuple(overlaps))


def _real_rows(segment: Segment, gaps: tuple[TokenRange, ...]) -> Iterator[tuple[int, int]]:
    at = segment.row_start
    for gap in gaps:
        if gap.start > at:
            yield at, min(gap.start, segment.row_stop)
        at = max(at, gap.stop)
        if at >= segment.row_stop:
            return
    yield at, segment.row_stop


def _claim(owned: list[Piece], overlaps: list[Overlap], new: Piece) -> None:
    """Gives ``new`` the tokens that nobody owns, and notes those that somebody does."""
    if new.start >= new.stop:
        return
    first = at = bisect_right(owned, new.start, key=lambda p: p.stop)
    cursor = new.start
    free: list[Piece] = []
    while at < len(owned) and owned[at].start < new.stop:
        held = owned[at]
        if held.start > cursor:
            free.append(new._replace(start=cursor, stop=held.start))
        overlaps.append(Overlap(max(cursor, held.start), min(new.stop, held.stop), held.segment, new.segment))
        free.append(held)
        cursor = held.stop
        at += 1
    if cursor < new.stop:
        free.append(new._replace(start=cursor))
    owned[first:at] = free


def present_fields(ref: PayloadRef, schema: Schema) -> tuple[str, ...]:
    """Fields of which the reference has any row (of an empty payload: that it declares), in schema order."""
    check_schema(ref, schema)
    if is_whole(ref):
        return held_fields(ref.segments[0], schema)
    held = {name for s in ref.segments for name in held_fields(s, schema)}
    return tuple(f.name for f in schema.fields if f.name in held and field_coverage(ref, schema, f.name).pieces)


def asked_fields(ref: PayloadRef, schema: Schema) -> tuple[str, ...]:
    """Fields that the engine was asked for, whether rows came or not, in schema order."""
    check_schema(ref, schema)
    found = {name for s in ref.segments for name in (*held_fields(s, schema), *decode_missing(s, schema))}
    return tuple(f.name for f in schema.fields if f.name in found)


def missing_ranges(ref: PayloadRef, schema: Schema) -> dict[str, tuple[TokenRange, ...]]:
    """Missing token ranges per field that was asked for and lacks any, within the kept tokens. Raises ``BadRef``."""
    if is_whole(ref):
        if not ref.segments[0].missing:
            return {}
        kept = TokenRange(0, ref.token_count)
        found = {n: tuple(c for r in ranges if len(c := r.clip(kept))) for n, ranges in decode_missing(ref.segments[0], schema).items()}
    else:
        found = {n: gaps_of(field_coverage(ref, schema, n), TokenRange(0, ref.token_count)) for n in asked_fields(ref, schema)}
    return {n: ranges for n, ranges in found.items() if ranges}


def gaps_of(coverage: FieldCoverage, tokens: TokenRange) -> tuple[TokenRange, ...]:
    """The tokens that no piece holds."""
    out = []
    at = tokens.start
    for p in coverage.pieces:
        if p.start >= tokens.stop:
            break
        if p.start > at:
            out.append(TokenRange(at, p.start))
        at = max(at, p.stop)
    if at < tokens.stop:
        out.append(TokenRange(at, tokens.stop))
    return tuple(out)


def states(ref: PayloadRef, schema: Schema) -> dict[str, State]:
    """The state of every field of the schema, for the kept tokens."""
    present, asked, missing = present_fields(ref, schema), asked_fields(ref, schema), missing_ranges(ref, schema)
    out = {}
    for f in schema.fields:
        if f.name not in asked:
            out[f.name] = State.NOT_REQUESTED
        elif f.name not in present or missing.get(f.name) == (TokenRange(0, ref.token_count),):
            out[f.name] = State.ABSENT
        else:
            out[f.name] = State.PARTIAL if f.name in missing else State.COMPLETE
    return out


def sources(ref: PayloadRef, schema: Schema, name: str) -> tuple[tuple[TokenRange, str], ...]:
    """Which source gave each run of real rows of a field, ascending."""
    return tuple((TokenRange(p.start, p.stop), ref.segments[p.segment].source) for p in field_coverage(ref, schema, name).pieces)
