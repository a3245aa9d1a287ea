"""References of several segments: rows by absolute position, from whichever segment counts, against a loop over tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsref.config import StoreSection
from fsref.errors import BadRef, PayloadError
from fsref.plan import State, asked_fields, missing_ranges, present_fields, sources, states
from fsref.reader import Reader
from fsref.refs import (
    Alignment,
    Dense,
    Field,
    Part,
    Payload,
    PayloadRef,
    Ragged,
    Schema,
    Segment,
    TokenRange,
    flags_of,
    join,
    routed_experts,
    sampling_mask,
)
from fsref.steps import MicroBatch, RankFile, SampleSequence
from fsref.store import Store, open_root
from fsref.writer import Receipts, Writer

SCHEMA = Schema(
    (
        routed_experts(layer_ids=range(2), top_k=2, expert_count=300),
        sampling_mask(),
        Field(name="score", alignment=Alignment.INPUT, dtype="int32"),
    )
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return open_root(str(tmp_path_factory.mktemp("root")), run="run", create=True)


Cells = dict[str, list[Any]]
"""Per field one entry per token: a list of numbers (dense), (ids, flag) (ragged), or None where missing."""


def cells_of(data: Dense | Ragged) -> list[Any]:
    count = len(data.rows) if isinstance(data, Dense) else len(data.counts)
    gone = flags_of(data.missing, count)
    if isinstance(data, Dense):
        return [None if gone[t] else np.asarray(data.rows[t]).tolist() for t in range(count)]
    out, at = [], 0
    for t in range(count):
        n = int(data.counts[t])
        out.append(None if gone[t] else (data.columns["ids"][at : at + n].tolist(), int(data.row_columns["flags"][t])))
        at += n
    return out


def oracle(parts: Sequence[tuple[int, Payload]], token_count: int) -> tuple[Cells, int]:
    """What each token's row is, the first part that has one deciding, and how many rows a later part gives differently."""
    out: Cells = {f.name: [None] * token_count for f in SCHEMA.fields}
    conflicts = 0
    for start, payload in parts:
        for name, data in payload.fields.items():
            for n, cell in enumerate(cells_of(data)):
                if cell is None:
                    continue
                if out[name][start + n] is None:
                    out[name][start + n] = cell
                elif out[name][start + n] != cell:
                    conflicts += 1
    return out, conflicts


def filled(cells: list[Any]) -> list[Any]:
    last = next(c for c in cells if c is not None)
    out = []
    for c in cells:
        last = c if c is not None else last
        out.append(last)
    return out


def draw_part(rng: np.random.Generator, ids: np.ndarray[Any, Any], start: int, stop: int, shared: dict[str, Any]) -> Payload:
    """Rows of tokens [start, stop), mostly those of ``shared``, with holes and now and then another value."""
    count = stop - start
    fields: dict[str, Dense | Ragged] = {}
    for field in SCHEMA.fields:
        if rng.random() < 0.2:
            continue
        gone = rng.random(count) < rng.choice([0.0, 0.2, 0.9])
        holes = tuple(TokenRange(a, a + 1) for a in range(count) if gone[a])
        ranges: list[TokenRange] = []
        for hole in holes:
            if ranges and ranges[-1].stop == hole.start:
                ranges[-1] = TokenRange(ranges[-1].start, hole.stop)
            else:
                ranges.append(hole)
        if field.ragged:
            counts = np.where(gone, 0, shared["counts"][start:stop]).astype(np.int32)
            values = [shared["ids"][start + t][: counts[t]] for t in range(count)]
            flat = np.asarray([v for row in values for v in row], np.int32)
            if len(flat) and rng.random() < 0.3:
                flat[0] += 1
            flags = np.where(gone, 0, shared["flags"][start:stop]).astype(np.uint8)
            fields[field.name] = Ragged(counts, {"ids": flat}, tuple(ranges), {"flags": flags})
        else:
            rows = shared[field.name][start:stop].copy()
            if count and rng.random() < 0.3:
                rows[int(rng.integers(count))] = 7
            fields[field.name] = Dense(rows, tuple(ranges))
    return Payload(ids[start:stop], fields)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(1, 6), st.booleans())
