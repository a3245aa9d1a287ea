"""What a rank reads of a micro batch: its rows, its layers, its fields, as one read plan over its packed axis.

Pure. A rank's ``PackedRows`` says which tokens stand where; here each becomes chunk reads of its sequence's reference. Tokens that a
sequence has beyond the kept ones of its reference repeat its last row and are not real, as everywhere.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsref.errors import BadRef, PayloadError
from fsref.plan.combine import combined, repeated, shifted
from fsref.plan.coverage import missing_ranges, present_fields
from fsref.plan.packed import PackedRows, Span
from fsref.plan.reads import ReadPlan, plan_read
from fsref.plan.stages import held_layers
from fsref.refs import Alignment, Field, PayloadRef, Schema, TokenRange, flags_of


@dataclass(frozen=True)
class Source:
    """Where a sequence's rows come from."""

    ref: PayloadRef | None
    """``None``: the sequence has no arrays."""
    fields: tuple[str, ...]
    """What it is read for: all fields of the schema, or the routing only where it is a padding dummy."""


@dataclass(frozen=True)
class SlicePlan:
    """One rank's part of a micro batch."""

    rows: PackedRows
    read: ReadPlan
    """Fills buffers of ``rows.row_count`` rows; rows that it does not write are padding, or of sequences without arrays."""
    fields: tuple[str, ...]
    """In schema order: those that a sequence of the micro batch brings, with rows on this rank or not, so that all ranks agree."""
    layers: Mapping[str, tuple[int, ...]]
    """Global ids of the layer axis, of the fields that have one."""
    real: Mapping[str, tuple[TokenRange, ...]]
    """Rows that are real, per field, ascending."""

    def valid(self, name: str) -> NDArray[np.bool_]:
        """[R]: True where the field's row is a real one, not a filler, absent or padding."""
        return flags_of(self.real[name], self.rows.row_count)


def plan_slice(
    sources: Sequence[Source],
    schema: Schema,
    *,
    rows: PackedRows,
    fields: Sequence[str],
    layers: Sequence[int] | None,
    request_bytes_max: int,
    gap_bytes_max: int,
    targets_ahead: int = 0,
) -> SlicePlan:
    """The reads of one rank. ``sources[n]`` belongs to sequence n of ``rows``.

    ``fields``: those that the rank needs. ``layers``: its global layer ids (``rank_layers``), None for all; fields that have none of them
    are left out, layers that a field does not have are skipped. Limits as in ``plan_read``. ``targets_ahead``: 1 gives each row the values
    of target-aligned fields of the token that it predicts, the next one of its sequence, which may stand on another rank; 0 its own.
    Raises ``BadRef`` for a field that the schema does not have or a reference that does not add up, ``PayloadError`` for
    other sources than sequences.
    """
    if len(sources) != len(rows.lengths):
        raise PayloadError(f"{len(sources)} sources for {len(rows.lengths)} sequences")
    if unknown := sorted(set(fields) - {f.name for f in schema.fields}):
        raise BadRef(f"fields {unknown} asked for, the schema has {[f.name for f in schema.fields]}")
    axes = {f.name: f.layer_ids if layers is None else held_layers(f, layers) for f in schema.fields if f.layer_ids and f.name in fields}
    mine = [f for f in schema.fields if f.name in fields and axes.get(f.name) != ()]
    held = {n: _held(sources[n], schema, mine) for n in dict.fromkeys(rows.sequences)}
    plans: list[ReadPlan] = []
    real: dict[str, list[TokenRange]] = {f.name: [] for f in mine if any(f.name in names for names in held.values())}
    ahead = {Alignment.INPUT: 0, Alignment.TARGET: targets_ahead}
    spans = [(n, span) for n in sorted(set(ahead.values())) for span in rows.spans(ahead=n)]
    for n, span in spans:
        ref, names = sources[span.sequence].ref, held[span.sequence]
        wanted = [f for f in mine if f.name in names and ahead[f.alignment] == n]
        if ref is None or not wanted:
            continue
        plans += _span_plans(ref, schema, span, wanted, axes, request_bytes_max=request_bytes_max, gap_bytes_max=gap_bytes_max)
        gaps = missing_ranges(ref, schema)
        for f in wanted:
            real[f.name] += _real_rows(span, ref.token_count, gaps.get(f.name, ()))
    read = combined(plans, row_count=rows.row_count, request_bytes_max=request_bytes_max, gap_bytes_max=gap_bytes_max)
    return SlicePlan(rows, read, tuple(real), {n: axes[n] for n in real if n in axes}, {n: tuple(r) for n, r in real.items()})


def _held(source: Source, schema: Schema, mine: Sequence[Field]) -> set[str]:
    if source.ref is None:
        return set()
    return {f.name for f in mine} & set(source.fields) & set(present_fields(source.ref, schema))


def _span_plans(
    ref: PayloadRef,
    schema: Schema,
    span: Span,
    wanted: Sequence[Field],
    axes: Mapping[str, tuple[int, ...]],
    *,
    request_bytes_max: int,
    gap_bytes_max: int,
) -> Iterator[ReadPlan]:
    kept = span.tokens.clip(TokenRange(0, ref.token_count))
    extra = len(span.tokens) - len(kept)
    for group, layers in _by_layers(wanted, axes):
        if len(kept):
            plan = plan_read(
                ref,
                schema,
                tokens=kept,
                fields=[f.name for f in group],
                layers=layers,
                request_bytes_max=request_bytes_max,
                gap_bytes_max=gap_bytes_max,
            )
            yield shifted(plan, span.row)
        dense = [f.name for f in group if not f.ragged]
        if extra and dense and ref.token_count:
            last = plan_read(
                ref,
                schema,
                tokens=TokenRange(ref.token_count - 1, ref.token_count),
                fields=dense,
                layers=layers,
                request_bytes_max=request_bytes_max,
                gap_bytes_max=gap_bytes_max,
            )
            yield shifted(repeated(last, extra), span.row + len(kept))


def _by_layers(wanted: Sequence[Field], axes: Mapping[str, tuple[int, ...]]) -> list[tuple[list[Field], tuple[int, ...] | None]]:
    """Fields that can share a plan: those with the same layers, and with the first of them those without."""
    groups: dict[tuple[int, ...], list[Field]] = {}
    for f in wanted:
        if f.name in axes:
            groups.setdefault(axes[f.name], []).append(f)
    plain = [f for f in wanted if f.name not in axes]
    out: list[tuple[list[Field], tuple[int, ...] | None]] = [
        # All of them in stored order: asked for without a list, they are decoded in place.
        (group, None if all(f.layer_ids == layers for f in group) else layers)
        for layers, group in groups.items()
    ]
    if not out:
        return [(plain, None)] if plain else []
    return [([*plain, *out[0][0]], out[0][1]), *out[1:]]


def _real_rows(span: Span, kept_count: int, gaps: Sequence[TokenRange]) -> Iterator[TokenRange]:
    shift = span.row - span.tokens.start
    at, stop = span.tokens.start, min(span.tokens.stop, kept_count)
    for gap in gaps:
        if gap.start >= stop:
            break
        if gap.start > at:
            yield TokenRange(at + shift, gap.start + shift)
        at = max(at, gap.stop)
    if at < stop:
        yield TokenRange(at + shift, stop + shift)
