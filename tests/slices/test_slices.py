"""What a rank reads is what slicing the inline arrays gives, for every layout, byte for byte, and no more is fetched than it takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fsref.buffers import BufferPool, Empty
from fsref.errors import BadRef, ConfigError, PayloadError
from fsref.objects import decode_chunk
from fsref.plan import (
    ContextLayout,
    PackedRows,
    SlicePlan,
    Source,
    balanced_rows,
    decode_index,
    packed,
    padding_count,
    placed,
    plan_slice,
    rank_layers,
    rank_rows,
    split_context,
)
from fsref.plan.padding import rectangle, take
from fsref.reader import Reader
from fsref.refs import Alignment, Codec, Dense, Field, FieldData, Part, Payload, Ragged, Schema, TokenRange, join
from fsref.slices import RankSlice, SliceBuffers, buffer_bytes, read_slice
from fsref.store import open_root
from fsref.writer import Writer
from tests.support import layouts
from tests.support.payloads import Numbers, cut, payload, schema

LAYERS = 6
STAGES = {
    1: [[[0, 1, 2, 3, 4, 5]]],
    2: [[[0]], [[1, 2, 3, 4, 5]]],
    3: [[[0], [4]], [[1], [3, 9]], [[5, 2]]],
}
"""Even, uneven, and virtual stages that are not contiguous, not ascending and name a layer without rows."""
STEP, SHARDS = 12, 4


@dataclass
class Inline:
    """One sequence and the arrays that a message would have carried for it."""

    source: Source
    arrays: Payload | None
    kept: int
    tokens: int


@dataclass
class Stage:
    schema: Schema
    reader: Reader
    sequences: list[Inline]


def _sequences(rng: np.random.Generator, run_schema: Schema, writer: Writer) -> Iterator[Inline]:
    every = tuple(f.name for f in run_schema.fields)

    def one(stored: int, *, kept: int | None = None, extra: int = 0, fields: tuple[str, ...] = every, **holes: list[TokenRange]) -> Inline:
        arrays = payload(rng, run_schema, stored, missing=holes)
        mask = arrays.fields["sampling_mask"]
        assert isinstance(mask, Ragged)
        flagged = Ragged(mask.counts, mask.columns, mask.missing, {"flags": rng.integers(0, 4, stored).astype(np.uint8)})
        arrays = Payload(arrays.token_ids, {**arrays.fields, "sampling_mask": flagged})
        count = stored if kept is None else kept
        return Inline(Source(writer.put(arrays).truncated(count), fields), arrays, count, count + extra)

    yield one(5000, kept=4500, routed_experts=[TokenRange(0, 3), TokenRange(2040, 2060)], spans=[TokenRange(4000, 5000)])
    yield one(7)
    yield Inline(Source(None, every), None, 0, 9)
    yield one(30, extra=13, indexer_picks=[TokenRange(20, 30)])
    yield one(16, fields=("routed_experts",))
    bare = payload(rng, run_schema, 11)
    bare = Payload(bare.token_ids, {n: d for n, d in bare.fields.items() if n != "sampling_mask"})
    yield Inline(Source(writer.put(bare), every), bare, 11, 11)
    yield _joined(rng, run_schema, writer, every)


def _joined(rng: np.random.Generator, run_schema: Schema, writer: Writer, every: tuple[str, ...]) -> Inline:
    """Two turns in two objects, with a hole between them; inline they are one array."""
    whole = payload(rng, run_schema, 100, missing={f.name: [TokenRange(40, 44)] for f in run_schema.fields})
    first, second = _turn(whole, 0, 40), _turn(whole, 44, 100)
    ref = join([Part(writer.put(first)), Part(writer.put(second), start=44)], token_ids=whole.token_ids)
    return Inline(Source(ref, every), whole, 100, 100)


def _turn(whole: Payload, start: int, stop: int) -> Payload:
    fields: dict[str, Dense | Ragged] = {}
    for name, data in whole.fields.items():
        rows, columns = cut(data, start, stop)
        fields[name] = Dense(rows) if isinstance(data, Dense) else Ragged(rows, columns)
    return Payload(whole.token_ids[start:stop], fields)


@pytest.fixture(scope="module", params=[0, 1, 4], ids=lambda n: f"layers_per_chunk={n}")
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    run_schema = schema(layers=LAYERS, layers_per_chunk=request.param)
    with open_root(str(tmp_path_factory.mktemp("root")), run="run", create=True) as store, Reader(store, run_schema) as reader:
        writer = Writer(store, run_schema, Numbers(), durability="process")
        yield Stage(run_schema, reader, list(_sequences(np.random.default_rng(1), run_schema, writer)))


def inline(stage: Stage, name: str, rows: Sequence[layouts.Row]) -> tuple[NDArray[Any], dict[str, NDArray[Any]], list[bool]]:
    """(rows or counts, columns, real) of a field at the given rows, cut from what a message would have carried."""
    spec = stage.schema.field(name)
    cuts = []
    for s in stage.sequences:
        held = s.arrays is not None and name in s.arrays.fields and name in s.source.fields
        cuts.append(cut(s.arrays.fields[name], 0, s.kept) if held and s.arrays is not None else None)
    shape = () if spec.ragged else spec.row_shape
    out = np.zeros((len(rows), *shape), np.int32 if spec.ragged else spec.dtype)
    values: dict[str, list[NDArray[Any]]] = {c.name: [np.zeros(0, c.dtype)] for c in spec.columns}
    real = []
    for r, row in enumerate(rows):
        found = cuts[row[0]] if row is not None else None
        if row is None or found is None or row[1] >= stage.sequences[row[0]].tokens:
            real.append(False)
            continue
        sequence, position = stage.sequences[row[0]], row[1]
        data = sequence.arrays.fields[name] if sequence.arrays is not None else None
        assert data is not None
        inside = position < sequence.kept
        real.append(inside and not any(gap.start <= position < gap.stop for gap in data.missing))
        if not spec.ragged:
            out[r] = found[0][position if inside else -1]
        elif inside:
            out[r] = found[0][position]
            start = int(found[0][:position].sum())
            for n, v in found[1].items():
                values[n].append(v[start : start + int(out[r])])
    return out, {n: np.concatenate(v) for n, v in values.items()}, real


def assert_slice(stage: Stage, got: RankSlice, rows: Sequence[layouts.Row], layers: Sequence[int]) -> None:
    assert set(got.fields) == {f.name for f in stage.schema.fields}
    pad = [row is None or row[1] >= stage.sequences[row[0]].tokens for row in rows]
    assert got.padding.tolist() == pad
    held = [n for n in layers if n < LAYERS]
    assert got.layers == {"routed_experts": tuple(held)}
    for name, data in got.fields.items():
        expected, columns, real = inline(stage, name, rows)
        assert got.valid[name].tolist() == real, name
        if isinstance(data, Ragged):
            assert data.counts.tobytes() == expected.tobytes(), name
            assert {n: v.tobytes() for n, v in data.columns.items()} == {n: v.tobytes() for n, v in columns.items()}, name
            assert {n: v.tolist() for n, v in data.row_columns.items()} == _flags(stage, name, rows, real)
            continue
        if name == "routed_experts":
            expected = expected[:, held]
            expected[pad] = balanced_rows(
                got.rows.row_slots()[pad], step=STEP, layer_ids=held, top_k=2, expert_count=16, shards=SHARDS
            )  # fmt: skip
        assert data.rows.dtype == expected.dtype
        assert data.rows.shape == expected.shape
        assert data.rows.tobytes() == expected.tobytes(), name


def _flags(stage: Stage, name: str, rows: Sequence[layouts.Row], real: Sequence[bool]) -> dict[str, list[int]]:
    """The row columns of a field, 0 where nothing is real."""
    out: dict[str, list[int]] = {c.name: [0] * len(rows) for c in stage.schema.field(name).row_columns}
    for n, (row, held) in enumerate(zip(rows, real, strict=True)):
        arrays = stage.sequences[row[0]].arrays if row is not None else None
        data = arrays.fields[name] if held and arrays is not None else None
        if row is not None and isinstance(data, Ragged):
            for column, values in data.row_columns.items():
                out[column][n] = int(values[row[1]])
    return out


def of_rank(
    stage: Stage, layout: str, rank: int, ranks: int, *, order: Sequence[int], tensor_rank: int = 0, tensor_ranks: int = 1
) -> PackedRows:
    lengths = [s.tokens for s in stage.sequences]
    rooms = [layouts.room_of(n, layout, ranks, 0) for n in lengths]
    step = packed([0, *accumulate(lengths)], [0, *accumulate(rooms)])
    return rank_rows(
        placed(step, order), ContextLayout(layout), context_rank=rank, context_ranks=ranks,
        tensor_rank=tensor_rank, tensor_ranks=tensor_ranks, multiple=6, first_slot=padding_count(step),
    )  # fmt: skip


def oracle(stage: Stage, layout: str, ranks: int, order: Sequence[int]) -> list[list[layouts.Row]]:
    return layouts.rank_rows(
        [(n, layouts.room_of(stage.sequences[n].tokens, layout, ranks, 0)) for n in order], layout, ranks=ranks, multiple=6
    )


@pytest.mark.payload("C3", "C4", "C5", "D1", "D2", "D3", "D4", "D8", "D10", "D12", "D15")
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("pipeline", [1, 2, 3])
def test_every_rank_reads_what_slicing_the_inline_arrays_gives(stage: Stage, layout: str, ranks: int, pipeline: int) -> None:
    order = [3, 0, 6, 1, 5, 2, 4]
    expected = oracle(stage, layout, ranks, order)
    fields = [f.name for f in stage.schema.fields]
    for pipeline_rank in range(pipeline):
        layers = rank_layers(STAGES[pipeline], pipeline_rank)
        for rank in range(ranks):
            got = read_slice(
                stage.reader, [s.source for s in stage.sequences], stage.schema, rows=of_rank(stage, layout, rank, ranks, order=order),
                fields=fields, layers=layers, step=STEP, expert_shards=SHARDS,
            )  # fmt: skip
            assert_slice(stage, got, expected[rank], layers)


@pytest.mark.payload("D1", "D5")
def test_tensor_ranks_read_their_part_of_a_context_ranks_rows(stage: Stage) -> None:
    order = [0, 3, 6]
    rows = oracle(stage, "zigzag", 2, order)[1]
    for tensor_rank in range(3):
        mine = of_rank(stage, "zigzag", 1, 2, order=order, tensor_rank=tensor_rank, tensor_ranks=3)
        got = read_slice(
            stage.reader, [s.source for s in stage.sequences], stage.schema, rows=mine,
            fields=[f.name for f in stage.schema.fields], layers=[2, 1], step=STEP, expert_shards=SHARDS,
        )  # fmt: skip
        size = len(rows) // 3
        assert_slice(stage, got, rows[tensor_rank * size : (tensor_rank + 1) * size], [2, 1])


def needed_bytes(stage: Stage, rows: PackedRows, fields: Sequence[str], layers: Sequence[int]) -> int:
    """Stored bytes of the chunks that hold a row, or a value of the token range, of a token of the rank; brute force over all chunks.

    For sequences of one object. A token beyond the kept ones needs the last kept row of dense fields, and nothing of ragged ones.
    """
    chunks: dict[tuple[str, str], int] = {}
    for span in rows.spans():
        sequence = stage.sequences[span.sequence]
        if sequence.source.ref is None:
            continue
        (segment,) = sequence.source.ref.segments
        layout, sizes, _ = decode_index(segment, stage.schema)
        own = {t // layout.range_tokens for t in range(span.tokens.start, span.tokens.stop) if t < sequence.kept}
        filler = {(sequence.kept - 1) // layout.range_tokens} if span.tokens.stop > sequence.kept else set()
        for chunk, size in zip(layout.chunks, sizes, strict=True):
            array = layout.arrays[chunk.array]
            spec = array.field
            if spec.name not in fields or spec.name not in sequence.source.fields:
                continue
            touched = own if spec.ragged else own | filler
            wanted = chunk.range_index in touched
            if array.flat:
                sums = [0, *layout.value_sums[spec.name]]
                wanted = any(chunk.start < sums[r + 1] and chunk.stop > sums[r] for r in touched)
            if spec.layer_ids:
                wanted = wanted and any(chunk.layer <= n < chunk.layer + array.chunk_shape[1] for n in layers)
            if wanted:
                chunks[segment.object_id, chunk.name] = size
    return sum(chunks.values())


@pytest.mark.payload("C3", "D1")
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_fetches_the_chunks_of_its_tokens_and_layers_and_no_others(stage: Stage, layout: str, ranks: int) -> None:
    order = [0, 3, 4, 1]
    for layers in ([0], [1, 2, 3, 4, 5], [4, 1]):
        for rank in range(ranks):
            rows = of_rank(stage, layout, rank, ranks, order=order)
            for fields in (["routed_experts"], ["routed_experts", "spans", "indexer_picks"]):
                plan = plan_slice(
                    [s.source for s in stage.sequences], stage.schema, rows=rows, fields=fields, layers=layers,
                    request_bytes_max=1 << 20, gap_bytes_max=0,
                )  # fmt: skip
                needed = needed_bytes(stage, rows, fields, layers)
                assert needed <= plan.read.byte_count <= 1.05 * needed
                before = stage.reader.counters.bytes_fetched
                buffers = SliceBuffers(plan, stage.schema, step=0, expert_shards=1)
                stage.reader.read_into(plan.read, buffers.out)
                assert stage.reader.counters.bytes_fetched - before == plan.read.byte_count


def whole_plan(stage: Stage, sources: Sequence[Source], rows: PackedRows, **other: Any) -> SlicePlan:
    wanted: dict[str, Any] = {
        "fields": [f.name for f in stage.schema.fields], "layers": None, "request_bytes_max": 1 << 20, "gap_bytes_max": 0,
    }  # fmt: skip
    return plan_slice(sources, stage.schema, rows=rows, **(wanted | other))


def test_expert_ids_can_be_read_into_a_wider_dtype(stage: Stage) -> None:
    rows = of_rank(stage, "contiguous", 1, 2, order=[0])
    plan = whole_plan(stage, [s.source for s in stage.sequences], rows, fields=["routed_experts"])
    stored = SliceBuffers(plan, stage.schema, step=STEP, expert_shards=SHARDS)
    wide = SliceBuffers(plan, stage.schema, step=STEP, expert_shards=SHARDS, expert_dtype="int64")
    for buffers in (stored, wide):
        stage.reader.read_into(plan.read, buffers.out)
    assert buffer_bytes(plan, stage.schema, expert_dtype="int64") == 8 * buffer_bytes(plan, stage.schema)
    narrow, broad = (b.finish().fields["routed_experts"] for b in (stored, wide))
    assert isinstance(narrow, Dense)
    assert isinstance(broad, Dense)
    assert broad.rows.dtype == np.int64
    assert np.array_equal(narrow.rows, broad.rows)


@pytest.mark.payload("B3")
def test_a_part_of_a_chunk_as_large_as_the_chunk_in_a_wider_dtype_is_read_right(stage: Stage) -> None:
    """512 rows of int32 take the bytes of 2,048 rows of uint8, which is a whole chunk."""
    ref = stage.sequences[0].source.ref
    assert ref is not None
    plan = stage.reader.plan(ref, tokens=TokenRange(100, 612), fields=["routed_experts"])
    one = SliceBuffers(
        SlicePlan(packed([0, 512], [0, 512]), plan, ("routed_experts",), {"routed_experts": tuple(range(LAYERS))}, {"routed_experts": ()}),
        stage.schema, step=0, expert_shards=1, expert_dtype="int32",
    )  # fmt: skip
    stage.reader.read_into(plan, one.out)
    got = one.finish().fields["routed_experts"]
    arrays = stage.sequences[0].arrays
    assert isinstance(got, Dense)
    assert arrays is not None
    assert np.array_equal(got.rows, cut(arrays.fields["routed_experts"], 100, 612)[0])


def test_a_stage_without_a_fields_layers_does_not_read_it(stage: Stage) -> None:
    rows = of_rank(stage, "contiguous", 0, 1, order=[1])
    plan = whole_plan(stage, [s.source for s in stage.sequences], rows, layers=[9], fields=["routed_experts", "indexer_picks"])
    assert plan.fields == ("indexer_picks",)
    assert plan.layers == {}


@pytest.mark.payload("D12")
def test_ranks_agree_on_the_fields_although_some_have_no_row_of_a_sequence_that_brings_them(stage: Stage) -> None:
    sources = [s.source for s in stage.sequences]
    with_arrays, without = [of_rank(stage, "allgather", rank, 2, order=[1, 2]) for rank in range(2)]
    assert {s.sequence for s in without.spans()} == {2}
    plans = [whole_plan(stage, sources, rows) for rows in (with_arrays, without)]
    assert plans[0].fields == plans[1].fields == tuple(f.name for f in stage.schema.fields)
    assert plans[1].read.byte_count == 0
    assert not any(plans[1].valid(name).any() for name in plans[1].fields)
    nothing = whole_plan(stage, sources, of_rank(stage, "allgather", 0, 2, order=[2]))
    assert nothing.fields == ()


def test_an_object_in_two_sequences_is_fetched_once(stage: Stage) -> None:
    sources = [s.source for s in stage.sequences]
    once = whole_plan(stage, sources, of_rank(stage, "contiguous", 0, 1, order=[0]))
    twice = whole_plan(stage, sources, of_rank(stage, "contiguous", 0, 1, order=[0, 0]))
    assert twice.read.byte_count == once.read.byte_count
    assert twice.rows.row_count > once.rows.row_count


def test_what_does_not_fit_is_refused_before_any_read(stage: Stage) -> None:
    sources = [s.source for s in stage.sequences]
    rows = of_rank(stage, "contiguous", 0, 1, order=[0])
    with pytest.raises(PayloadError, match="6 sources for 7 sequences"):
        whole_plan(stage, sources[:-1], rows)
    with pytest.raises(BadRef, match=r"fields \['nothing'\] asked for"):
        whole_plan(stage, sources, rows, fields=["nothing"])
    padded = of_rank(stage, "contiguous", 0, 1, order=[1])
    plan = whole_plan(stage, sources, padded)
    buffers = SliceBuffers(plan, stage.schema, step=0, expert_shards=3)
    stage.reader.read_into(plan.read, buffers.out)
    with pytest.raises(ConfigError, match="16 experts do not divide by 3"):
        buffers.finish()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.payload("C4", "C5", "D1", "D2", "D3", "D4", "D5", "D10", "D15")
def test_the_ranks_of_any_layout_hold_the_whole_exactly_once(stage: Stage, data: st.DataObject) -> None:
    """Every token's row of every layer, field by field: counted over all ranks, and compared with the inline arrays."""
    layout = data.draw(st.sampled_from(layouts.LAYOUTS))
    ranks, tensor_ranks = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2, 3]))
    order = data.draw(st.lists(st.integers(0, len(stage.sequences) - 1), min_size=1, unique=True))
    owner = data.draw(st.lists(st.integers(0, 2), min_size=LAYERS, max_size=LAYERS))
    permuted = data.draw(st.permutations(range(LAYERS)))
    stages = [[n for n in permuted if owner[n] == rank] for rank in range(3)]
    offsets = [0, *accumulate(s.tokens for s in stage.sequences)]
    whole = {name: _packed_inline(stage, name) for name in ("routed_experts", "spans", "indexer_picks")}
    seen = {name: np.zeros((offsets[-1], LAYERS if name == "routed_experts" else 1), np.int64) for name in whole}
    for layers in stages:
        for rank in range(ranks):
            for tensor_rank in range(tensor_ranks):
                rows = of_rank(stage, layout, rank, ranks, order=order, tensor_rank=tensor_rank, tensor_ranks=tensor_ranks)
                got = read_slice(
                    stage.reader, [s.source for s in stage.sequences], stage.schema, rows=rows,
                    fields=list(whole), layers=layers, step=STEP, expert_shards=SHARDS,
                )  # fmt: skip
                at = rows.index()
                for name, field in got.fields.items():
                    axis = list(got.layers.get(name, (0,)))
                    seen[name][np.ix_(at[at >= 0], np.asarray(axis))] += 1
                    if isinstance(field, Dense):
                        expected = whole[name][at[at >= 0]]
                        expected = expected[:, axis] if name == "routed_experts" else expected
                        assert np.array_equal(field.rows[at >= 0], expected)
                    else:
                        assert np.array_equal(field.counts[at >= 0], whole[name][at[at >= 0]])
    placed_rows = np.zeros(offsets[-1], np.int64)
    for n in order:
        placed_rows[offsets[n] : offsets[n + 1]] = 1
    held = {f for n in order if stage.sequences[n].arrays is not None for f in stage.sequences[n].source.fields}
    for name, counts in seen.items():
        times = 1 if name == "routed_experts" else len(stages)  # what has no layers is read by every stage here
        assert np.array_equal(counts, np.repeat(placed_rows[:, None] * times * (name in held), counts.shape[1], axis=1)), name


