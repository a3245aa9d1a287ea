"""Packed tensors: a micro batch's sequences one after the other, with every field cut, concatenated and marked for what is real.

Owns the assembly from reader buffers to torch tensors; the result is byte for byte what the same arrays carried inline would give.
Refuses I/O and policy. Needs the extra ``torch``.

Shape letters: T tokens of the packed micro batch, S sequences, N values of a ragged field.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from fsref.errors import MissingExtra, PayloadError, StepError
from fsref.plan import ReadPlan
from fsref.reader import DenseOut, Out, RaggedOut, values_max
from fsref.refs import Field, Schema, TokenRange, flags_of
from fsref.slices import fields_wanted as fields_wanted
from fsref.steps import MicroBatch

try:
    import torch
    from torch import Tensor
except ImportError as e:
    raise MissingExtra.of("torch", "torch") from e

ExpertIds = Literal["int32", "int64", "bytes"]
_LOGICAL: Final = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
_WIDENED: Final = {"uint16": torch.int32, "uint32": torch.int64, "uint64": torch.int64, "int16": torch.int32}
"""Storage dtypes that torch or NCCL cannot carry, and what they become."""


@dataclass(frozen=True, eq=False)
class DenseTensor:
    """A dense field of a packed micro batch."""

    rows: Tensor
    """[T, *row_shape]; expert ids as int32, other dtypes as stored (unsigned 16 to 64 bit widened), bfloat16 as itself. Writable."""
    valid: Tensor
    """bool [T]: False where the row is a filler."""
    layer_ids: tuple[int, ...] = ()
    """Global ids of the layer axis, in its order: what a trainer compares with the layers that consumed it. Empty without such an axis."""

    def with_sentinel(self, sentinel: int = -1) -> Tensor:
        """A copy of ``rows`` with ``sentinel`` in every filler; the dtype is signed already."""
        out = self.rows.clone()
        out[~self.valid] = sentinel
        return out


@dataclass(frozen=True, eq=False)
class RaggedTensor:
    """A ragged field of a packed micro batch."""

    counts: Tensor
    """int32 [T]."""
    columns: Mapping[str, Tensor]
    """[N] each, N = counts.sum(); slots in engine order."""
    valid: Tensor
    """bool [T]: False where values are missing, not merely none."""
    row_columns: Mapping[str, Tensor] = field(default_factory=dict)
    """[T] each: the field's row columns, for example a mask's flags; 0 where nothing is known."""

    @property
    def offsets(self) -> Tensor:
        """int64 [T + 1]: where each row's values begin."""
        out = torch.zeros(len(self.counts) + 1, dtype=torch.int64)
        torch.cumsum(self.counts, 0, out=out[1:])
        return out

    def rectangle(self, column: str, *, width: int, fill: float = 0) -> tuple[Tensor, Tensor]:
        """One column as [T, width] with ``fill`` behind each row's values, and bool [T, width]: True where a value stands.

        Raises ``PayloadError`` for a wider row.
        """
        most = int(self.counts.max()) if len(self.counts) else 0
        if most > width:
            raise PayloadError(f"a row has {most} values, which do not fit a width of {width}")
        inside = torch.arange(width, device=self.counts.device) < self.counts[:, None]
        values = self.columns[column]
        out = torch.full((len(self.counts), width), fill, dtype=values.dtype, device=values.device)
        out[inside] = values
        return out, inside


@dataclass(frozen=True, eq=False)
class PackedMicroBatch:
    """Tensors of one micro batch, sequences in packing order."""

    token_ids: Tensor
    """int64 [T]."""
    position_ids: Tensor
    """int64 [T], from 0 in every sequence."""
    cu_seqlens: Tensor
    """int32 [S + 1]."""
    loss_mask: Tensor
    """bool [T]."""
    logprobs: Tensor
    """float32 [T], the sampler's."""
    advantages: Tensor
    """float32 [T]."""
    temperature: Tensor
    """float32 [T]."""
    padding: Tensor
    """bool [T]: tokens of dummies."""
    fields: Mapping[str, DenseTensor | RaggedTensor]
    samples: tuple[str, ...]
    bytes_read: int = 0
    """Fetched from storage for it."""

    @property
    def token_count(self) -> int:
        return len(self.token_ids)


