"""Random payloads and the plain numpy oracle that readers and assembly are compared with. Imports neither of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsref.refs import (
    Alignment,
    Codec,
    Column,
    Dense,
    Field,
    FieldData,
    Payload,
    Ragged,
    Schema,
    TokenRange,
    routed_experts,
    sampling_mask,
    top_logprobs,
)

INC = "env.test.0123456789abcdef"


class Numbers:
    """A keeper without a ledger: numbers objects and remembers the receipts."""

    inc = INC

    def __init__(self) -> None:
        self.kept: list[tuple[int, int, int, int, int]] = []
        self._next = 0

    def next_seq(self) -> int:
        self._next += 1
        return self._next - 1

    def keep(self, seq: int, *, byte_count: int, checksum: int, token_count: int, fields: int) -> None:
        self.kept.append((seq, byte_count, checksum, token_count, fields))


def schema(*, layers: int = 4, top_k: int = 2, experts: int = 16, layers_per_chunk: int = 0, codec: Codec | None = None) -> Schema:
    """All three known fields and two that no module knows by name."""
    return Schema(
        (
            routed_experts(layer_ids=range(layers), top_k=top_k, expert_count=experts, layers_per_chunk=layers_per_chunk),
            top_logprobs(),
            sampling_mask(),
            Field(name="indexer_picks", alignment=Alignment.INPUT, dtype="uint16", row_shape=(3,)),
            Field(name="spans", alignment=Alignment.INPUT, columns=(Column("left", "int64"), Column("weight", "float16"))),
        ),
        codec=codec or Codec(),
    )


def ragged(rng: np.random.Generator, field: Field, tokens: int, *, longest: int, empty: float = 0.3) -> Ragged:
    counts = rng.integers(0, longest + 1, tokens).astype(np.int32)
    counts[rng.random(tokens) < empty] = 0
    total = int(counts.sum())
    columns: dict[str, NDArray[Any]] = {}
    for c in field.columns:
        if c.dtype.startswith("float"):
            columns[c.name] = rng.standard_normal(total).astype(c.dtype)
        else:
            columns[c.name] = rng.integers(0, 30000, total).astype(c.dtype)
    return Ragged(counts, columns)


def payload(
    rng: np.random.Generator, schema: Schema, tokens: int, *, longest: int = 5, missing: Mapping[str, Sequence[TokenRange]] | None = None
) -> Payload:
    """Random arrays of every field; ``missing`` ranges get values that must never be seen (dense) or none (ragged)."""
    fields: dict[str, FieldData] = {}
    for f in schema.fields:
        ranges = tuple((missing or {}).get(f.name, ()))
        if f.ragged:
            data = ragged(rng, f, tokens, longest=longest)
            gone = np.zeros(tokens, np.bool_)
            for r in ranges:
                gone[r.start : r.stop] = True
            keep = np.repeat(~gone, data.counts)
            fields[f.name] = Ragged(np.where(gone, 0, data.counts), {n: v[keep] for n, v in data.columns.items()}, ranges)
        else:
            high = f.expert_count or 1000
            fields[f.name] = Dense(rng.integers(0, high, (tokens, *f.row_shape)).astype(f.dtype), ranges)
    return Payload(rng.integers(0, 30000, tokens).astype(np.int32), fields)


def filled(rows: NDArray[Any], missing: Sequence[TokenRange]) -> NDArray[Any]:
    """Rows with every missing one replaced by the nearest earlier real row, else the next real one: a loop, on purpose."""
    gone = {t for r in missing for t in range(r.start, r.stop)}
    out = rows.copy()
    real = [t for t in range(len(rows)) if t not in gone]
    for t in sorted(gone):
        earlier = [r for r in real if r < t]
        out[t] = rows[earlier[-1] if earlier else real[0]]
    return out


def cut(data: FieldData, start: int, stop: int) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    """(rows, {}) or (counts, columns) of tokens [start, stop), with fillers in place."""
    if isinstance(data, Dense):
        return filled(data.rows, data.missing)[start:stop], {}
    offsets = np.concatenate(([0], np.cumsum(data.counts)))
    return data.counts[start:stop], {n: v[offsets[start] : offsets[stop]] for n, v in data.columns.items()}