@pytest.mark.payload("A3", "A4", "A5", "A16")
def test_segments_merge_by_position_as_a_loop_over_tokens_does(store: Store, seed: int, tokens: int, pieces: int, long: bool) -> None:
    rng = np.random.default_rng(seed)
    tokens = tokens * 40 if long else tokens  # more than one token range in an object
    ids = rng.integers(0, 500, tokens).astype(np.int32)
    counts = rng.integers(0, 4, tokens)
    shared = {
        "counts": counts,
        "ids": [rng.integers(0, 500, n).tolist() for n in counts],
        "flags": rng.integers(0, 3, tokens),
        "routed_experts": rng.integers(0, 300, (tokens, 2, 2)),
        "score": rng.integers(0, 1000, tokens),
    }
    writer = Writer(store, SCHEMA, Receipts("t"), durability="process")
    parts, drawn = [], []
    for _ in range(pieces):
        start, stop = sorted(int(n) for n in rng.integers(0, tokens + 1, 2))
        payload = draw_part(rng, ids, start, stop, shared)
        parts.append(Part(writer.put(payload), start))
        drawn.append((start, payload))
    ref = join(parts, token_ids=ids)
    assert PayloadRef.decode(ref.to_json()) == ref
    expected, conflicts = oracle(drawn, tokens)
    held = [n for n, cells in expected.items() if any(c is not None for c in cells)]
    start, stop = sorted(int(n) for n in rng.integers(0, tokens + 1, 2))
    with Reader(store, SCHEMA) as reader:
        whole = reader.read(ref)
        assert reader.counters.conflicts == conflicts
        part = reader.read(ref.truncated(stop), tokens=TokenRange(start, stop))
    assert list(present_fields(ref, SCHEMA)) == [f.name for f in SCHEMA.fields if f.name in held]
    assert set(whole) == set(part) == set(held)
    for name in held:
        cells = expected[name]
        assert cells_of(whole[name]) == cells
        assert cells_of(part[name]) == cells[start:stop]
        for data, a, b in ((whole[name], 0, tokens), (part[name], start, stop)):
            if isinstance(data, Dense):
                assert data.rows.tolist() == filled(cells)[a:b], "missing rows are copies of their neighbours"


def put(store: Store, schema: Schema, ids: Sequence[int], **fields: Dense | Ragged) -> PayloadRef:
    return Writer(store, schema, Receipts("t"), durability="process").put(Payload(np.asarray(ids, np.int32), fields))


ONE = Schema((Field(name="x", alignment=Alignment.INPUT, dtype="uint8"),))


def rows(*values: int) -> np.ndarray[Any, Any]:
    return np.asarray(values, np.uint8)


def read(store: Store, ref: PayloadRef) -> Dense:
    with Reader(store, ONE) as reader:
        data = reader.read(ref)["x"]
    assert isinstance(data, Dense)
    return data


@pytest.mark.payload("A3")
def test_the_next_turn_brings_the_true_row_of_the_boundary_token(store: Store) -> None:
    first = put(store, ONE, [1, 2, 3, 4], x=Dense(rows(5, 6, 7, 7), (TokenRange(3, 4),)))
    second = put(store, ONE, [4, 5, 6], x=Dense(rows(9, 8, 8), (TokenRange(2, 3),)))
    data = read(store, join([Part(first), Part(second, 3)], token_ids=[1, 2, 3, 4, 5, 6]))
    assert data.rows.tolist() == [5, 6, 7, 9, 8, 8]
    assert data.missing == (TokenRange(5, 6),)


@pytest.mark.payload("A4")
def test_a_gap_between_segments_is_missing_and_named(store: Store) -> None:
    first, second = put(store, ONE, range(5), x=Dense(rows(0, 1, 2, 3, 4))), put(store, ONE, [7, 8], x=Dense(rows(17, 18)))
    ref = join([Part(first), Part(second, 7)], token_ids=range(9))
    assert missing_ranges(ref, ONE) == {"x": (TokenRange(5, 7),)}
    assert read(store, ref).rows.tolist() == [0, 1, 2, 3, 4, 4, 4, 17, 18]
    assert states(ref, ONE) == {"x": State.PARTIAL}


@pytest.mark.payload("A5")
def test_an_overlap_keeps_the_earlier_segments_rows_and_counts_differences(store: Store) -> None:
    held = put(store, ONE, range(5), x=Dense(rows(0, 1, 2, 3, 4)))
    for repeated, differences in (((3, 4, 50, 60), 0), ((3, 40, 50, 60), 1)):
        later = put(store, ONE, [3, 4, 5, 6], x=Dense(rows(*repeated)))
        ref = join([Part(held), Part(later, 3)], token_ids=range(7))
        with Reader(store, ONE) as reader:
            data = reader.read(ref)["x"]
            assert reader.counters.conflicts == differences
        assert isinstance(data, Dense)
        assert data.rows.tolist() == [0, 1, 2, 3, 4, 50, 60]


