"""What the ranks of parallel layouts read of one micro batch. Writes docs/results/layouts.json and its section of docs/results.md.

    python -m tools.layout_table         # two minutes

Four sequences of Qwen3-30B-A3B's shape (48 layers, 8 of 128 experts, heads of 128, masks of up to 64 for every completion token), in
objects whose chunks hold all layers, or six. Every stage reads the routing of its layers, the last one heads and masks too, as the loss is
there. *read* and *requests* are what each rank's loader counts while it fetches its micro batch as tensors, under the request limits of a
local and of a network store. *needed* are the stored bytes of the chunks that hold a row, or a value of the token range, of a token of the
rank. Every tensor is compared, byte for byte, with slicing the arrays as they were before they were stored.
"""

import json
import os
import platform
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsref.config import StoreSection
from fsref.loader.fetch import StepFetcher
from fsref.parallel import Coordinate, Parallel, StepRows
from fsref.plan import ContextLayout, PackedRows, balanced_rows, decode_index
from fsref.refs import Dense, FieldData, Payload, PayloadRef, Ragged, Schema, routed_experts, sampling_mask, top_logprobs
from fsref.steps import MicroBatch, RankFile, SampleSequence
from fsref.store import Store, open_root
from fsref.tensors import DenseTensor, PackedMicroBatch, RaggedTensor
from fsref.writer import Receipts, Writer
from tests.support import layouts
from tests.support.faultystore import FaultyStore
from tools.results import replace_section

LAYERS, TOP_K, EXPERTS, HEAD, MASK, VOCAB = 48, 8, 128, 128, 64, 151_936
TOKENS = (16_384, 6_000, 3_000, 700)
PROMPT = 256
SHARDS, STEP, MULTIPLE = 8, 1, 8
STAGES: dict[int, list[list[list[int]]]] = {
    1: [[[*range(48)]]],
    2: [[[*range(18)]], [[*range(18, 48)]]],
    3: [[[*range(12)], [*range(36, 42)]], [[*range(12, 18)], [*range(24, 36)]], [[*range(18, 24)], [*range(42, 48)]]],
}
"""All layers; two uneven stages; three with two virtual stages each, not contiguous."""
HEAD_TEXT = """
`python -m tools.layout_table`: what each rank's loader reads of one micro batch of {count} sequences ({sizes} tokens; 48 x 8 of 128
experts, heads, masks). Each stage reads the routing of its layers, the last one heads and masks too. Pipelines: all layers; 18 and 30;
three ranks with two virtual stages each, not contiguous. Sequences are padded before the split, the batch to a multiple of 8 after it.
"""
LEGEND_TEXT = """
*own*: mean share of a rank's own rows in the decoded bytes. A cell has the mean share of the objects that a rank fetches, and its requests
per sample with a network store's limits. *chunks*: layers in a chunk.
"""
TAIL_TEXT = """
Bytes read over the bytes of the chunks that hold a row of the rank: at most {worst:.3f}, over {count} ranks. Byte identity with slicing
the arrays as they were before they were stored, every tensor that the loader gave: {identical}. Where a rank fetches more than its own
share, the chunks are the reason: 2,048 tokens each here, so that a sequence of 700 is one chunk that every context rank reads. A stage's
layers of successive token ranges do not touch in the object, so they are one request each.
"""
OUT = Path(__file__).resolve().parent.parent / "docs" / "results" / "layouts.json"


@dataclass(frozen=True, eq=False)
class Stored:
    """One form of the micro batch in a store."""

    schema: Schema
    near: Store
    far: Store
    """The same, read with the request limits of a network store."""
    payloads: list[Payload]
    rank_file: RankFile

    @property
    def refs(self) -> list[PayloadRef]:
        return [s.ref for s in self.rank_file.micro_batches[0].sequences if s.ref is not None]


