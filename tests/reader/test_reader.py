"""What was put comes back, exactly and only."""

import gc
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fsref.errors import BadRef, ObjectCorrupt, ObjectMissing, PayloadError
from fsref.plan import plan_read
from fsref.reader import Reader, allocate
from fsref.refs import Codec, Dense, Payload, PayloadRef, Ragged, Schema, TokenRange, object_name
from fsref.store import Store, open_root
from fsref.writer import Writer
from tests.support.faultystore import FaultyStore
from tests.support.payloads import Numbers, cut, payload, schema


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_root(str(tmp_path), run="run", create=True)


def put(store: Store, run_schema: Schema, arrays: Payload) -> PayloadRef:
    return Writer(store, run_schema, Numbers(), durability="process").put(arrays)


def assert_same(arrays: Payload, got: dict[str, Dense | Ragged], start: int, stop: int) -> None:
    assert set(got) == set(arrays.fields)
    for name, data in got.items():
        rows, columns = cut(arrays.fields[name], start, stop)
        if isinstance(data, Dense):
            assert data.rows.tobytes() == rows.tobytes(), name
            assert data.rows.shape == rows.shape
        else:
            assert data.counts.tobytes() == rows.astype(np.int32).tobytes(), name
            assert {n: v.tobytes() for n, v in data.columns.items()} == {n: v.tobytes() for n, v in columns.items()}, name


@pytest.mark.parametrize("codec", [Codec(), Codec(name="zstd", level=3), Codec(name="none")], ids=lambda c: c.name)
@pytest.mark.parametrize("tokens", [0, 1, 2, 2047, 2048, 2049, 5000])
def test_every_field_reads_back_bit_for_bit(store: Store, tokens: int, codec: Codec) -> None:
    run_schema = schema(codec=codec)
    arrays = payload(np.random.default_rng(tokens), run_schema, tokens)
    ref = put(store, run_schema, arrays)
    with Reader(store, run_schema) as reader:
        assert_same(arrays, reader.read(ref), 0, tokens)


@pytest.mark.parametrize("layers_per_chunk", [0, 1, 2, 3])
def test_any_token_range_reads_what_slicing_gives(store: Store, layers_per_chunk: int) -> None:
    run_schema, rng = schema(layers_per_chunk=layers_per_chunk), np.random.default_rng(7)
    arrays = payload(rng, run_schema, 9000, missing={"routed_experts": [TokenRange(4000, 4100), TokenRange(8999, 9000)]})
    ref = put(store, run_schema, arrays)
    cuts = [(0, 9000), (0, 1), (8999, 9000), (2047, 2049), (2048, 4096), (1024, 2048), (3072, 4096), (4050, 4051), (5, 5)]
    cuts += [tuple(sorted(int(n) for n in rng.integers(0, 9001, 2))) for _ in range(40)]  # type: ignore[misc]
    with Reader(store, run_schema) as reader:
        for start, stop in cuts:
            assert_same(arrays, reader.read(ref, tokens=TokenRange(start, stop)), start, stop)


def test_a_pipeline_stage_reads_its_layers_in_the_order_that_it_asks_for(store: Store) -> None:
    run_schema = schema(layers=6, layers_per_chunk=2)
    arrays = payload(np.random.default_rng(1), run_schema, 3000)
    ref = put(store, run_schema, arrays)
    with Reader(store, run_schema) as reader:
        got = reader.read(ref, fields=["routed_experts"], layers=[5, 0, 1])["routed_experts"]
        whole = reader.plan(ref, fields=["routed_experts"])
        stage = reader.plan(ref, fields=["routed_experts"], layers=[4, 5])
    rows = arrays.fields["routed_experts"]
    assert isinstance(got, Dense)
    assert isinstance(rows, Dense)
    assert np.array_equal(got.rows, rows.rows[:, [5, 0, 1]])
    assert sum(len(r.chunks) for r in stage.segments[0].requests) == 2
    assert sum(len(r.chunks) for r in whole.segments[0].requests) == 6


def test_a_missing_row_is_a_copy_of_the_nearest_earlier_real_row_and_is_marked(store: Store) -> None:
    run_schema = schema()
    arrays = payload(np.random.default_rng(2), run_schema, 8, missing={"routed_experts": [TokenRange(0, 2), TokenRange(5, 8)]})
    ref = put(store, run_schema, arrays)
    with Reader(store, run_schema) as reader:
        got = reader.read(ref)["routed_experts"]
    given = arrays.fields["routed_experts"]
    assert isinstance(got, Dense)
    assert isinstance(given, Dense)
    assert got.missing == (TokenRange(0, 2), TokenRange(5, 8))
    assert [int(r) for r in np.argmax((got.rows[:, None] == given.rows[None]).all((2, 3)), 1)] == [2, 2, 2, 3, 4, 4, 4, 4]