@pytest.mark.payload("A19")
def test_a_splice_of_prefill_and_decode_says_who_gave_which_rows(store: Store) -> None:
    ids = range(9)
    prefill = put(store, ONE, ids[:4], x=Dense(rows(1, 1, 1, 1)))
    decode = put(store, ONE, ids, x=Dense(rows(0, 0, 0, 0, 2, 2, 2, 2, 2), (TokenRange(8, 9),)))
    ref = join(
        [Part(prefill, source="prefill"), Part(decode, tokens=TokenRange(4, 9), source="decode")],
        token_ids=ids,
    )
    with Reader(store, ONE) as reader:
        data = reader.read(ref)["x"]
        assert reader.counters.conflicts == 0
    assert isinstance(data, Dense)
    assert data.rows.tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 2]
    assert data.missing == (TokenRange(8, 9),)
    assert sources(ref, ONE, "x") == ((TokenRange(0, 4), "prefill"), (TokenRange(4, 8), "decode"))


def test_parts_of_other_tokens_or_another_schema_are_not_joined(store: Store) -> None:
    part = put(store, ONE, [1, 2, 3], x=Dense(rows(1, 2, 3)))
    with pytest.raises(PayloadError, match="other token ids"):
        join([Part(part, 1)], token_ids=[1, 2, 3, 4])
    with pytest.raises(BadRef, match="does not fit a sequence of 2"):
        join([Part(part)], token_ids=[1, 2])
    other = Schema((Field(name="x", alignment=Alignment.INPUT, dtype="uint16"),))
    with pytest.raises(BadRef, match="cannot be joined"):
        join([Part(part), Part(put(store, other, [4], x=Dense(rows(4))), 3)], token_ids=[1, 2, 3, 4])
    with pytest.raises(BadRef, match="at least one part"):
        join([], token_ids=[])


@pytest.mark.payload("A14")
def test_asked_for_but_absent_is_another_state_than_not_requested(store: Store) -> None:
    schema = Schema((routed_experts(layer_ids=range(2), top_k=2, expert_count=8), sampling_mask()))
    ids = np.arange(3, dtype=np.int32)
    writer = Writer(store, schema, Receipts("t"), durability="process")
    mask = Ragged(np.asarray([0, 1, 1], np.int32), {"ids": np.asarray([1, 2], np.int32)})
    ref = writer.put(Payload(ids, {"sampling_mask": mask}, absent=("routed_experts",)))
    assert states(ref, schema) == {"routed_experts": State.ABSENT, "sampling_mask": State.COMPLETE}
    assert (present_fields(ref, schema), asked_fields(ref, schema)) == (("sampling_mask",), ("routed_experts", "sampling_mask"))
    assert missing_ranges(ref, schema) == {"routed_experts": (TokenRange(0, 3),)}
    nobody = writer.put(Payload(ids, {"sampling_mask": mask}))
    assert states(nobody, schema)["routed_experts"] is State.NOT_REQUESTED
    with Reader(store, schema) as reader:
        assert set(reader.read(ref)) == {"sampling_mask"}
    with pytest.raises(PayloadError, match="among the absent ones"):
        writer.put(Payload(ids, {"sampling_mask": mask}, absent=("sampling_mask",)))
    with pytest.raises(PayloadError, match="no field 'other'"):
        writer.put(Payload(ids, {}, absent=("other",)))


