"""The buffers of one micro batch, between read plans and tensors: each field cut, concatenated and marked for what is real.

Owns the places that the reader fills; the result is byte for byte what the same arrays carried inline would give. Refuses I/O and policy.

Shape letters: T tokens of the packed micro batch, S sequences, N values of a ragged field.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fsref.plan import ReadPlan
from fsref.reader import DenseOut, Out, RaggedOut, values_max
from fsref.refs import Field, Schema, TokenRange, flags_of
from fsref.steps import MicroBatch
from fsref.tensors.batch import PackedMicroBatch, pack_tokens
from fsref.tensors.dtypes import ExpertIds, buffer_dtype, dense_tensor, plain_tensor
from fsref.tensors.fields import DenseTensor, RaggedTensor

Allocate = Callable[[tuple[int, ...], str], NDArray[Any]]
"""An array of a shape and dtype, with anything in it: ``numpy.empty``, or a pool of buffers."""


@dataclass
class _FieldBuffers:
    """One field's packed buffers, filled by the reader."""

    spec: Field
    rows: NDArray[Any]
    """Dense: [T, *row_shape], in the dtype of the tensor where decoding can widen to it. Ragged: counts int32 [T]."""
    columns: dict[str, NDArray[Any]]
    """Ragged: room for the values of all sequences."""
    valid: NDArray[np.bool_]
    extra: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Ragged: [T] per row column."""
    outs: list[tuple[RaggedOut, ReadPlan, int]] = field(default_factory=list)
    """Ragged: each sequence's views, its plan, and where its room begins."""