def test_truncation_moves_no_bytes_and_never_reads_beyond(store: Store) -> None:
    run_schema = schema()
    arrays = payload(np.random.default_rng(3), run_schema, 20000)
    ref = put(store, run_schema, arrays)
    short = ref.truncated(100)
    with Reader(store, run_schema) as reader:
        assert_same(arrays, reader.read(short), 0, 100)
        assert short.object_ids == ref.object_ids
        assert reader.plan(short).byte_count < reader.plan(ref).byte_count / 4
        with pytest.raises(BadRef, match="keeps 100"):
            reader.plan(short, tokens=TokenRange(0, 101))
    with pytest.raises(BadRef, match="cannot keep 101"):
        short.truncated(101)


def test_the_plan_reads_only_chunks_that_hold_a_wanted_row_or_value(store: Store) -> None:
    run_schema = schema()
    arrays = payload(np.random.default_rng(4), run_schema, 20000, longest=40)
    ref = put(store, run_schema, arrays)
    with Reader(store, run_schema) as reader:
        plan = reader.plan(ref, tokens=TokenRange(6000, 6001))
        whole = reader.plan(ref)
    chunks = [c for s in plan.segments for r in s.requests for c in r.chunks]
    needed = sum(c.size for c in chunks)
    assert plan.byte_count <= needed * 1.05
    assert whole.byte_count <= ref.byte_count
    dense = [c for c in chunks if c.column == ""]
    assert all(c.start <= 6000 < c.stop for c in dense)
    assert plan.request_count == len({c.offset for c in chunks}) or plan.request_count <= 3


def test_a_prefix_is_one_contiguous_byte_range(store: Store) -> None:
    run_schema = schema()
    ref = put(store, run_schema, payload(np.random.default_rng(5), run_schema, 20000))
    plan = plan_read(
        ref, run_schema, tokens=TokenRange(0, 7000), fields=[f.name for f in run_schema.fields], layers=None,
        request_bytes_max=1 << 30, gap_bytes_max=256,
    )  # fmt: skip
    assert plan.request_count == 1


def flip(store: Store, ref: PayloadRef, offset: int) -> None:
    assert store.posix_path is not None
    path = Path(store.posix_path) / object_name(ref.object_ids[0])
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