@pytest.mark.torch
def test_a_micro_batch_mixes_references_of_one_and_several_segments(store: Store) -> None:
    from fsref.loader.fetch import StepFetcher
    from fsref.tensors import DenseTensor, PackedMicroBatch, RaggedTensor

    rng = np.random.default_rng(0)
    writer = Writer(store, SCHEMA, Receipts("t"), durability="process")

    def payload(ids: Sequence[int], base: int, missing: tuple[TokenRange, ...] = ()) -> Payload:
        experts = np.full((len(ids), 2, 2), base)
        counts = np.ones(len(ids), np.int32)
        counts[[t for r in missing for t in range(r.start, r.stop)]] = 0
        mask = Ragged(counts, {"ids": np.full(int(counts.sum()), base, np.int32)}, missing)
        return Payload(np.asarray(ids, np.int32), {"routed_experts": Dense(experts, missing), "sampling_mask": mask})

    single = writer.put(payload([1, 2], 10))
    turns = [writer.put(payload([1, 2, 3], 20, (TokenRange(2, 3),))), writer.put(payload([3, 4], 30))]
    double = join([Part(turns[0]), Part(turns[1], 2)], token_ids=[1, 2, 3, 4])

    def sequence(ref: PayloadRef, tokens: int) -> SampleSequence:
        return SampleSequence(
            sample="s", token_ids=rng.integers(0, 9, tokens).astype("<i4").tobytes(), loss_mask=b"\x01" * tokens,
            logprobs=bytes(4 * tokens), advantages=bytes(4 * tokens), ref=ref, temperature=1.0, padding=False,
        )  # fmt: skip

    micro_batch = MicroBatch((sequence(single, 2), sequence(double, 4), sequence(double.truncated(3), 3), sequence(single, 2)))
    rank = RankFile(v=1, run="run", step=0, data_rank=0, schema=SCHEMA, micro_batches=(micro_batch,), owned=())
    with StepFetcher(store, SCHEMA, config=StoreSection()) as loader:
        (got,) = loader.take(rank)
        assert loader.metrics(0)["payload/conflicting_rows"] == 0
    assert isinstance(got, PackedMicroBatch)
    experts, mask = got.fields["routed_experts"], got.fields["sampling_mask"]
    assert isinstance(experts, DenseTensor)
    assert isinstance(mask, RaggedTensor)
    wanted = [10, 10, 20, 20, 30, 30, 20, 20, 30, 10, 10]
    assert experts.rows[:, 0, 0].tolist() == wanted
    assert mask.columns["ids"].tolist() == wanted
    assert mask.counts.tolist() == [1] * 11
    assert experts.valid.all()
    assert mask.valid.all()


@pytest.mark.payload("D11")
def test_two_hundred_turns_are_one_reference_within_its_limit(store: Store) -> None:
    writer = Writer(store, ONE, Receipts("t"), durability="process")
    ids = np.arange(1000, dtype=np.int32)
    parts = [Part(writer.put(Payload(ids[a : a + 5], {"x": Dense(np.full(5, a // 5, np.uint8))})), a) for a in range(0, 1000, 5)]
    ref = join(parts, token_ids=ids)
    assert len(ref.segments) == 200
    assert read(store, ref).rows.tolist() == np.repeat(np.arange(200), 5).tolist()
    assert len(ref.truncated(7).object_ids) == 200


@pytest.mark.payload("B16")
@pytest.mark.parametrize("missing", [b"\x01\xff\xff\xff\xff\x0f\x01", b"\x80", b"\x02\x01\x00\x01", b"\x01\x01\x00\x01\x00", b"\x01\x00"])
def test_hostile_missing_ranges_are_refused(store: Store, missing: bytes) -> None:
    ref = put(store, ONE, [1, 2], x=Dense(rows(1, 2)))
    bad = msgspec.structs.replace(ref, segments=(msgspec.structs.replace(ref.segments[0], missing=missing),))
    with pytest.raises(BadRef):
        missing_ranges(bad, ONE)


def test_a_reference_that_grows_past_its_limit_is_refused() -> None:
    segment = Segment("env.t.0123456789abcdef/0", 9, 0, 1, 0, b"x" * 1000)
    with pytest.raises(BadRef, match="larger than"):
        PayloadRef(b"12345678", 1, b"12345678", 1, (segment,) * 70)
    with pytest.raises(BadRef, match="printable"):
        Segment("env.t.0123456789abcdef/0", 9, 0, 1, 0, b"", b"", "a\nb")


def test_a_hostile_token_count_costs_no_memory_when_segments_overlap() -> None:
    index = b"\x80\x80\x80\x40\x01"  # 1 << 27 tokens of the schema's only field
    segments = tuple(Segment(f"env.t.0123456789abcdef/{n}", 9, n, 1 << 27, n, index) for n in range(3))
    ref = PayloadRef(ONE.hash, 1 << 27, b"12345678", 1 << 27, segments)
    assert missing_ranges(ref, ONE) == {}
    assert present_fields(ref, ONE) == ("x",)


def test_reading_without_a_wanted_token_reads_nothing(store: Store, tmp_path: Path) -> None:
    del tmp_path
    parts = [Part(put(store, ONE, [1, 2], x=Dense(rows(1, 2)))), Part(put(store, ONE, [3], x=Dense(rows(3))), 2)]
    ref = join(parts, token_ids=[1, 2, 3])
    with Reader(store, ONE) as reader:
        assert reader.plan(ref, tokens=TokenRange(1, 1)).request_count == 0
        empty = reader.read(ref, tokens=TokenRange(1, 1))["x"]
    assert isinstance(empty, Dense)
    assert empty.rows.shape == (0,)
