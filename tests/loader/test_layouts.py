"""Each rank of a parallel layout gets, byte for byte, its rows of the inline arrays, and reads what its plan says."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from fsref.config import StoreSection
from fsref.inspection.layout import layout_report
from fsref.loader.agreement import Agreement
from fsref.loader.batch import ready_batches
from fsref.loader.fetch import StepFetcher
from fsref.loader.loader import ReadyMicroBatch
from fsref.loader.prime_rl import prime_micro_batch
from fsref.loader.standin import StandIns
from fsref.nodecache import NodeCache
from fsref.parallel import Coordinate, Parallel
from fsref.plan import ContextLayout
from fsref.tensors import NO_LABEL, DenseTensor, PackedMicroBatch, RaggedTensor
from tests.loader.layouts import EXPERTS, LAYERS, SCHEMA, SHARDS, STAGES, TOP_K, Whole, expected_rows, make_step

MULTIPLE = 4
CONFIG = StoreSection(fetch_threads=1)
Rows = list[tuple[int, int] | None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    made = make_step(tmp_path_factory.mktemp("layouts"))
    yield made
    made.store.close()


def layout_of(context: ContextLayout, ranks: int, pipeline: int) -> Parallel:
    return Parallel(context=ranks, layout=context, pipeline=pipeline, stages=STAGES[pipeline], multiple=MULTIPLE, expert_shards=SHARDS)


def taken(
    whole: Whole, parallel: Parallel, at: Coordinate, cache: NodeCache | None = None
) -> tuple[list[PackedMicroBatch], dict[str, float]]:
    with StepFetcher(whole.store, SCHEMA, config=CONFIG, parallel=parallel, at=at, cache=cache) as fetcher:
        got = fetcher.take(whole.rank_file)
        metrics = fetcher.metrics(0)
        fetcher.release(0)
    batches = [b for b in got if isinstance(b, PackedMicroBatch)]
    assert len(batches) == len(got)
    return batches, metrics


def same_tokens(whole: Whole, number: int, got: PackedMicroBatch, rows: Rows) -> None:
    samples = [s.sequence for s in whole.samples[number]]
    ids, logprobs = [s.tokens() for s in samples], [np.frombuffer(s.logprobs, "<f4") for s in samples]
    assert got.token_ids.tolist() == [0 if r is None else ids[r[0]][r[1]] for r in rows]
    assert got.logprobs.tolist() == [0.0 if r is None else float(logprobs[r[0]][r[1]]) for r in rows]
    assert got.padding.tolist() == [r is None or samples[r[0]].padding for r in rows]
    assert got.loss_mask.tolist() == [r is not None and not samples[r[0]].padding for r in rows]
    real = [n for n, r in enumerate(rows) if r is not None]
    assert got.position_ids[real].tolist() == [r[1] for r in rows if r is not None]


def same_routing(whole: Whole, number: int, data: DenseTensor, rows: Rows, layers: Sequence[int]) -> None:
    samples = whole.samples[number]
    at = [LAYERS.index(layer) for layer in layers]
    assert data.layer_ids == tuple(layers)
    assert data.rows.dtype == torch.int32
    real = [(n, r) for n, r in enumerate(rows) if r is not None]
    none = np.zeros((0, len(LAYERS), TOP_K), np.uint8)
    inline = np.concatenate([none, *(samples[r[0]].fields["routed_experts"][r[1]][None] for _, r in real)])[:, at].astype(np.int32)
    assert data.rows[[n for n, _ in real]].numpy().tobytes() == inline.tobytes()
    assert data.valid.tolist() == [r is not None and bool(samples[r[0]].valid[r[1]]) for r in rows]
    padding = data.rows[[n for n, r in enumerate(rows) if r is None]]
    assert padding.sort(-1).values.diff(dim=-1).gt(0).all()  # distinct in each row
    assert not padding.numel() or (int(padding.min()) >= 0 and int(padding.max()) < EXPERTS)


def same_values(whole: Whole, number: int, name: str, data: RaggedTensor, rows: Rows) -> None:
    values = [[] if r is None else whole.samples[number][r[0]].fields[name][r[1]] for r in rows]
    assert data.counts.tolist() == [len(v) for v in values]
    assert data.columns["ids"].tolist() == [i for v in values for i in v]


@pytest.mark.payload("D1", "D2", "D3", "C3", "C4", "C5", "D12")
@pytest.mark.parametrize("pipeline", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("context", list(ContextLayout))
def test_every_rank_gets_its_part_of_the_inline_arrays_and_reads_what_inspect_shows(
    whole: Whole, context: ContextLayout, ranks: int, pipeline: int
) -> None:
    parallel = layout_of(context, ranks, pipeline)
    shown = {(r.pipeline_rank, r.context_rank): r for r in layout_report(whole.place, 0, parallel).ranks}
    stood: Counter[tuple[int, int, int, int]] = Counter()
    for c, p in product(range(ranks), range(pipeline)):
        at = Coordinate(context=c, pipeline=p)
        batches, metrics = taken(whole, parallel, at)
        layers = [n for n in (parallel.layers(at) or LAYERS) if n in LAYERS]
        for number, got in enumerate(batches):
            rows = expected_rows(whole, number, parallel, at)
            same_tokens(whole, number, got, rows)
            assert set(got.fields) == ({"routed_experts", "top_logprobs", "sampling_mask"} if p == pipeline - 1 else {"routed_experts"})
            for name, data in got.fields.items():
                if isinstance(data, DenseTensor):
                    same_routing(whole, number, data, rows, layers)
                else:
                    same_values(whole, number, name, data, rows)
            stood.update((number, *r, layer) for r in rows if r is not None for layer in layers)
        report = shown[p, c]
        assert (report.bytes, report.requests) == (metrics["payload/bytes_fetched"], metrics["payload/requests"])
        assert report.rows == sum(b.token_count for b in batches)
        assert sorted(report.fields) == sorted({n for b in batches for n in b.fields})
    # The union over ranks is the whole, once.
    every = {
        (number, n, t, layer)
        for number, part in enumerate(whole.samples)
        for n, s in enumerate(part)
        for t in range(s.sequence.token_count)
        for layer in LAYERS
    }
    assert set(stood) == every
    assert set(stood.values()) == {1}


@pytest.mark.payload("C4", "D1", "D2")
@pytest.mark.parametrize("context", list(ContextLayout))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_targets_of_the_next_token_stand_at_the_row_that_predicts_it_wherever_the_split_cuts(
    whole: Whole, context: ContextLayout, ranks: int
) -> None:
    own = layout_of(context, ranks, 1)
    parallel = replace(own, targets="next")
    for c in range(ranks):
        at = Coordinate(context=c)
        for number, (got, here) in enumerate(zip(taken(whole, parallel, at)[0], taken(whole, own, at)[0], strict=True)):
            rows = expected_rows(whole, number, parallel, at)
            samples = [s.sequence for s in whole.samples[number]]
            ids = [s.tokens() for s in samples]
            nexts: Rows = [(r[0], r[1] + 1) if r is not None and r[1] + 1 < len(ids[r[0]]) else None for r in rows]
            assert got.labels is not None
            assert got.labels.tolist() == [NO_LABEL if r is None else ids[r[0]][r[1]] for r in nexts]
            assert got.loss_mask.tolist() == [r is not None and not samples[r[0]].padding for r in nexts]
            logprobs = [np.frombuffer(s.logprobs, "<f4") for s in samples]
            assert got.logprobs.tolist() == [0.0 if r is None else float(logprobs[r[0]][r[1]]) for r in nexts]
            for name in ("top_logprobs", "sampling_mask"):
                data = got.fields[name]
                assert isinstance(data, RaggedTensor)
                same_values(whole, number, name, data, nexts)
            # What is fed stays where it was.
            routing = got.fields["routed_experts"]
            assert isinstance(routing, DenseTensor)
            same_routing(whole, number, routing, rows, LAYERS)
            for tensor, before in ((got.token_ids, here.token_ids), (got.position_ids, here.position_ids), (got.padding, here.padding)):
                assert torch.equal(tensor, before)
            assert here.labels is None


@pytest.mark.payload("D1", "D5")
def test_sequence_parallel_ranks_share_the_rows_of_a_context_rank(whole: Whole) -> None:
    parallel = Parallel(tensor=4, sequence=True, multiple=MULTIPLE)
    for rank in range(4):
        at = Coordinate(tensor=rank)
        for number, got in enumerate(taken(whole, parallel, at)[0]):
            rows = expected_rows(whole, number, parallel, at)
            same_tokens(whole, number, got, rows)


@pytest.mark.payload("D14")
def test_tensor_parallel_siblings_of_a_node_fetch_what_they_share_once(whole: Whole, tmp_path: object) -> None:
    parallel = Parallel(tensor=4)
    alone, metrics = taken(whole, parallel, Coordinate())
    total = 0.0
    caches = [NodeCache(str(tmp_path), name="node", bytes_max=64 << 20, wait_s=60) for _ in range(4)]
    fetchers = [
        StepFetcher(whole.store, SCHEMA, config=CONFIG, parallel=parallel, at=Coordinate(tensor=n), cache=caches[n]) for n in range(4)
    ]
    for fetcher in fetchers:
        fetcher.prefetch(whole.rank_file)
    for fetcher in fetchers:
        for got, expected in zip(fetcher.take(whole.rank_file), alone, strict=True):
            assert isinstance(got, PackedMicroBatch)
            routed, wanted = got.fields["routed_experts"], expected.fields["routed_experts"]
            assert isinstance(routed, DenseTensor)
            assert isinstance(wanted, DenseTensor)
            assert torch.equal(routed.rows, wanted.rows)
        total += fetcher.metrics(0)["payload/bytes_fetched"]
    for fetcher, cache in zip(fetchers, caches, strict=True):
        fetcher.release(0)
        fetcher.close()
        cache.close()
    once = metrics["payload/bytes_fetched"]  # of one rank alone
    assert 0.95 * once <= total <= once  # gaps between chunks that different ranks fetched are not read


def test_a_stand_in_has_the_layers_and_the_rows_of_its_rank(whole: Whole) -> None:
    parallel = layout_of(ContextLayout.ZIGZAG, 2, 3)
    at = Coordinate(context=1, pipeline=1)
    batches, _ = taken(whole, parallel, at)
    agreed = Agreement((False, True), 1, {}, {})
    ready, generated = ready_batches(batches, agreed, StandIns.of(SCHEMA, parallel, at), device=torch.device("cpu"))
    real, stand_in = (b.fields["routed_experts"] for b in ready)
    assert isinstance(real, DenseTensor)
    assert isinstance(stand_in, DenseTensor)
    assert generated == 0
    assert stand_in.layer_ids == (2, 3, 7)
    assert tuple(stand_in.rows.shape) == (ready[1].token_count, 3, TOP_K)
    assert {r.numpy().tobytes() for r in stand_in.rows} <= {r.numpy().tobytes() for r in real.rows[real.valid]}
    assert not ready[1].loss_mask.any()


def test_siblings_stand_in_with_the_same_rows_although_one_of_them_fetched_more(whole: Whole) -> None:
    """Tensor parallel ranks compute one token together: different routing on two of them would be nonsense."""
    parallel = Parallel(tensor=2)
    batches, _ = taken(whole, parallel, Coordinate())
    agreed = Agreement((True, True), 2, {}, {})
    device = torch.device("cpu")
    one, other = StandIns.of(SCHEMA, parallel, Coordinate()), StandIns.of(SCHEMA, parallel, Coordinate(tensor=1))
    mine, _ = ready_batches(batches, agreed, one, device=device)
    theirs, _ = ready_batches([batches[0], _tokens(batches[1])], agreed, other, device=device)
    for a, b in zip(mine, theirs, strict=True):
        routed, expected = a.fields["routed_experts"], b.fields["routed_experts"]
        assert isinstance(routed, DenseTensor)
        assert isinstance(expected, DenseTensor)
        assert torch.equal(routed.rows, expected.rows)


def _tokens(batch: PackedMicroBatch) -> PackedMicroBatch:
    return PackedMicroBatch(**{**vars(batch), "fields": {}})


@pytest.mark.payload("D3")
def test_prime_rls_names_and_shapes_hold_what_slicing_the_inline_arrays_gives(whole: Whole) -> None:
    """Its context parallelism cuts the packed axis into equal parts."""
    parallel = Parallel(context=2, layout=ContextLayout.ALLGATHER, multiple=MULTIPLE, expert_shards=SHARDS)
    samples = whole.samples[0]
    inline_ids = np.concatenate([s.sequence.tokens() for s in samples])
    inline_routing = np.concatenate([s.fields["routed_experts"] for s in samples]).astype(np.int32)
    half = len(inline_ids) // 2
    assert len(inline_ids) % (2 * MULTIPLE) == 4  # the second half ends in padding
    for rank, part in enumerate((slice(0, half + 2), slice(half + 2, None))):
        batch = taken(whole, parallel, Coordinate(context=rank))[0][0]
        ready = ReadyMicroBatch(0, batch, dropped=False, cu_seqlens_padded=batch.cu_seqlens, source=whole.rank_file.micro_batches[0])
        got = prime_micro_batch(ready, loras=2)
        count = len(inline_ids[part])
        seq = half + 2
        assert {n: tuple(t.shape) for n, t in got.items() if isinstance(t, torch.Tensor)} == {
            "input_ids": (1, seq),
            "position_ids": (1, seq),
            "advantages": (1, seq),
            "loss_mask": (1, seq),
            "inference_logprobs": (1, seq),
            "temperatures": (1, seq),
            "routed_experts": (1, seq, len(LAYERS), TOP_K),
            "lora_num_tokens": (2,),
        }
        routed = got["routed_experts"]
        assert routed is not None
        assert routed.dtype == torch.int32
        assert routed[0, :count].numpy().tobytes() == inline_routing[part].tobytes()
        assert got["input_ids"][0, :count].tolist() == inline_ids[part].tolist()
        assert sum(got["sequence_lengths"]) == seq
        assert got["lora_num_tokens"].tolist() == [seq, 0]
        named = prime_micro_batch(ready, loss="rl")["advantages"]
        assert [(a["loss"], a["values"].shape, a["mask"].dtype) for a in named] == [("rl", (1, seq), torch.bool)]