def pack_tokens(micro_batch: MicroBatch) -> PackedMicroBatch:
    """The token-level tensors of a micro batch, without any field. Raises ``StepError`` if a sequence's arrays differ in length."""
    sequences = micro_batch.sequences
    for s in sequences:
        if (len(s.loss_mask), len(s.logprobs) // 4, len(s.advantages) // 4) != (s.token_count,) * 3:
            raise StepError(f"sample {s.sample}: token ids, mask, logprobs and advantages differ in length")
    lengths = [s.token_count for s in sequences]
    return PackedMicroBatch(
        token_ids=torch.from_numpy(_joined([s.token_ids for s in sequences], "<i4").astype(np.int64)),
        position_ids=torch.from_numpy(np.concatenate([np.arange(n, dtype=np.int64) for n in lengths] or [np.zeros(0, np.int64)])),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
        loss_mask=torch.from_numpy(_joined([s.loss_mask for s in sequences], "u1").astype(np.bool_)),
        logprobs=torch.from_numpy(_joined([s.logprobs for s in sequences], "<f4").copy()),
        advantages=torch.from_numpy(_joined([s.advantages for s in sequences], "<f4").copy()),
        temperature=torch.from_numpy(np.repeat(np.asarray([s.temperature for s in sequences], np.float32), lengths)),
        padding=torch.from_numpy(np.repeat(np.asarray([s.padding for s in sequences], np.bool_), lengths)),
        fields={},
        samples=tuple(s.sample for s in sequences),
    )


def _joined(parts: Sequence[bytes], dtype: str) -> NDArray[Any]:
    return np.frombuffer(b"".join(parts), dtype)


@dataclass
class _FieldBuffers:
    """One field's packed buffers in storage dtype, filled by the reader."""

    spec: Field
    rows: NDArray[Any]
    """Dense: [T, *row_shape]. Ragged: counts int32 [T]."""
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
    ``expert_ids``: the form of expert ids, as some collectives carry no 16-bit integers; ``bytes`` is a uint8 view of the stored ids.
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
    ) -> None:
        self._micro_batch, self._plans = micro_batch, plans
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
        return sum(b.rows.nbytes + sum(c.nbytes for c in b.columns.values()) for b in self._buffers.values())

    def out(self, number: int) -> Out:
        """Where sequence ``number``'s plan writes."""
        return self._outs[number]

    def finish(self) -> PackedMicroBatch:
        """The tensors. Call once, after every plan ran without an error."""
        packed = pack_tokens(self._micro_batch)
        fields: dict[str, DenseTensor | RaggedTensor] = {}
        for name, buffers in self._buffers.items():
            valid = torch.from_numpy(buffers.valid)
            if buffers.spec.ragged:
                count = _compact(buffers, name)
                columns = {c: _tensor(v[:count], buffers.spec) for c, v in buffers.columns.items()}
                rows = {c: _tensor(v, buffers.spec) for c, v in buffers.extra.items()}
                fields[name] = RaggedTensor(torch.from_numpy(buffers.rows), columns, valid, rows)
            else:
                self._fill(buffers, name)
                rows_T = _tensor(buffers.rows, buffers.spec, self._expert_ids)
                fields[name] = DenseTensor(rows_T, valid, _layers_of(buffers.spec, self._layers))
        bytes_read = sum(p.byte_count for p in self._plans if p is not None)
        return PackedMicroBatch(**{**vars(packed), "fields": fields, "bytes_read": bytes_read})

    def _dense(self, spec: Field, starts: NDArray[np.int64]) -> _FieldBuffers:
        shape = spec.row_shape
        if spec.layer_ids:
            shape = (len(_layers_of(spec, self._layers)), *shape[1:])
        rows = np.empty((self._tokens, *shape), spec.dtype)
        for number, plan in enumerate(self._plans):
            if plan is not None and _reads(plan, spec.name):
                start = int(starts[number])
                self._outs[number][spec.name] = DenseOut(rows[start : start + len(plan.tokens)])
        return _FieldBuffers(spec, rows, {}, np.zeros(self._tokens, np.bool_))

    def _ragged(self, spec: Field, starts: NDArray[np.int64]) -> _FieldBuffers:
        counts = np.zeros(self._tokens, np.int32)
        rooms = [0 if plan is None else values_max(plan, spec.name) for plan in self._plans]
        columns = {c.name: np.empty(sum(rooms), c.dtype) for c in spec.columns}
        extra = {c.name: np.zeros(self._tokens, c.dtype) for c in spec.row_columns}
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


def _tensor(array: NDArray[Any], spec: Field, expert_ids: ExpertIds = "int32") -> Tensor:
    if spec.logical_dtype:
        bits = array.view(np.int16) if array.itemsize == 2 else array
        return torch.from_numpy(bits).view(_LOGICAL[spec.logical_dtype])
    name = array.dtype.name
    if spec.expert_count:
        return torch.from_numpy(array.view(np.uint8) if expert_ids == "bytes" else array.astype(expert_ids))
    if name in _WIDENED:
        wide = _WIDENED[name]
        return torch.from_numpy(array.astype(np.int32 if wide is torch.int32 else np.int64))
    return torch.from_numpy(array)
