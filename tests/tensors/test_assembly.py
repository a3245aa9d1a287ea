"""Byte identity: tensors by reference equal the same arrays packed inline, by an oracle that knows neither reader nor assembly."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsref.config import StoreSection
from fsref.loader.fetch import FetchFailure, StepFetcher
from fsref.refs import Dense, Payload, PayloadRef, Ragged, Schema, TokenRange, object_name
from fsref.steps import MicroBatch, RankFile, SampleSequence
from fsref.store import Store, open_root
from fsref.tensors import DenseTensor, PackedMicroBatch, RaggedTensor
from fsref.writer import Writer
from tests.support.faultystore import FaultyStore
from tests.support.payloads import Numbers, cut, payload, schema


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_root(str(tmp_path), run="run", create=True)


Inline = tuple[Payload | None, int, int, bool]
"""(arrays, kept tokens, sequence tokens, padding dummy)."""


def sequence(rng: np.random.Generator, tokens: int, ref: PayloadRef | None, *, padding: bool = False, name: str = "s") -> SampleSequence:
    return SampleSequence(
        sample=name,
        token_ids=rng.integers(0, 500, tokens).astype("<i4").tobytes(),
        loss_mask=rng.integers(0, 2, tokens).astype(np.uint8).tobytes(),
        logprobs=rng.standard_normal(tokens).astype("<f4").tobytes(),
        advantages=rng.standard_normal(tokens).astype("<f4").tobytes(),
        ref=ref,
        temperature=0.5 + tokens,
        padding=padding,
    )


def oracle(sequences: Sequence[Inline], run_schema: Schema) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """Field to arrays, by concatenating what an inline message would carry."""
    out: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    for f in run_schema.fields:
        rows, valid = [], []
        columns: dict[str, list[np.ndarray[Any, Any]]] = {c.name: [] for c in f.columns}
        for arrays, kept, tokens, padding in sequences:
            wanted = arrays is not None and f.name in arrays.fields and (not padding or f.expert_count > 0)
            shape = () if f.ragged else f.row_shape
            if not wanted:
                rows.append(np.zeros((tokens, *shape), np.int32 if f.ragged else f.dtype))
                valid.append(np.zeros(tokens, np.bool_))
                continue
            assert arrays is not None
            data = arrays.fields[f.name]
            got, values = cut(data, 0, kept)
            gone = np.zeros(arrays.token_count, np.bool_)
            for r in data.missing:
                gone[r.start : r.stop] = True
            extra = tokens - kept
            if f.ragged:
                rows.append(np.concatenate([got, np.zeros(extra, np.int32)]))
            else:
                rows.append(np.concatenate([got, np.repeat(got[-1:], extra, 0)]) if kept else np.zeros((tokens, *shape), f.dtype))
            valid.append(np.concatenate([~gone[:kept], np.zeros(extra, np.bool_)]))
            for name, v in values.items():
                columns[name].append(v)
        if any(v.any() or len(v) == 0 for v in valid) or any(len(c) for c in columns.values()):
            out[f.name] = {"rows": np.concatenate(rows), "valid": np.concatenate(valid)}
            out[f.name] |= {n: np.concatenate(v) if v else np.zeros(0) for n, v in columns.items()}
    return out


def assert_identical(batch: PackedMicroBatch, expected: Mapping[str, Mapping[str, np.ndarray[Any, Any]]], run_schema: Schema) -> None:
    assert set(batch.fields) == set(expected)
    for name, arrays in expected.items():
        got, spec = batch.fields[name], run_schema.field(name)
        assert got.valid.numpy().tolist() == arrays["valid"].tolist(), name
        if isinstance(got, DenseTensor):
            wide = np.int32 if spec.expert_count or spec.dtype == "uint16" else spec.dtype
            assert got.rows.numpy().tobytes() == arrays["rows"].astype(wide).tobytes(), name
        else:
            assert got.counts.numpy().tobytes() == arrays["rows"].astype(np.int32).tobytes(), name
            for c in spec.columns:
                assert got.columns[c.name].numpy().tobytes() == arrays[c.name].tobytes(), f"{name}.{c.name}"
            assert int(got.offsets[-1]) == len(got.columns[spec.columns[0].name])


def rank_file(run_schema: Schema, micro_batches: Sequence[MicroBatch], number: int = 0) -> RankFile:
    return RankFile(v=1, run="run", step=number, data_rank=0, schema=run_schema, micro_batches=tuple(micro_batches), owned=())


@pytest.mark.parametrize("seed", range(12))
def test_packed_tensors_equal_inline_packing(store: Store, seed: int) -> None:
    rng = np.random.default_rng(seed)
    run_schema = schema(layers_per_chunk=int(rng.integers(0, 4)))
    writer = Writer(store, run_schema, Numbers(), durability="process")
    micro_batches, inline = [], []
    for m in range(4):
        sequences, parts = [], []
        for n in range(int(rng.integers(1, 6))):
            stored = int(rng.choice([1, 2, 30, 500, 2048, 3000]))
            holes = {
                f.name: [TokenRange(0, 1), TokenRange(stored - 1, stored)] for f in run_schema.fields if stored > 4 and rng.random() < 0.5
            }
            arrays = payload(rng, run_schema, stored, missing=holes)
            if rng.random() < 0.3:
                arrays = Payload(arrays.token_ids, {k: v for k, v in arrays.fields.items() if k != "sampling_mask"})
            kept = stored if rng.random() < 0.5 else int(rng.integers(1, stored + 1))
            tokens = kept + int(rng.choice([0, 0, 2]))
            padding = n > 0 and rng.random() < 0.2
            ref = writer.put(arrays).truncated(kept)
            sequences.append(sequence(rng, tokens, ref, padding=padding, name=f"{m}/{n}"))
            parts.append((arrays, kept, tokens, padding))
        micro_batches.append(MicroBatch(tuple(sequences)))
        inline.append(parts)
    with StepFetcher(store, run_schema, config=StoreSection()) as loader:
        got = loader.take(rank_file(run_schema, micro_batches))
    for batch, parts, micro_batch in zip(got, inline, micro_batches, strict=True):
        assert isinstance(batch, PackedMicroBatch)
        assert_identical(batch, oracle(parts, run_schema), run_schema)
        assert batch.token_ids.tolist() == [t for s in micro_batch.sequences for t in s.tokens()]
        assert batch.cu_seqlens.tolist() == np.cumsum([0, *(s.token_count for s in micro_batch.sequences)]).tolist()
        assert batch.position_ids.tolist() == [t for s in micro_batch.sequences for t in range(s.token_count)]


def test_samples_without_arrays_pack_beside_samples_with_them(store: Store) -> None:
    rng, run_schema = np.random.default_rng(0), schema()
    writer = Writer(store, run_schema, Numbers())
    arrays = payload(rng, run_schema, 6)
    ref = writer.put(arrays)
    micro_batch = MicroBatch((sequence(rng, 3, None), sequence(rng, 6, ref), sequence(rng, 2, None)))
    with StepFetcher(store, run_schema, config=StoreSection()) as loader:
        (got,) = loader.take(
            rank_file(
                run_schema,
                [
                    micro_batch,
                ],
            )
        )
    assert isinstance(got, PackedMicroBatch)
    assert_identical(got, oracle([(None, 0, 3, False), (arrays, 6, 6, False), (None, 0, 2, False)], run_schema), run_schema)
    mask = got.fields["sampling_mask"]
    assert isinstance(mask, RaggedTensor)
    assert mask.counts[:3].tolist() == [0, 0, 0]
    assert mask.valid.tolist() == [False] * 3 + [True] * 6 + [False] * 2


def test_a_micro_batch_without_any_arrays_has_no_fields(store: Store) -> None:
    rng, run_schema = np.random.default_rng(0), schema()
    with StepFetcher(store, run_schema, config=StoreSection()) as loader:
        (got,) = loader.take(rank_file(run_schema, [MicroBatch((sequence(rng, 3, None),))]))
    assert isinstance(got, PackedMicroBatch)
    assert (got.fields, got.bytes_read, got.token_count) == ({}, 0, 3)


def test_every_tensor_is_writable_and_no_collective_meets_int16(store: Store) -> None:
    rng, run_schema = np.random.default_rng(1), schema()
    ref = Writer(store, run_schema, Numbers()).put(payload(rng, run_schema, 4))
    with StepFetcher(store, run_schema, config=StoreSection()) as loader:
        (got,) = loader.take(rank_file(run_schema, [MicroBatch((sequence(rng, 4, ref),))]))
    assert isinstance(got, PackedMicroBatch)
    tensors = [got.token_ids, got.loss_mask, got.logprobs, got.advantages]
    for data in got.fields.values():
        tensors += [data.rows] if isinstance(data, DenseTensor) else [data.counts, *data.columns.values()]
    for tensor in tensors:
        tensor.add_(0) if tensor.dtype is not torch.bool else tensor.logical_or_(tensor)
        assert tensor.dtype not in (torch.int16, torch.uint16)


def test_bfloat16_rows_come_back_as_bfloat16(store: Store) -> None:
    from fsref.refs import Alignment, Field

    run_schema = Schema((Field(name="hidden", alignment=Alignment.INPUT, dtype="uint16", row_shape=(8,), logical_dtype="bfloat16"),))
    values = torch.randn(3, 8).to(torch.bfloat16)
    bits = values.view(torch.int16).numpy().view(np.uint16)
    ref = Writer(store, run_schema, Numbers()).put(Payload(np.zeros(3, np.int32), {"hidden": Dense(bits)}))
    with StepFetcher(store, run_schema, config=StoreSection()) as loader:
        (got,) = loader.take(rank_file(run_schema, [MicroBatch((sequence(np.random.default_rng(0), 3, ref),))]))
    assert isinstance(got, PackedMicroBatch)
    hidden = got.fields["hidden"]
    assert isinstance(hidden, DenseTensor)
    assert torch.equal(hidden.rows, values)


def test_a_failed_fetch_names_its_kind_and_objects_and_spares_the_others(store: Store) -> None:
    rng, run_schema = np.random.default_rng(2), schema()
    writer = Writer(store, run_schema, Numbers())
    refs = [writer.put(payload(rng, run_schema, 40)) for _ in range(3)]
    assert store.posix_path is not None
    root = Path(store.posix_path)
    (root / object_name(refs[0].object_ids[0])).unlink()
    damaged = root / object_name(refs[1].object_ids[0])
    data = bytearray(damaged.read_bytes())
    data[100] ^= 1
    damaged.write_bytes(bytes(data))
    rank = rank_file(run_schema, [MicroBatch((sequence(rng, 40, r),)) for r in refs])
    with StepFetcher(store, run_schema, config=StoreSection(retries_max=1)) as loader:
        got = loader.take(rank)
    assert [g.kind if isinstance(g, FetchFailure) else "ok" for g in got] == ["missing", "corrupt", "ok"]
    first = got[0]
    assert isinstance(first, FetchFailure)
    assert first.object_ids == refs[0].object_ids
    assert (first.batch.token_count, first.batch.fields) == (40, {})
    assert refs[0].object_ids[0] in str(first.error)


def test_prefetch_is_counted_as_hidden_and_the_budget_holds(store: Store) -> None:
    rng, run_schema = np.random.default_rng(3), schema()
    writer = Writer(store, run_schema, Numbers(), durability="process")
    refs = [writer.put(payload(rng, run_schema, 2000)) for _ in range(12)]
    limit = 400_000  # arrays and stored bytes of about one micro batch
    config = StoreSection(bytes_inflight_max=limit)
    ranks = [rank_file(run_schema, [MicroBatch((sequence(rng, 2000, r),)) for r in refs[n::2]], n) for n in range(2)]
    with StepFetcher(store, run_schema, config=config) as loader:
        for rank in ranks:
            loader.prefetch(rank)
        for rank in ranks:
            assert all(isinstance(g, PackedMicroBatch) for g in loader.take(rank))
            seen = loader.metrics(rank.step)
            assert seen["payload/bytes_fetched"] == sum(loader.reader.plan(r).byte_count for r in refs[rank.step :: 2])
            assert 0 <= seen["payload/fetch_time_hidden"] <= seen["payload/fetch_time"]
            assert seen["payload/fetch_time"] <= seen["payload/fetch_time_hidden"] + seen["payload/fetch_time_exposed"]
            loader.release(rank.step)
        assert 0 < loader._ahead.bytes_ahead_peak <= limit


@pytest.mark.fault(40)
def test_a_fetch_that_hangs_is_one_failed_micro_batch_and_the_loader_goes_on_and_closes(store: Store) -> None:
    rng, run_schema = np.random.default_rng(5), schema()
    hanging = FaultyStore(store)
    writer = Writer(store, run_schema, Numbers(), durability="process")
    refs = [writer.put(payload(rng, run_schema, 40)) for _ in range(4)]
    gates = [hanging.hang("read_into", name=object_name(refs[n].object_ids[0])) for n in (0, 2)]
    config = StoreSection(fetch_threads=1, fetch_deadline_s=1.0, abandon_s=0.5)
    loader = StepFetcher(hanging, run_schema, config=config)
    got = loader.take(rank_file(run_schema, [MicroBatch((sequence(rng, 40, refs[0]),))], 0))
    assert [g.kind if isinstance(g, FetchFailure) else "ok" for g in got] == ["unavailable"]
    (healthy,) = loader.take(rank_file(run_schema, [MicroBatch((sequence(rng, 40, refs[1]),))], 1))
    assert isinstance(healthy, PackedMicroBatch)  # by the thread that took the stuck one's place
    loader.prefetch(rank_file(run_schema, [MicroBatch((sequence(rng, 40, r),)) for r in refs[2:]], 2))
    assert gates[1].entered.wait(30)
    loader.close()
    assert loader.reader.counters.abandoned == 2
    for gate in gates:
        gate.release()
        assert gate.left.wait(30)


def test_ragged_values_are_never_shifted_between_sequences(store: Store) -> None:
    run_schema = schema()
    writer = Writer(store, run_schema, Numbers())
    rng = np.random.default_rng(4)
    refs, wanted = [], []
    for n in range(5):
        counts = np.asarray([2, 0, 3], np.int32)
        ids = np.arange(5, dtype=np.int32) + 10 * n
        refs.append(writer.put(Payload(np.zeros(3, np.int32), {"sampling_mask": Ragged(counts, {"ids": ids})})).truncated(2))
        wanted += [10 * n, 10 * n + 1]
    with StepFetcher(store, run_schema, config=StoreSection()) as loader:
        (got,) = loader.take(rank_file(run_schema, [MicroBatch(tuple(sequence(rng, 2, r) for r in refs))]))
    assert isinstance(got, PackedMicroBatch)
    mask = got.fields["sampling_mask"]
    assert isinstance(mask, RaggedTensor)
    assert mask.columns["ids"].tolist() == wanted
    assert mask.offsets.tolist() == [0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10]
