"""A rank's part of a micro batch in memory: its tokens of its layers of its fields, at their rows, with what is padding and what is real.

Owns the buffers between a ``SlicePlan`` and arrays, and the rows that nobody stored: zeros where a sequence has no arrays, balanced expert
ids in padding (``fsref.plan.balance``), zeros and empty rows of other fields there. Refuses planning, torch and process groups.

Shape letters: R rows of the rank, N values of a ragged field.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fsref.buffers import Empty
from fsref.plan import SlicePlan, Source, plan_slice, with_balanced_padding
from fsref.plan.packed import PackedRows
from fsref.reader import DenseOut, Out, RaggedOut, Reader, allocate
from fsref.refs import Dense, Field, FieldData, Ragged, Schema, ranges_where
from fsref.steps import SampleSequence

ExpertDtype = Literal["stored", "uint16", "int32", "int64"]
"""What expert ids are read into. Collectives carry no 16-bit integers, so trainers mostly take int32 or int64."""


@dataclass(frozen=True, eq=False)
class RankSlice:
    """The arrays of one rank's rows. Writable, in C order."""

    rows: PackedRows
    """Which token stands at each row; gives ``cu_seqlens``, ``positions`` and ``padding``."""
    fields: Mapping[str, FieldData]
    """Dense [R, *row_shape] with the layer axis cut to ``layers``, or ragged counts [R] and columns [N]; ``missing``: what is not real."""
    valid: Mapping[str, NDArray[np.bool_]]
    """bool [R] per field: False where the row is a filler, padding, or of a sequence without arrays."""
    padding: NDArray[np.bool_]
    """bool [R]: True where no token stands."""
    layers: Mapping[str, tuple[int, ...]]
    """Global ids of the layer axis of each field that has one."""


class SliceBuffers:
    """The buffers of one rank's slice: made before the fetch, filled by the reader through ``out``, finished after it."""

    def __init__(
        self,
        plan: SlicePlan,
        schema: Schema,
        *,
        step: int,
        expert_shards: int,
        expert_dtype: ExpertDtype = "stored",
        empty: Empty = np.empty,
    ) -> None:
        """``step`` and ``expert_shards``: as in ``balanced_rows``. ``empty`` makes the buffers: ``BufferPool.empty`` where memory is to be
        used again.
        """
        self._plan, self._schema, self._empty = plan, schema, empty
        self._step, self._shards = step, expert_shards
        self._out = {name: self._buffer(schema.field(name), expert_dtype) for name in plan.fields}

    @property
    def out(self) -> Out:
        """Where the plan's reads go, for ``Reader.submit`` or ``Reader.read_into``."""
        return self._out

    def finish(self) -> RankSlice:
        """The arrays. Call once, after the plan ran without an error."""
        plan = self._plan
        valid = {name: plan.valid(name) for name in plan.fields}
        fields = {name: self._finished(name, out, valid[name]) for name, out in self._out.items()}
        return RankSlice(plan.rows, fields, valid, plan.rows.padding(), plan.layers)

    def _buffer(self, spec: Field, expert_dtype: ExpertDtype) -> DenseOut | RaggedOut:
        dtype = expert_dtype if spec.expert_count and not spec.ragged and expert_dtype != "stored" else ""
        layers = self._plan.layers.get(spec.name)
        return allocate(self._plan.read, self._schema, spec.name, layers=layers, dtype=dtype, empty=self._empty)

    def _finished(self, name: str, out: DenseOut | RaggedOut, valid: NDArray[np.bool_]) -> FieldData:
        spec, missing = self._schema.field(name), ranges_where(~valid)
        if isinstance(out, RaggedOut):
            count = out.compact(self._plan.read, name)
            return Ragged(out.counts, {n: c[:count] for n, c in out.columns.items()}, missing, out.row_columns)
        out.rows[~self._written(name)] = 0
        return Dense(self._padded(spec, out.rows), missing, spec.id_space)

    def _padded(self, spec: Field, rows: NDArray[Any]) -> NDArray[Any]:
        if not spec.expert_count or not spec.layer_ids or rows.ndim != 3:
            return rows
        filled, _ = with_balanced_padding(
            rows,
            slots=self._plan.rows.row_slots(),
            step=self._step,
            layer_ids=self._plan.layers[spec.name],
            expert_count=spec.expert_count,
            shards=self._shards,
        )
        return filled

    def _written(self, name: str) -> NDArray[np.bool_]:
        written = np.zeros(self._plan.rows.row_count, np.bool_)
        for _, _, read in self._plan.read.reads(name):
            count = len(read.rows) if read.copies == 1 else read.copies
            written[read.out_start : read.out_start + count] = True
        return written


def buffer_bytes(plan: SlicePlan, schema: Schema, *, expert_dtype: ExpertDtype = "stored") -> int:
    """Bytes of the buffers that ``SliceBuffers`` would make for a plan."""
    made: list[int] = []

    def counted(shape: Sequence[int], dtype: DTypeLike, /) -> NDArray[Any]:
        made.append(math.prod(shape) * np.dtype(dtype).itemsize)
        return np.empty(0, dtype)

    SliceBuffers(plan, schema, step=0, expert_shards=1, expert_dtype=expert_dtype, empty=counted)
    return sum(made)


def fields_wanted(sequence: SampleSequence, schema: Schema) -> tuple[str, ...]:
    """What a sequence's reference is read for: every field, or for a padding dummy the routing rows only."""
    return tuple(f.name for f in schema.fields if not sequence.padding or f.expert_count)


def sources_of(sequences: Sequence[SampleSequence], schema: Schema) -> tuple[Source, ...]:
    """The sources of a step file's sequences, for ``plan_slice``."""
    return tuple(Source(s.ref, fields_wanted(s, schema)) for s in sequences)


def read_slice(
    reader: Reader,
    sources: Sequence[Source],
    schema: Schema,
    *,
    rows: PackedRows,
    fields: Sequence[str],
    layers: Sequence[int] | None,
    step: int,
    expert_shards: int,
    expert_dtype: ExpertDtype = "stored",
) -> RankSlice:
    """Plans, fetches and assembles one rank's part of a micro batch; arguments as in ``plan_slice`` and ``SliceBuffers``.

    Raises the first ``StoreError``, ``BadRef`` for references that do not add up, ``ConfigError`` for experts that do not divide.
    """
    plan = plan_slice(
        sources,
        schema,
        rows=rows,
        fields=fields,
        layers=layers,
        request_bytes_max=reader.request_bytes_max,
        gap_bytes_max=reader.gap_bytes_max,
    )
    buffers = SliceBuffers(plan, schema, step=step, expert_shards=expert_shards, expert_dtype=expert_dtype)
    reader.read_into(plan.read, buffers.out)
    return buffers.finish()