@pytest.mark.fault(43)
@pytest.mark.parametrize("codec", [Codec(), Codec(name="none")], ids=lambda c: c.name)
@pytest.mark.payload("F13")
def test_a_flipped_bit_in_any_chunk_is_found(store: Store, codec: Codec) -> None:
    run_schema = schema(codec=codec)
    ref = put(store, run_schema, payload(np.random.default_rng(6), run_schema, 300))
    with Reader(store, run_schema, retries_max=0) as reader:
        for request in reader.plan(ref).segments[0].requests:
            for chunk in request.chunks:
                for at in (0, 8, chunk.size // 2, chunk.size - 1):
                    flip(store, ref, request.offset + chunk.offset + at)
                    with pytest.raises(ObjectCorrupt):
                        reader.read(ref)
                    flip(store, ref, request.offset + chunk.offset + at)
        reader.read(ref)


@pytest.mark.fault(42)
def test_a_short_object_is_corrupt_and_an_absent_one_is_missing(store: Store) -> None:
    run_schema = schema()
    ref = put(store, run_schema, payload(np.random.default_rng(8), run_schema, 300))
    assert store.posix_path is not None
    path = Path(store.posix_path) / object_name(ref.object_ids[0])
    path.write_bytes(path.read_bytes()[:-1])
    with Reader(store, run_schema, retries_max=1) as reader:
        with pytest.raises(ObjectCorrupt, match="truncated or replaced"):
            reader.read(ref)
        path.unlink()
        with pytest.raises(ObjectMissing, match="given up after 2 attempts"):
            reader.read(ref)


@pytest.mark.payload("G10")
def test_a_file_that_appears_late_is_waited_for(store: Store) -> None:
    run_schema = schema()
    arrays = payload(np.random.default_rng(9), run_schema, 30)
    ref = put(store, run_schema, arrays)
    faulty = FaultyStore(store)
    fault = faulty.fail("open", ObjectMissing("not visible yet"))
    with Reader(faulty, run_schema, retries_max=4) as reader:
        assert_same(arrays, reader.read(ref), 0, 30)
        assert reader.counters.retries == fault.used == 1


def test_a_reference_of_another_schema_is_refused_before_any_read(store: Store) -> None:
    run_schema, other = schema(), schema(experts=32)
    ref = put(store, run_schema, payload(np.random.default_rng(10), run_schema, 10))
    with Reader(store, other) as reader, pytest.raises(BadRef, match="another run or configuration"):
        reader.read(ref)


def test_a_tampered_index_is_refused(store: Store) -> None:
    run_schema = schema()
    ref = put(store, run_schema, payload(np.random.default_rng(11), run_schema, 3000))
    segment = ref.segments[0]
    rng = np.random.default_rng(12)
    refused = 0
    with Reader(store, run_schema, retries_max=0) as reader:
        good = reader.read(ref)
        for _ in range(300):
            index = bytearray(segment.index)
            index[int(rng.integers(len(index)))] = int(rng.integers(256))
            bad = msgspec.structs.replace(ref, segments=(msgspec.structs.replace(segment, index=bytes(index)),))
            try:
                got = reader.read(bad)
            except (BadRef, ObjectCorrupt):
                refused += 1
                continue
            for name, data in got.items():  # a byte that did not change, or one that says the same
                assert isinstance(data, Dense) == isinstance(good[name], Dense)
    assert refused > 250


def test_readers_fill_the_callers_buffers(store: Store) -> None:
    run_schema = schema()
    arrays = payload(np.random.default_rng(13), run_schema, 5000)
    ref = put(store, run_schema, arrays)
    with Reader(store, run_schema) as reader:
        plan = reader.plan(ref, fields=["routed_experts"])
        out = allocate(plan, run_schema, "routed_experts")
        reader.read_into(plan, {"routed_experts": out})
    rows, _ = cut(arrays.fields["routed_experts"], 0, 5000)
    assert np.array_equal(out.rows, rows)  # type: ignore[union-attr]


def test_arrays_that_do_not_fit_the_schema_leave_no_object(store: Store) -> None:
    run_schema = schema(experts=16)
    good = payload(np.random.default_rng(14), run_schema, 4)
    numbers = Numbers()
    writer = Writer(store, run_schema, numbers)
    bad_rows = np.full((4, 4, 2), 16, np.int64)
    for fields, message in [
        ({"routed_experts": Dense(bad_rows)}, "expert ids 16..16"),
        ({"routed_experts": Dense(bad_rows[:3] * 0)}, r"shape \(3, 4, 2\)"),
        ({"routed_experts": Dense(bad_rows - 17)}, "expert ids -1"),
        ({"unheard_of": Dense(bad_rows)}, "no field 'unheard_of'"),
        ({"sampling_mask": Ragged(np.asarray([1, 1, 1, 1], np.int32), {"ids": np.zeros(5, np.int32)})}, "4 values by its counts"),
        ({"sampling_mask": Ragged(np.asarray([1, -1, 1, 1], np.int32), {"ids": np.zeros(2, np.int32)})}, "negative"),
        ({"sampling_mask": Ragged(np.asarray([1, 0, 0, 0], np.int64), {"ids": np.asarray([1 << 40])})}, "do not fit int32"),
    ]:
        with pytest.raises(PayloadError, match=message):
            writer.put(Payload(good.token_ids, fields))  # type: ignore[arg-type]
    assert numbers.kept == []
    assert list(store.list("obj")) == []


@pytest.mark.payload("F2")
def test_a_reader_keeps_nothing_of_what_it_has_read(store: Store) -> None:
    run_schema = schema()
    writer = Writer(store, run_schema, Numbers())
    refs = [writer.put(payload(np.random.default_rng(n), run_schema, 60)) for n in range(20)]
    with Reader(store, run_schema, threads=1) as reader:

        def read_all() -> int:
            for ref in refs:
                reader.read(ref)
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        first = read_all()
        sizes = [read_all() for _ in range(10)]
        tracemalloc.stop()
    assert max(sizes) < first + (64 << 10)


@pytest.mark.payload("F23")
def test_two_consumers_may_read_a_payload_or_ignore_it(store: Store) -> None:
    """Reading takes no right and leaves no trace: who ignores an array leaks nothing, and removal is the holder's alone."""
    run_schema = schema()
    ref = Writer(store, run_schema, Numbers()).put(payload(np.random.default_rng(3), run_schema, 60))
    before = sorted(store.list("obj"))
    with Reader(store, run_schema) as one, Reader(store, run_schema) as other:
        assert set(one.read(ref, fields=["routed_experts"])) == {"routed_experts"}
        assert set(other.read(ref)) == set(run_schema_names(run_schema))
    assert sorted(store.list("obj")) == before


def run_schema_names(run_schema: Schema) -> list[str]:
    return [f.name for f in run_schema.fields]