def make(rng: np.random.Generator, tokens: int) -> Payload:
    """All three fields of one sequence; everything behind the prompt was sampled."""
    sampled = np.arange(tokens) >= PROMPT
    heads = np.where(sampled, HEAD, 0).astype(np.int32)
    masks = np.where(sampled, rng.integers(1, MASK + 1, tokens), 0).astype(np.int32)
    total = int(heads.sum())
    logprobs = -np.sort(rng.random((total // HEAD, HEAD), np.float32) * 12, axis=1)
    fields: dict[str, FieldData] = {
        "routed_experts": Dense(rng.integers(0, EXPERTS, (tokens, LAYERS, TOP_K), np.uint8)),
        "top_logprobs": Ragged(heads, {"ids": rng.integers(0, VOCAB, total, np.int32), "logprobs": logprobs.reshape(-1)}),
        "sampling_mask": Ragged(masks, {"ids": rng.integers(0, VOCAB, int(masks.sum()), np.int32)}),
    }
    return Payload(rng.integers(0, VOCAB, tokens, np.int32), fields)


def sequence(payload: Payload, ref: PayloadRef) -> SampleSequence:
    count = len(payload.token_ids)
    zeros = np.zeros(count, "<f4").tobytes()
    return SampleSequence("sample/0", np.asarray(payload.token_ids, "<i4").tobytes(), bytes(count), zeros, zeros, ref)


def cases() -> Iterator[tuple[ContextLayout, int, int]]:
    for layout in ContextLayout:
        for ranks in (1, 2, 4):
            for pipeline in STAGES:
                yield layout, ranks, pipeline


def measure(stored: Stored, layout: ContextLayout, ranks: int, pipeline: int) -> dict[str, Any]:
    """All ranks of one layout."""
    parallel = Parallel(
        context=ranks, layout=layout, pipeline=pipeline, stages=STAGES[pipeline], multiple=MULTIPLE, expert_shards=SHARDS,
    )  # fmt: skip
    rooms = [layouts.room_of(n, layout, ranks, 0) for n in TOKENS]
    expected = layouts.rank_rows(list(enumerate(rooms)), layout, ranks=ranks, multiple=MULTIPLE)
    read, needed, local, remote, own, identical = [], [], [], [], [], True
    for pipeline_rank, rank in product(range(pipeline), range(ranks)):
        at = Coordinate(context=rank, pipeline=pipeline_rank)
        rows = StepRows(parallel, at, stored.rank_file.micro_batches).of(0)
        layers = parallel.layers(at) or tuple(range(LAYERS))
        batch, counted = fetched(stored, stored.near, parallel, at)
        _, far = fetched(stored, stored.far, parallel, at)
        samples = len({s.sequence for s in rows.spans()})
        read.append(int(counted["payload/bytes_fetched"]))
        needed.append(needed_bytes(stored, rows, parallel.fields(stored.schema, at), layers))
        local.append(counted["payload/requests"] / samples)
        remote.append(far["payload/requests"] / samples)
        alike, mine = same(stored, batch, rows, expected[rank], layers)
        identical &= alike
        own.append(mine)
    objects = sum(ref.byte_count for ref in stored.refs)
    return {
        "layout": str(layout), "context": ranks, "pipeline": pipeline,
        "read_bytes": read, "needed_bytes": needed,
        "read_over_needed": round(max(r / n for r, n in zip(read, needed, strict=True)), 4),
        "share_of_rows": round(sum(own) / len(own) / sum(decoded_bytes(d) for p in stored.payloads for d in p.fields.values()), 4),
        "share_of_objects": round(sum(read) / len(read) / objects, 4),
        "requests_per_sample_local": round(sum(local) / len(local), 1),
        "requests_per_sample_network": round(sum(remote) / len(remote), 1),
        "identical": identical,
    }  # fmt: skip


def fetched(stored: Stored, store: Store, parallel: Parallel, at: Coordinate) -> tuple[PackedMicroBatch, dict[str, float]]:
    """The rank's micro batch, and what its loader counted."""
    with StepFetcher(store, stored.schema, config=StoreSection(), parallel=parallel, at=at) as fetcher:
        batch = fetcher.take(stored.rank_file)[0]
        assert isinstance(batch, PackedMicroBatch)
        return batch, fetcher.metrics(STEP)


def needed_bytes(stored: Stored, rows: PackedRows, fields: Sequence[str], layers: Sequence[int]) -> int:
    """By going over all chunks."""
    chunks: dict[tuple[int, str], int] = {}
    for span in rows.spans():
        layout, sizes, _ = decode_index(stored.refs[span.sequence].segments[0], stored.schema)
        first, last = span.tokens.start // layout.range_tokens, (span.tokens.stop - 1) // layout.range_tokens
        for chunk, size in zip(layout.chunks, sizes, strict=True):
            array = layout.arrays[chunk.array]
            if array.field.name not in fields:
                continue
            if array.flat:
                sums = [0, *layout.value_sums[array.field.name]]
                wanted = chunk.start < sums[last + 1] and chunk.stop > sums[first]
            else:
                wanted = first <= chunk.range_index <= last
            if wanted and array.field.layer_ids:
                wanted = any(chunk.layer <= n < chunk.layer + array.chunk_shape[1] for n in layers)
            if wanted:
                chunks[span.sequence, chunk.name] = size
    return sum(chunks.values())


def decoded_bytes(data: Dense | Ragged) -> int:
    """Of all rows, as they were stored."""
    return data.rows.nbytes if isinstance(data, Dense) else data.counts.nbytes + sum(v.nbytes for v in data.columns.values())


def same(
    stored: Stored, batch: PackedMicroBatch, rows: PackedRows, expected: Sequence[layouts.Row], layers: Sequence[int]
) -> tuple[bool, int]:
    """Compares a rank's tensors with the arrays that were stored, cut by the oracle's rows; and the stored bytes of its real rows."""
    offsets = [0, *accumulate(TOKENS)]
    at = np.asarray([offsets[r[0]] + r[1] if r is not None and r[1] < TOKENS[r[0]] else -1 for r in expected])
    alike, own = np.array_equal(batch.padding.numpy(), at < 0), 0
    for name, data in batch.fields.items():
        whole = [p.fields[name] for p in stored.payloads]
        if isinstance(data, DenseTensor):
            alike &= same_dense(rows, data, whole, at, layers)
            own += int(data.valid.sum()) * len(layers) * TOP_K
        else:
            alike &= same_ragged(data, whole, at)
            own += 4 * int(data.valid.sum()) + sum(c.nbytes for c in data.columns.values())
    return bool(alike), own


def same_dense(rows: PackedRows, data: DenseTensor, whole: Sequence[FieldData], at: NDArray[np.int64], layers: Sequence[int]) -> bool:
    inline = np.concatenate([d.rows for d in whole if isinstance(d, Dense)])[at][:, list(layers)].astype(np.int32)
    slots = rows.row_slots()[at < 0]
    inline[at < 0] = balanced_rows(slots, step=STEP, layer_ids=layers, top_k=TOP_K, expert_count=EXPERTS, shards=SHARDS)
    return bool(data.rows.numpy().tobytes() == inline.tobytes())


def same_ragged(data: RaggedTensor, whole: Sequence[FieldData], at: NDArray[np.int64]) -> bool:
    parts = [d for d in whole if isinstance(d, Ragged)]
    counts = np.concatenate([d.counts for d in parts])
    starts = np.cumsum(counts, dtype=np.int64) - counts
    mine = np.where(at < 0, 0, counts[at]).astype(np.int32)
    take = np.repeat(starts[at], mine) + np.arange(int(mine.sum())) - np.repeat(np.cumsum(mine, dtype=np.int64) - mine, mine)
    alike = data.counts.numpy().tobytes() == mine.tobytes()
    for name, values in data.columns.items():
        alike &= values.numpy().tobytes() == np.concatenate([d.columns[name] for d in parts])[take].tobytes()
    return bool(alike)


def run(folder: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    payloads = [make(rng, n) for n in TOKENS]
    base = routed_experts(layer_ids=range(LAYERS), top_k=TOP_K, expert_count=EXPERTS)
    forms: dict[str, Any] = {}
    for per_chunk in (0, 6):
        schema = Schema((_with_chunks(base, per_chunk), top_logprobs(), sampling_mask()))
        with open_root(folder, run=f"layouts-{per_chunk}", create=True) as store:
            writer = Writer(store, schema, Receipts("layouts"), durability="process")
            sequences = tuple(sequence(p, writer.put(p)) for p in payloads)
            file = RankFile(
                v=1, run=f"layouts-{per_chunk}", step=STEP, data_rank=0, schema=schema, micro_batches=(MicroBatch(sequences),), owned=()
            )
            far = FaultyStore(store)
            far.posix_path = None
            forms[str(per_chunk)] = [measure(Stored(schema, store, far, payloads, file), *case) for case in cases()]
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "tokens": list(TOKENS),
        "layers_per_chunk": forms,
    }


def _with_chunks(field: Any, per_chunk: int) -> Any:
    return routed_experts(layer_ids=field.layer_ids, top_k=TOP_K, expert_count=EXPERTS, layers_per_chunk=per_chunk)


def section(found: dict[str, Any]) -> list[str]:
    forms = found["layers_per_chunk"]
    rows = {(per, c["layout"], c["context"], c["pipeline"]): c for per, cs in forms.items() for c in cs}
    every = list(rows.values())
    lines = [
        *_paragraph(HEAD_TEXT.format(count=len(TOKENS), sizes=", ".join(f"{n:,}" for n in TOKENS))),
        *_paragraph(LEGEND_TEXT),
        "| context | pipeline | own | chunks | zigzag | contiguous | all-gather |",
        "|---|---|---|---|---|---|---|",
    ]
    for ranks in (1, 2, 4):
        for pipeline in STAGES:
            for per in forms:
                cells = [rows[per, layout, ranks, pipeline] for layout in layouts.LAYOUTS]
                shown = [f"{c['share_of_objects']:.1%}, {c['requests_per_sample_network']:g}" for c in cells]
                own = f"{cells[0]['share_of_rows']:.1%}"
                lines.append(f"| {ranks} | {pipeline} | {own} | {'all' if per == '0' else per} | {' | '.join(shown)} |")
    worst = max(c["read_over_needed"] for c in every)
    count = sum(len(c["read_bytes"]) for c in every)
    identical = "every rank, every field" if all(c["identical"] for c in every) else "NOT GIVEN"
    return [*lines, "", *_paragraph(TAIL_TEXT.format(worst=worst, count=count, identical=identical))[:-1]]


def _paragraph(text: str) -> list[str]:
    return [*textwrap.wrap(text.strip(), 140), ""]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        found = run(folder)
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    lines = section(found)
    print("\n".join(lines))
    replace_section("Parallel layouts", lines)
    return 0 if all(c["identical"] for cs in found["layers_per_chunk"].values() for c in cs) else 1


if __name__ == "__main__":
    sys.exit(main())