class Assembly:
    """The buffers of one micro batch: made before the fetch, handed to the reader as views, turned into tensors after it.

    ``plans[i]`` is the read plan of sequence i, None where it has no reference; ``missing[i]`` its missing ranges per field.
    Fields that no sequence reads are absent from the result. ``layers``: the global layer ids that the plans were made with, None for all.
    ``expert_ids``: the form of expert ids, as no collective carries 16-bit integers. ``allocate``: where buffers come from; the tensors
    use their memory, so they stay taken until the result is dropped. Raises ``ConfigError`` for a form that does not hold the experts.
    """

    def __init__(
        self,
        micro_batch: MicroBatch,
        schema: Schema,
        *,
        plans: Sequence[ReadPlan | None],
        missing: Sequence[Mapping[str, Sequence[TokenRange]]],
        layers: Sequence[int] | None = None,
        expert_ids: ExpertIds = "int32",
        allocate: Allocate = np.empty,
    ) -> None:
        self._micro_batch, self._plans, self._allocate = micro_batch, plans, allocate
        self._layers, self._expert_ids = layers, expert_ids
        self._tokens = micro_batch.token_count
        starts = np.cumsum([0, *(s.token_count for s in micro_batch.sequences)])
        held = {r.field.name for p in plans if p is not None for s in p.segments for r in s.fields}
        self._buffers: dict[str, _FieldBuffers] = {}
        self._outs: list[dict[str, DenseOut | RaggedOut]] = [{} for _ in plans]
        for spec in schema.fields:
            if spec.name in held:
                self._buffers[spec.name] = self._ragged(spec, starts) if spec.ragged else self._dense(spec, starts)
        for number, plan in enumerate(plans):
            if plan is not None:
                self._mark(number, plan, int(starts[number]), missing[number])

    @property
    def byte_count(self) -> int:
        """Bytes of all buffers."""
        return sum(a.nbytes for b in self._buffers.values() for a in (b.rows, b.valid, *b.columns.values(), *b.extra.values()))

    def out(self, number: int) -> Out:
        """Where sequence ``number``'s plan writes."""
        return self._outs[number]

    def finish(self) -> PackedMicroBatch:
        """The tensors. Call once, after every plan ran without an error."""
        fields = {name: self._ragged_field(b, name) if b.spec.ragged else self._dense_field(b, name) for name, b in self._buffers.items()}
        bytes_read = sum(p.byte_count for p in self._plans if p is not None)
        return replace(pack_tokens(self._micro_batch), fields=fields, bytes_read=bytes_read)

    def _ragged_field(self, buffers: _FieldBuffers, name: str) -> RaggedTensor:
        count = _compact(buffers, name)
        columns = {c: plain_tensor(v[:count], what=f"field {name!r} column {c!r}") for c, v in buffers.columns.items()}
        rows = {c: plain_tensor(v, what=f"field {name!r} column {c!r}") for c, v in buffers.extra.items()}
        return RaggedTensor(torch.from_numpy(buffers.rows), columns, torch.from_numpy(buffers.valid), rows)

    def _dense_field(self, buffers: _FieldBuffers, name: str) -> DenseTensor:
        self._fill(buffers, name)
        spec = buffers.spec
        rows = dense_tensor(buffers.rows, spec, self._expert_ids)
        return DenseTensor(rows, torch.from_numpy(buffers.valid), _layers_of(spec, self._layers), spec.expert_count)

    def _dense(self, spec: Field, starts: NDArray[np.int64]) -> _FieldBuffers:
        shape = spec.row_shape
        if spec.layer_ids:
            shape = (len(_layers_of(spec, self._layers)), *shape[1:])
        rows = self._allocate((self._tokens, *shape), buffer_dtype(spec, self._expert_ids))
        for number, plan in enumerate(self._plans):
            if plan is not None and _reads(plan, spec.name):
                start = int(starts[number])
                self._outs[number][spec.name] = DenseOut(rows[start : start + len(plan.tokens)])
        return _FieldBuffers(spec, rows, {}, np.zeros(self._tokens, np.bool_))

    def _ragged(self, spec: Field, starts: NDArray[np.int64]) -> _FieldBuffers:
        counts = self._zeros("int32")
        rooms = [0 if plan is None else values_max(plan, spec.name) for plan in self._plans]
        columns = {c.name: self._allocate((sum(rooms),), c.dtype) for c in spec.columns}
        extra = {c.name: self._zeros(c.dtype) for c in spec.row_columns}
        buffers = _FieldBuffers(spec, counts, columns, np.zeros(self._tokens, np.bool_), extra)
        base = 0
        for number, (plan, room) in enumerate(zip(self._plans, rooms, strict=True)):
            if plan is not None and _reads(plan, spec.name):
                start = int(starts[number])
                views = {name: column[base : base + room] for name, column in columns.items()}
                here = slice(start, start + len(plan.tokens))
                out = RaggedOut(counts[here], views, {name: row[here] for name, row in extra.items()})
                self._outs[number][spec.name] = out
                buffers.outs.append((out, plan, base))
            base += room
        return buffers

    def _zeros(self, dtype: str) -> NDArray[Any]:
        out = self._allocate((self._tokens,), dtype)
        out[:] = 0
        return out

    def _mark(self, number: int, plan: ReadPlan, start: int, missing: Mapping[str, Sequence[TokenRange]]) -> None:
        tokens = len(plan.tokens)
        for name in self._outs[number]:
            self._buffers[name].valid[start : start + tokens] = ~flags_of(missing.get(name, ()), tokens)

    def _fill(self, buffers: _FieldBuffers, name: str) -> None:
        """Rows that no plan wrote: the sequence's last row again where it has one (tokens added after sampling), else zeros."""
        start = 0
        for number, sequence in enumerate(self._micro_batch.sequences):
            plan, stop = self._plans[number], start + sequence.token_count
            written = len(plan.tokens) if plan is not None and name in self._outs[number] else 0
            if written < sequence.token_count:
                buffers.rows[start + written : stop] = buffers.rows[start + written - 1] if written else 0
            start = stop


def _layers_of(spec: Field, layers: Sequence[int] | None) -> tuple[int, ...]:
    return spec.layer_ids if layers is None or not spec.layer_ids else tuple(layers)


def _reads(plan: ReadPlan, name: str) -> bool:
    return any(r.field.name == name for s in plan.segments for r in s.fields)


def _compact(buffers: _FieldBuffers, name: str) -> int:
    at = 0
    for out, plan, base in buffers.outs:
        for piece in out.pieces(plan, name):
            start, size = base + piece.start, piece.stop - piece.start
            if start != at:
                for column in buffers.columns.values():
                    _move_down(column, start, at, size)
            at += size
    return at


def _move_down(column: NDArray[Any], start: int, to: int, size: int) -> None:
    """Moves ``size`` values to a lower place in steps that do not overlap, so that no copy of the whole is made."""
    step = max(1, start - to)
    for n in range(0, size, step):
        width = min(step, size - n)
        column[to + n : to + n + width] = column[start + n : start + n + width]
