"""Where a read plan's rows and values go: the caller's buffers, how much room they need, and the arrays that come of them.

Owns their shapes and checks. Refuses I/O and decoding: nothing here knows a byte of an object.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsref.buffers import Empty
from fsref.errors import PayloadError
from fsref.plan import ReadPlan
from fsref.refs import Dense, Field, FieldData, Ragged, Schema, TokenRange


@dataclass
class DenseOut:
    """Where a dense field goes: ``rows`` [n, *row_shape] (the layer axis cut to the planned layers), C-contiguous along tokens."""

    rows: NDArray[Any]


@dataclass
class RaggedOut:
    """Where a ragged field goes.

    ``counts`` int32 [n] and ``row_columns`` (one array [n] per row column) are filled, 0 where nothing is known. Each column needs room for
    ``values_max`` values (the sum over the plan's reads); the wanted values of each read stand at ``pieces`` once the plan ran, and
    ``compact`` moves them together.
    """

    counts: NDArray[np.int32]
    columns: Mapping[str, NDArray[Any]]
    row_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    leads: dict[tuple[int, int], int] = field(default_factory=dict)

    def pieces(self, plan: ReadPlan, name: str) -> list[slice]:
        """Per read of the field, in the order of rows: the slice of the column buffers that belongs to the wanted rows."""
        out = []
        for segment, number, read in plan.reads(name):
            start = read.value_base + self.leads.get((segment, number), 0)
            count = int(self.counts[read.out_start : read.out_start + len(read.rows)].sum(dtype=np.int64))
            out.append(slice(start, start + count))
        return out

    def compact(self, plan: ReadPlan, name: str) -> int:
        """Moves the wanted values to the front of every column; returns how many there are."""
        at = 0
        for piece in self.pieces(plan, name):
            size = piece.stop - piece.start
            if piece.start != at:
                for column in self.columns.values():
                    column[at : at + size] = column[piece].copy()
            at += size
        return at


Out = Mapping[str, DenseOut | RaggedOut]


def values_max(plan: ReadPlan, name: str) -> int:
    """Room that each column of a ragged field needs for this plan."""
    return sum(r.values_max for s in plan.segments for r in s.fields if r.field.name == name)


def check_buffers(plan: ReadPlan, out: Out) -> None:
    """Sets all counts to 0. Raises ``PayloadError`` for a buffer whose dtype does not hold the stored one."""
    for segment in plan.segments:
        for read in segment.fields:
            target = out[read.field.name]
            if isinstance(target, DenseOut):
                if target.rows.dtype != read.field.dtype and not np.can_cast(read.field.dtype, target.rows.dtype, "safe"):
                    raise PayloadError(f"field {read.field.name!r}: a buffer of {target.rows.dtype} cannot hold {read.field.dtype}")
                continue
            target.counts[:] = 0
            wanted = {c.name: c.dtype for c in read.field.columns}
            if any(column.dtype != wanted.get(name) for name, column in target.columns.items()):
                raise PayloadError(f"field {read.field.name!r}: columns are {wanted}; buffers of other dtypes were given")


def allocate(
    plan: ReadPlan, schema: Schema, name: str, *, layers: Sequence[int] | None = None, dtype: str = "", empty: Empty = np.empty
) -> DenseOut | RaggedOut:
    """Buffers for one field of a plan, made by ``empty``. ``dtype``: of dense rows, a wider one than the stored; empty: the stored one."""
    f = schema.field(name)
    tokens = len(plan.tokens)
    if f.ragged:
        room = values_max(plan, name)
        columns = {c.name: empty((room,), c.dtype) for c in f.columns}
        counts = empty((tokens,), np.int32)
        row_columns = {c.name: empty((tokens,), c.dtype) for c in f.row_columns}
        for rows in (counts, *row_columns.values()):
            rows[:] = 0
        return RaggedOut(counts, columns, row_columns)
    shape = f.row_shape
    if layers is not None and f.layer_ids:
        shape = (len(layers), *shape[1:])
    return DenseOut(empty((tokens, *shape), dtype or f.dtype))


def result(out: DenseOut | RaggedOut, plan: ReadPlan, spec: Field, missing: tuple[TokenRange, ...]) -> FieldData:
    """One field of a plan that ran, as arrays."""
    if isinstance(out, DenseOut):
        return Dense(out.rows, missing, spec.id_space)
    count = out.compact(plan, spec.name)
    return Ragged(out.counts, {n: c[:count] for n, c in out.columns.items()}, missing, out.row_columns)


def shifted(ranges: Sequence[TokenRange], wanted: TokenRange) -> tuple[TokenRange, ...]:
    """Ranges of a sample as ranges of its wanted tokens."""
    clipped = (r.clip(wanted) for r in ranges)
    return tuple(TokenRange(r.start - wanted.start, r.stop - wanted.start) for r in clipped if len(r))