def _packed_inline(stage: Stage, name: str) -> NDArray[Any]:
    """Rows (or counts) of all sequences, packed by number, as a message would have carried them."""
    everything: list[layouts.Row] = [(n, p) for n, s in enumerate(stage.sequences) for p in range(s.tokens)]
    return inline(stage, name, everything)[0]


@pytest.mark.payload("A17", "D10")
def test_a_ranks_rows_can_be_laid_into_a_rectangle(stage: Stage) -> None:
    """Frameworks with a batch axis: each sequence padded to the same length before the split, so that the rank's rows are [S, W / C]."""
    order, width, ranks = [1, 4], 16, 2
    lengths = [s.tokens for s in stage.sequences]
    rooms = [width if n in order else length for n, length in enumerate(lengths)]
    step = packed([0, *accumulate(lengths)], [0, *accumulate(rooms)])
    rows = split_context(placed(step, order), ContextLayout.ZIGZAG, rank=1, ranks=ranks)
    got = read_slice(
        stage.reader, [s.source for s in stage.sequences], stage.schema, rows=rows,
        fields=["routed_experts"], layers=None, step=STEP, expert_shards=SHARDS,
    )  # fmt: skip
    data = got.fields["routed_experts"]
    assert isinstance(data, Dense)
    batch = data.rows.reshape(2, width // ranks, LAYERS, 2)
    assert rows.positions().reshape(2, -1).tolist() == [list(range(4, 12))] * 2
    assert got.padding.reshape(2, -1).tolist() == [[False] * 3 + [True] * 5, [False] * 8]
    arrays = stage.sequences[4].arrays
    assert arrays is not None
    assert np.array_equal(batch[1], cut(arrays.fields["routed_experts"], 4, 12)[0])
    left = rectangle(np.diff(rows.cu_seqlens()).tolist(), width=10, pad="left")
    laid, real = take(data.rows, left)
    assert np.array_equal(laid[:, 2:], batch)
    assert real.tolist() == [[False] * 2 + [True] * 8] * 2


@pytest.mark.payload("D1")
def test_a_chunk_of_dense_rows_that_two_parts_of_a_zigzag_want_is_decoded_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(packed_bytes: NDArray[np.uint8], out: NDArray[Any], codec: Codec) -> None:
        calls.append(len(packed_bytes))
        decode_chunk(packed_bytes, out, codec)

    monkeypatch.setattr("fsref.reader.chunks.decode_chunk", counted)
    rows = of_rank(stage, "zigzag", 0, 2, order=[3, 5])
    plan = whole_plan(stage, [s.source for s in stage.sequences], rows, fields=["routed_experts", "indexer_picks"])
    buffers = SliceBuffers(plan, stage.schema, step=0, expert_shards=1)
    stage.reader.read_into(plan.read, buffers.out)
    wanted = [(s.object_id, r.offset + c.offset) for s in plan.read.segments for r in s.requests for c in r.chunks]
    assert len(calls) == len(set(wanted)) < len(wanted)


def test_buffers_of_a_pool_give_the_same_arrays_whatever_stood_in_them_and_are_used_again(stage: Stage) -> None:
    buffers = BufferPool(poison=True)
    rows = of_rank(stage, "zigzag", 1, 2, order=[6, 0, 3, 2])
    plan = whole_plan(stage, [s.source for s in stage.sequences], rows, fields=[f.name for f in stage.schema.fields])

    def read(empty: Empty) -> dict[str, list[bytes]]:
        filled = SliceBuffers(plan, stage.schema, step=STEP, expert_shards=SHARDS, expert_dtype="int64", empty=empty)
        stage.reader.read_into(plan.read, filled.out)
        return {name: _bytes_of(data) for name, data in filled.finish().fields.items()}

    expected = read(np.empty)
    for _ in range(3):
        assert read(buffers.empty) == expected
    assert buffers.counters.blocks_reused == 2 * buffers.counters.blocks_made > 0


def _bytes_of(data: FieldData) -> list[bytes]:
    arrays = [data.rows] if isinstance(data, Dense) else [data.counts, *data.columns.values(), *data.row_columns.values()]
    assert all(a.flags.writeable for a in arrays)
    return [a.tobytes() for a in arrays]


def test_one_number_per_token_is_sliced_and_repeated_like_rows(tmp_path: Path) -> None:
    field = Field(name="score", alignment=Alignment.INPUT, dtype="float32")
    run_schema = Schema((field,))
    values = np.asarray([0.5, np.nan, -0.0, 4.0, 5.0], np.float32)
    with open_root(str(tmp_path), run="run", create=True) as store, Reader(store, run_schema) as reader:
        ref = Writer(store, run_schema, Numbers(), durability="process").put(
            Payload(np.arange(5, dtype=np.int32), {"score": Dense(values)})
        )
        source = Source(ref, ("score",))
        step = packed([0, 7], [0, 12])  # two tokens behind the kept ones, five rows of padding
        parts = [
            read_slice(
                reader, [source], run_schema, rows=split_context(step, ContextLayout.ZIGZAG, rank=rank, ranks=2),
                fields=["score"], layers=None, step=0, expert_shards=1,
            )
            for rank in range(2)
        ]  # fmt: skip
    first, second = (p.fields["score"] for p in parts)
    assert isinstance(first, Dense)
    assert isinstance(second, Dense)
    assert first.rows.tobytes() == np.asarray([0.5, np.nan, -0.0, 0, 0, 0], np.float32).tobytes()
    assert second.rows.tobytes() == np.asarray([4, 5, 5, 5, 0, 0], np.float32).tobytes()
    assert [p.valid["score"].tolist() for p in parts] == [[True] * 3 + [False] * 3, [True] * 2 + [False] * 4]
    assert [p.padding.tolist() for p in parts] == [[False] * 3 + [True] * 3, [False] * 4 + [True] * 2]
