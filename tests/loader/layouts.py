"""A step of two micro batches with everything in it that a layout can meet, and what slicing its arrays gives a rank."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsref.inspection.find import Place, find_run
from fsref.journal import create_run
from fsref.parallel import Coordinate, Parallel
from fsref.refs import Dense, Payload, PayloadRef, Ragged, Schema, routed_experts, sampling_mask, top_logprobs
from fsref.steps import MicroBatch, RankFile, SampleSequence, StepInfo, digest, encode_rank_files, publish, sum_of
from fsref.store import Store, open_root
from fsref.writer import Receipts, Writer
from tests.support import layouts

LAYERS = (1, 2, 3, 5, 6, 7)
EXPERTS, TOP_K, SHARDS = 16, 2, 4
SCHEMA = Schema(
    (
        routed_experts(layer_ids=LAYERS, top_k=TOP_K, expert_count=EXPERTS, layers_per_chunk=2),
        top_logprobs(),
        sampling_mask(),
    )
)
STAGES: dict[int, list[list[list[int]]]] = {1: [], 2: [[[0, 1, 2]], [[3, 4, 5, 6, 7]]], 3: [[[1], [6]], [[2, 3], [7]], [[5]]]}
"""All layers; two uneven stages, with dense layers in them; three with virtual stages, not contiguous."""


@dataclass
class Sample:
    """One sequence and the arrays that inline transport would have carried, already filled where a row is missing."""

    sequence: SampleSequence
    fields: dict[str, Any] = field(default_factory=dict)
    """Routing [T, L, K]; heads and masks as one list of values per token."""
    valid: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))


@dataclass
class Whole:
    """The published step."""

    store: Store
    folder: Path
    rank_file: RankFile
    samples: list[list[Sample]]

    @property
    def place(self) -> Place:
        return find_run(str(self.folder / "whole"), here=self.folder)


def make_step(folder: Path) -> Whole:
    """Long enough for several chunks, a sequence without arrays, a dummy of another one's routing, tokens added behind the arrays."""
    rng = np.random.default_rng(5)
    store = open_root(str(folder), run="whole", create=True)
    run = create_run(store, "whole", SCHEMA)
    writer = Writer(store, SCHEMA, Receipts("layouts"), durability="process")
    long, short = _sample(rng, writer, 5000), _sample(rng, writer, 300)
    samples = [
        [long, short],
        [_sample(rng, writer, 7), _bare(rng, 16), _dummy(short, 4), _sample(rng, writer, 9, kept=6)],
    ]
    batches = tuple(MicroBatch(tuple(s.sequence for s in part)) for part in samples)
    ids = tuple(dict.fromkeys(i for part in samples for s in part if s.sequence.ref for i in s.sequence.ref.object_ids))
    rank_file = RankFile(v=1, run="whole", step=0, data_rank=0, schema=SCHEMA, micro_batches=batches, owned=ids)
    files = encode_rank_files([rank_file])
    tokens = sum(b.token_count for b in batches)
    info = StepInfo(
        v=1, run="whole", run_uuid=run.run_uuid, step=0, data_ranks=1, micro_batches=2, samples=5, tokens=tokens,
        n=len(ids), bytes=0, sum=sum_of(ids), version=0, schema=SCHEMA, digests=tuple(map(digest, files)),
    )  # fmt: skip
    publish(store, info, files)
    return Whole(store, folder, rank_file, samples)


def _sequence(rng: np.random.Generator, tokens: int, ref: PayloadRef | None, *, padding: bool = False) -> SampleSequence:
    return SampleSequence(
        sample=f"s{int(rng.integers(1 << 30))}/0",
        token_ids=rng.integers(1, 99, tokens).astype("<i4").tobytes(),
        loss_mask=np.full(tokens, 0 if padding else 1, np.uint8).tobytes(),
        logprobs=rng.random(tokens).astype("<f4").tobytes(),
        advantages=rng.random(tokens).astype("<f4").tobytes(),
        ref=ref,
        padding=padding,
    )


def _sample(rng: np.random.Generator, writer: Writer, tokens: int, *, kept: int = 0) -> Sample:
    stored = kept or tokens
    routing = rng.integers(0, EXPERTS, (stored, len(LAYERS), TOP_K)).astype(np.uint8)
    heads = [rng.integers(0, 999, n).tolist() for n in rng.integers(0, 4, stored)]
    masks = [rng.integers(0, 999, n).tolist() for n in rng.integers(0, 6, stored)]
    logprobs = rng.random(sum(map(len, heads)), np.float32)
    counts = [np.array([len(row) for row in rows], np.int32) for rows in (heads, masks)]
    flat = [np.array([v for row in rows for v in row], np.int32) for rows in (heads, masks)]
    ref = writer.put(
        Payload(
            np.arange(stored, dtype=np.int32),
            {
                "routed_experts": Dense(routing),
                "top_logprobs": Ragged(counts[0], {"ids": flat[0], "logprobs": logprobs}),
                "sampling_mask": Ragged(counts[1], {"ids": flat[1]}),
            },
        )
    )
    more = tokens - stored
    full = np.concatenate([routing, np.repeat(routing[-1:], more, 0)])
    fields = {"routed_experts": full, "top_logprobs": [*heads, *[[]] * more], "sampling_mask": [*masks, *[[]] * more]}
    return Sample(_sequence(rng, tokens, ref), fields, np.arange(tokens) < stored)


def _bare(rng: np.random.Generator, tokens: int) -> Sample:
    nothing: list[list[int]] = [[]] * tokens
    fields = {"routed_experts": np.zeros((tokens, len(LAYERS), TOP_K), np.uint8), "top_logprobs": nothing, "sampling_mask": nothing}
    return Sample(_sequence(rng, tokens, None), fields, np.zeros(tokens, np.bool_))


def _dummy(of: Sample, tokens: int) -> Sample:
    """Routing only."""
    rng = np.random.default_rng(1)
    nothing: list[list[int]] = [[]] * tokens
    fields = {"routed_experts": of.fields["routed_experts"][:tokens], "top_logprobs": nothing, "sampling_mask": nothing}
    return Sample(_sequence(rng, tokens, of.sequence.ref, padding=True), fields, np.ones(tokens, np.bool_))


def expected_rows(whole: Whole, number: int, parallel: Parallel, at: Coordinate) -> list[tuple[int, int] | None]:
    """(sequence, position) at each row of the rank, padding as ``None``: the oracle of ``tests.support.layouts``, without fsref."""
    lengths = [s.sequence.token_count for s in whole.samples[number]]
    layout = str(parallel.layout or "allgather")
    rooms = [(n, layouts.room_of(length, layout, parallel.context, 0)) for n, length in enumerate(lengths)]
    rows = layouts.rank_rows(rooms, layout, ranks=parallel.context, multiple=parallel.multiple)[at.context]
    if parallel.sequence:
        size = len(rows) // parallel.tensor
        rows = rows[at.tensor * size : (at.tensor + 1) * size]
    return [r if r is not None and r[1] < lengths[r[0]] else None for r in rows]
