"""What engines and frameworks get wrong in these arrays, row by row: the tiny input of each, and the right value."""

import base64
import sys
import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from numcodecs import blosc

from fsref.errors import BadRef, ConfigError, PayloadError, WireError
from fsref.objects import native
from fsref.orchestrator.samples import Sample, check_hash
from fsref.plan import State, chunk_tokens, missing_ranges, states
from fsref.plan.padding import padded, prompt_and_completion, rectangle, take
from fsref.reader import DenseOut, Reader, allocate
from fsref.refs import (
    MASK_FULL,
    MASK_TRUNCATED,
    Alignment,
    Codec,
    Column,
    Dense,
    Field,
    FieldData,
    Payload,
    PayloadRef,
    Ragged,
    Schema,
    TokenRange,
    routed_experts,
    sampling_mask,
    token_hash,
    top_logprobs,
)
from fsref.refs import export as exports
from fsref.store import Store, open_root
from fsref.wire import modelconfig, routing, text
from fsref.wire.modelconfig import ModelShape, model_shape
from fsref.wire.npy import encode_npy
from fsref.writer import Receipts, Writer
from tests.support import needs


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return open_root(str(tmp_path_factory.mktemp("root")), run="run", create=True)


def put(store: Store, schema: Schema, tokens: int, **fields: FieldData) -> PayloadRef:
    return Writer(store, schema, Receipts("t"), durability="process").put(Payload(np.arange(tokens, dtype=np.int32), fields))


def back(store: Store, schema: Schema, ref: PayloadRef, name: str, **asked: Any) -> Any:
    with Reader(store, schema) as reader:
        return reader.read(ref, fields=[name], **asked)[name]


def routed(*, layers: int = 2, top_k: int = 2, experts: int = 16, **more: Any) -> Schema:
    return Schema((routed_experts(layer_ids=range(layers), top_k=top_k, expert_count=experts, **more),))


MASK = Schema((sampling_mask(),))


@pytest.mark.payload("A1")
def test_six_tokens_with_five_rows_are_five_real_ones_and_a_missing_tail(store: Store) -> None:
    rows = np.arange(24).reshape(6, 2, 2) % 16
    ref = put(store, routed(), 6, routed_experts=Dense(rows, (TokenRange(5, 6),)))
    assert missing_ranges(ref, routed()) == {"routed_experts": (TokenRange(5, 6),)}
    got = back(store, routed(), ref, "routed_experts")
    assert got.rows[:5].tolist() == rows[:5].tolist()
    assert got.missing == (TokenRange(5, 6),)


@pytest.mark.payload("A2")
def test_padding_is_chosen_at_the_read_and_never_stored(store: Store) -> None:
    schema = routed()
    ref = put(store, schema, 6, routed_experts=Dense(np.ones((6, 2, 2), np.uint8), (TokenRange(5, 6),)))
    got = back(store, schema, ref, "routed_experts")
    index = padded(len(got.rows), multiple=4)
    rows, real = take(got.rows, index)
    assert rows.shape == (8, 2, 2)
    real[[t for t, i in enumerate(index) if i >= 0 and any(i in range(r.start, r.stop) for r in got.missing)]] = False
    assert real.tolist() == [True] * 5 + [False] * 3
    assert got.rows.shape == (6, 2, 2)
    with pytest.raises(PayloadError, match="multiple of 0"):
        padded(3, multiple=0)


@pytest.mark.payload("A10", "A11")
def test_truncation_counts_in_absolute_tokens_on_the_reference_alone(store: Store) -> None:
    schema = Schema((Field(name="x", alignment=Alignment.INPUT, dtype="uint8"),))
    ref = put(store, schema, 14, x=Dense(np.arange(14)))  # 5 prompt tokens, 9 of the response; 4 of these are kept
    kept = ref.truncated(5 + 4)
    assert back(store, schema, kept, "x").rows.tolist() == list(range(9))
    assert (kept.object_ids, kept.byte_count) == (ref.object_ids, ref.byte_count)
    with pytest.raises(BadRef, match="keeps 9"):
        back(store, schema, kept, "x", tokens=TokenRange(0, 10))


def sample(tokens: list[int], ref: PayloadRef) -> Sample:
    count = len(tokens)
    return Sample(
        name="t/0", group=0, agent="a", trace="t", token_ids=np.asarray(tokens, np.int32), loss_mask=np.ones(count, np.bool_),
        logprobs=np.zeros(count, np.float32), ref=ref, reward=0.0, version=0, temperature=1.0,
    )  # fmt: skip


@pytest.mark.payload("A12", "A13")
def test_the_token_hash_finds_retokenised_text_and_lets_added_tokens_pass(store: Store) -> None:
    schema = routed()
    ref = put(store, schema, 5, routed_experts=Dense(np.ones((5, 2, 2), np.uint8)))
    assert ref.token_hash == token_hash(range(5))
    check_hash(sample([0, 1, 2, 3, 4, 99], ref))  # an EOS was added: its row is missing
    with pytest.raises(PayloadError, match="re-tokenised"):
        check_hash(sample([0, 1, 2, 9, 4, 5], ref))
    with pytest.raises(PayloadError, match="stored for 5"):
        check_hash(sample([0, 1, 2, 3], ref))


@pytest.mark.payload("A15")
def test_a_payload_without_tokens_or_rows_is_legal(store: Store) -> None:
    schema = Schema((*routed().fields, sampling_mask()))
    mask = Ragged(np.zeros(0, np.int32), {"ids": np.zeros(0, np.int32)})
    ref = put(store, schema, 0, routed_experts=Dense(np.zeros((0, 2, 2), np.uint8)), sampling_mask=mask)
    assert ref.token_count == 0
    assert back(store, schema, ref, "routed_experts").rows.shape == (0, 2, 2)
    assert back(store, schema, ref, "sampling_mask").counts.shape == (0,)
    one = put(store, schema, 1, routed_experts=Dense(np.zeros((1, 2, 2), np.uint8), (TokenRange(0, 1),)))
    assert states(one, schema)["routed_experts"] is State.ABSENT


@pytest.mark.payload("A17")
def test_rows_follow_their_tokens_into_every_padded_layout() -> None:
    rows = np.asarray([10, 11, 20, 21, 22])  # prompt of 2, completion of 3
    assert take(rows, rectangle([5], width=9, pad="left"))[0].tolist() == [[0, 0, 0, 0, 10, 11, 20, 21, 22]]
    assert take(rows, rectangle([5], width=9, pad="right"))[0].tolist() == [[10, 11, 20, 21, 22, 0, 0, 0, 0]]
    laid, real = take(rows, prompt_and_completion([2], [3], prompt_width=4, completion_width=5))
    assert laid.tolist() == [[0, 0, 10, 11, 20, 21, 22, 0, 0]]
    assert real.tolist() == [[False, False, True, True, True, True, True, False, False]]
    two = rectangle([2, 3], width=3, pad="left")
    assert two.tolist() == [[-1, 0, 1], [2, 3, 4]]
    with pytest.raises(PayloadError, match="do not fit"):
        rectangle([4], width=3, pad="left")
    with pytest.raises(PayloadError, match="do not fit"):
        prompt_and_completion([5], [1], prompt_width=4, completion_width=5)
    with pytest.raises(PayloadError, match="1 prompts and 2 completions"):
        prompt_and_completion([1], [1, 1], prompt_width=2, completion_width=2)


@pytest.mark.payload("A20")
def test_each_field_says_which_token_its_rows_are_of(store: Store) -> None:
    schema = Schema((*routed().fields, sampling_mask()))
    assert [f.alignment.value for f in schema.fields] == ["input", "target"]
    mask = Ragged(np.asarray([0, 0, 0, 2, 1], np.int32), {"ids": np.asarray([3, 9, 4])})  # of the tokens 3 and 4 that were sampled
    got = back(store, schema, put(store, schema, 5, sampling_mask=mask), "sampling_mask", tokens=TokenRange(3, 5))
    assert (got.counts.tolist(), got.columns["ids"].tolist()) == ([2, 1], [3, 9, 4])


@pytest.mark.payload("A21", "C1")
def test_a_prediction_layer_is_never_taken_for_decoder_layer_zero(store: Store) -> None:
    schema = Schema((routed_experts(layer_ids=[0, 1, 2, 3], top_k=1, expert_count=8, layer_count=4),))  # 3 is the first MTP layer
    rows = np.asarray([[[4], [5], [6], [7]]])
    ref = put(store, schema, 1, routed_experts=Dense(rows))
    assert back(store, schema, ref, "routed_experts", layers=[0]).rows.tolist() == [[[4]]]
    model = ModelShape(layer_ids=(0, 1, 2), layer_count=3, top_k=1, expert_count=8, vocab_count=9, mtp_count=1)
    assert routing.fit_model(rows, model).tolist() == [[[4], [5], [6]]]
    with pytest.raises(WireError, match="5 layers of 1 experts found; the model has 3 layers"):
        routing.fit_model(np.ones((1, 5, 1), np.int64), model)


@pytest.mark.payload("B1", "B2", "B4")
def test_ids_above_255_survive_and_values_that_do_not_fit_are_refused(store: Store) -> None:
    wide = routed(layers=1, top_k=4, experts=512)
    ids = np.asarray([[[0, 255, 256, 511]]])
    got = back(store, wide, put(store, wide, 1, routed_experts=Dense(ids)), "routed_experts")
    assert got.rows.dtype == np.uint16
    assert got.rows.tolist() == ids.tolist()
    with pytest.raises(PayloadError, match=r"expert ids 0\.\.511 found, 0\.\.255 are legal"):
        put(store, routed(layers=1, top_k=4, experts=256), 1, routed_experts=Dense(ids))
    plain = Schema((Field(name="x", alignment=Alignment.INPUT, dtype="uint8"),))
    with pytest.raises(PayloadError, match="300 do not fit uint8"):
        put(store, plain, 1, x=Dense(np.asarray([300])))
    with pytest.raises(PayloadError, match=r"70\.\.70 found, 0\.\.63"):
        put(store, routed(layers=1, top_k=1, experts=64), 1, routed_experts=Dense(np.asarray([[[70]]])))


@pytest.mark.payload("B3")
def test_the_dtype_is_the_runs_and_a_wider_buffer_takes_mixed_ones(store: Store) -> None:
    narrow, wide = routed(layers=1, top_k=1, experts=41), routed(layers=1, top_k=1, experts=512)
    low, high = np.asarray([[[40]]]), np.asarray([[[511]]])
    assert back(store, wide, put(store, wide, 1, routed_experts=Dense(low)), "routed_experts").rows.dtype == np.uint16
    buffer = np.zeros((2, 1, 1), np.uint16)
    for at, (schema, rows) in enumerate(((narrow, low), (wide, high))):
        ref = put(store, schema, 1, routed_experts=Dense(rows))
        with Reader(store, schema) as reader:
            reader.read_into(reader.plan(ref), {"routed_experts": DenseOut(buffer[at : at + 1])})
    assert buffer.ravel().tolist() == [40, 511]
    with Reader(store, wide) as reader, pytest.raises(PayloadError, match="a buffer of uint8 cannot hold uint16"):
        reader.read_into(reader.plan(ref), {"routed_experts": DenseOut(np.zeros((1, 1, 1), np.uint8))})


@pytest.mark.payload("B6")
def test_a_sentinel_is_an_export_and_needs_a_signed_dtype() -> None:
    data = Dense(np.asarray([[3, 1], [0, 0]], np.uint8), (TokenRange(1, 2),))
    out = exports.with_sentinel(data)
    assert out.dtype == np.int16
    assert out.tolist() == [[3, 1], [-1, -1]]
    again = exports.without_sentinel(out)
    assert (again.rows.tolist(), again.missing) == ([[3, 1], [0, 0]], (TokenRange(1, 2),))
    assert exports.with_sentinel(Dense(np.asarray([511], np.uint16))).dtype == np.int32
    with pytest.raises(PayloadError, match="no signed form"):
        exports.with_sentinel(Dense(np.asarray([0.5], np.float32)))


@pytest.mark.payload("B7")
def test_a_row_that_mixes_the_sentinel_with_ids_is_corruption(store: Store) -> None:
    mixed = np.asarray([[[1, 2]], [[3, -1]]])
    with pytest.raises(PayloadError, match="row 1 mixes"):
        exports.without_sentinel(mixed)
    with pytest.raises(PayloadError, match="row 1 mixes them with real ids, which is corruption"):
        put(store, routed(layers=1), 2, routed_experts=Dense(mixed))
    with pytest.raises(PayloadError, match="row 0 is a sentinel"):
        put(store, routed(layers=1), 1, routed_experts=Dense(np.asarray([[[-1, -1]]])))


@pytest.mark.payload("B11")
def test_ids_of_another_id_space_are_refused(store: Store) -> None:
    physical = routed(layers=1, experts=16 + 2, id_space="physical")  # two redundant replicas
    rows = np.asarray([[[17, 0]]])
    assert (
        back(store, physical, put(store, physical, 1, routed_experts=Dense(rows, (), "physical")), "routed_experts").id_space == "physical"
    )
    with pytest.raises(PayloadError, match="ids are physical, the schema says logical"):
        put(store, routed(layers=1, experts=18), 1, routed_experts=Dense(rows, (), "physical"))
    with pytest.raises(PayloadError, match=r"0\.\.15 are legal"):
        put(store, routed(layers=1), 1, routed_experts=Dense(rows))
    assert physical.hash != routed(layers=1, experts=18).hash


@pytest.mark.payload("B12")
@pytest.mark.parametrize("codec", ["lz4", "none"])
def test_floats_come_back_bit_for_bit(store: Store, codec: Any) -> None:
    schema = Schema((top_logprobs(),), Codec(name=codec))
    bits = np.asarray([0x7FC00000, 0x7FC01234, 0xFF800000, 0x80000000], np.uint32)  # NaN, a NaN with a payload, -inf, -0.0
    values = np.concatenate([bits.view(np.float32), np.asarray([-9999.0], np.float32)])
    ref = put(store, schema, 1, top_logprobs=Ragged(np.asarray([5], np.int32), {"ids": np.arange(5), "logprobs": values}))
    assert back(store, schema, ref, "top_logprobs").columns["logprobs"].tobytes() == values.tobytes()


@pytest.mark.payload("B13")
def test_slots_keep_their_order_so_pairs_stay_pairs(store: Store) -> None:
    schema = Schema(
        (*routed(layers=1).fields, Field(name="weights", alignment=Alignment.INPUT, dtype="float32", row_shape=(1, 2)), top_logprobs())
    )
    heads = Ragged(np.asarray([2], np.int32), {"ids": np.asarray([9, 4]), "logprobs": np.asarray([-2.0, -1.0], np.float32)})
    weights = np.asarray([[[0.6, 0.4]]], np.float32)
    ref = put(store, schema, 1, routed_experts=Dense(np.asarray([[[7, 2]]])), weights=Dense(weights), top_logprobs=heads)
    with Reader(store, schema) as reader:
        got: Any = reader.read(ref)
    assert got["routed_experts"].rows.tolist() == [[[7, 2]]]
    assert got["weights"].rows.tolist() == weights.tolist()
    assert got["top_logprobs"].columns["ids"].tolist() == [9, 4]
    assert got["top_logprobs"].columns["logprobs"].tolist() == [-2.0, -1.0]


@pytest.mark.payload("B14")
def test_brain_floats_are_stored_as_bits_with_a_logical_dtype(store: Store) -> None:
    schema = Schema((Field(name="hidden", alignment=Alignment.INPUT, dtype="uint16", row_shape=(8,), logical_dtype="bfloat16"),))
    bits = np.arange(24, dtype=np.uint16).reshape(3, 8) + 0x3F80
    assert back(store, schema, put(store, schema, 3, hidden=Dense(bits)), "hidden").rows.tolist() == bits.tolist()
    Field(name="x", alignment=Alignment.INPUT, dtype="uint8", row_shape=(8,), logical_dtype="float8_e4m3fn")
    with pytest.raises(ConfigError, match="bfloat16 on uint16"):
        Field(name="x", alignment=Alignment.INPUT, dtype="uint8", row_shape=(8,), logical_dtype="bfloat16")


@pytest.mark.payload("B15", "B17")
def test_any_byte_order_and_stride_goes_in_and_writable_little_endian_comes_out(store: Store) -> None:
    schema = routed(layers=2, top_k=2, experts=300)
    plain = np.arange(12, dtype=np.uint16).reshape(3, 2, 2)
    locked = plain.copy()
    locked.flags.writeable = False
    for rows in (
        plain.astype(">u2"),
        np.asfortranarray(plain),
        np.repeat(plain, 2, 0)[::2],
        locked,
        np.frombuffer(plain.tobytes(), "<u2").reshape(3, 2, 2),
    ):
        got = back(store, schema, put(store, schema, 3, routed_experts=Dense(rows)), "routed_experts")
        assert got.rows.tobytes() == plain.tobytes()
        assert got.rows.flags.writeable
        assert got.rows.flags.c_contiguous
        np.add(got.rows, 1, out=got.rows)


@pytest.mark.payload("B16")
def test_sizes_are_bounded_before_anything_is_allocated() -> None:
    packed = {"data": "", "shape": [1 << 40, 1, 1], "dtype": "uint8", "start": 0}
    with pytest.raises(WireError, match="out of bounds"):
        routing.decode_routed_experts(packed, start=0, token_count=1)
    with pytest.raises(ConfigError, match="a row of"):
        Field(name="x", alignment=Alignment.INPUT, dtype="uint8", row_shape=(1 << 20, 1 << 20, 1 << 20))
    with pytest.raises(ConfigError, match="columns"):
        Field(name="x", alignment=Alignment.INPUT, columns=tuple(Column(f"c{n}", "uint8") for n in range(17)))
    with pytest.raises(ConfigError, match="row_columns"):
        Field(name="x", alignment=Alignment.INPUT, dtype="uint8", row_columns=(Column("flags", "uint8"),))


@pytest.mark.payload("C1", "C4", "C5")
def test_layers_are_selected_by_global_id(store: Store) -> None:
    schema = Schema((routed_experts(layer_ids=[1, 2, 4], top_k=1, expert_count=16),))
    ref = put(store, schema, 2, routed_experts=Dense(np.asarray([[[1], [2], [4]], [[5], [6], [8]]])))
    assert back(store, schema, ref, "routed_experts", layers=[4, 1]).rows[:, :, 0].tolist() == [[4, 1], [8, 5]]
    with pytest.raises(BadRef, match=r"layers \[3\] asked for, field 'routed_experts' has \[1, 2, 4\]"):
        back(store, schema, ref, "routed_experts", layers=[3])
    interleaved = routed(layers=6, top_k=1)
    ref = put(store, interleaved, 1, routed_experts=Dense(np.arange(6).reshape(1, 6, 1)))
    assert back(store, interleaved, ref, "routed_experts", layers=[0, 1, 4, 5]).rows.ravel().tolist() == [0, 1, 4, 5]
    for stage in ([0], [1, 2, 3]):
        assert back(store, interleaved, ref, "routed_experts", layers=stage).rows.ravel().tolist() == stage


@pytest.mark.payload("C2", "C6")
def test_rows_of_all_layers_or_of_those_that_route_are_taken_and_others_refused(store: Store) -> None:
    schema = Schema((routed_experts(layer_ids=[1, 2, 4], top_k=1, expert_count=16, layer_count=6),))
    every = np.arange(6).reshape(1, 6, 1)
    for rows in (every, every[:, [1, 2, 4]]):
        assert back(store, schema, put(store, schema, 1, routed_experts=Dense(rows)), "routed_experts").rows.ravel().tolist() == [1, 2, 4]
    with pytest.raises(PayloadError, match=r"shape \(1, 4, 1\) found, \(1, 3, 1\) needed, or all 6 layers"):
        put(store, schema, 1, routed_experts=Dense(every[:, :4]))
    with pytest.raises(ConfigError, match="does not hold the layer ids"):
        routed_experts(layer_ids=[1, 7], top_k=1, expert_count=16, layer_count=6)


@pytest.mark.payload("C6")
def test_hybrid_models_route_in_the_layers_that_their_config_says() -> None:
    base = {"num_hidden_layers": 6, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 10}
    assert model_shape({**base, "hybrid_override_pattern": "ME*E-M"}).layer_ids == (1, 3)
    assert model_shape({**base, "expert_layer_period": 2, "expert_layer_offset": 1}).layer_ids == (1, 3, 5)
    assert model_shape({**base, "num_nextn_predict_layers": 1}).mtp_count == 1
    assert modelconfig.model_shape(base).mtp_count == 0


@pytest.mark.payload("C3")
def test_a_pipeline_stage_reads_only_its_layers_chunks(store: Store) -> None:
    schema = Schema((routed_experts(layer_ids=range(6), top_k=8, expert_count=256, layers_per_chunk=2),), Codec(name="none"))
    rows = np.random.default_rng(0).integers(0, 256, (3000, 6, 8)).astype(np.uint8)
    ref = put(store, schema, 3000, routed_experts=Dense(rows))
    with Reader(store, schema) as reader:
        plan = reader.plan(ref, layers=[2, 3])
        out = allocate(plan, schema, "routed_experts", layers=[2, 3])
        reader.read_into(plan, {"routed_experts": out})
    assert isinstance(out, DenseOut)
    assert np.array_equal(out.rows, rows[:, 2:4])
    assert {c.layer for s in plan.segments for r in s.requests for c in r.chunks} == {2}
    padded_rows = -(-3000 // chunk_tokens(3000)) * chunk_tokens(3000)
    assert plan.byte_count <= padded_rows * 2 * 8 + 64


@pytest.mark.payload("E1", "E5")
def test_counts_or_offsets_and_their_sum_is_checked(store: Store) -> None:
    ids = np.asarray([5, 6, 7, 8, 9])
    by_offsets = Ragged.from_offsets([0, 2, 2, 5], {"ids": ids})
    assert by_offsets.counts.tolist() == [2, 0, 3]
    got = back(store, MASK, put(store, MASK, 3, sampling_mask=by_offsets), "sampling_mask")
    assert (got.counts.tolist(), got.columns["ids"].tolist(), got.missing) == ([2, 0, 3], ids.tolist(), ())
    with pytest.raises(PayloadError, match="5 values by its counts"):
        put(store, MASK, 3, sampling_mask=Ragged(np.asarray([2, 0, 3], np.int32), {"ids": ids[:4]}))
    for offsets in ([1, 2], [], [0, 3, 2], [0.0, 1.0]):
        with pytest.raises(PayloadError, match="offsets"):
            Ragged.from_offsets(offsets, {"ids": ids})  # type: ignore[arg-type]


@pytest.mark.payload("E2", "E3", "E9")
def test_ties_beyond_top_k_order_and_large_ids_are_kept(store: Store) -> None:
    big = Schema((Field(name="wide_mask", alignment=Alignment.TARGET, columns=(Column("ids", "uint32"),)), sampling_mask()))
    tied = Ragged(np.asarray([3], np.int32), {"ids": np.asarray([151_935, 4, 7])})  # top_k was 2
    wide = Ragged(np.asarray([2], np.int32), {"ids": np.asarray([(1 << 32) - 1, 0])})
    ref = put(store, big, 1, sampling_mask=tied, wide_mask=wide)
    assert back(store, big, ref, "sampling_mask").columns["ids"].tolist() == [151_935, 4, 7]
    assert back(store, big, ref, "wide_mask").columns["ids"].tolist() == [(1 << 32) - 1, 0]


@pytest.mark.payload("E4", "E8")
def test_flags_tell_no_mask_full_support_and_a_truncated_one_apart(store: Store) -> None:
    flags = np.asarray([0, MASK_FULL, 0, MASK_TRUNCATED], np.uint8)
    mask = Ragged(np.asarray([0, 0, 1, 2], np.int32), {"ids": np.asarray([2, 3, 4])}, (), {"flags": flags})
    ref = put(store, MASK, 4, sampling_mask=mask)
    got = back(store, MASK, ref, "sampling_mask")
    assert (got.counts.tolist(), got.row_columns["flags"].tolist()) == ([0, 0, 1, 2], [0, 1, 0, 2])
    part = back(store, MASK, ref, "sampling_mask", tokens=TokenRange(1, 4))
    assert part.row_columns["flags"].tolist() == [1, 0, 2]
    bare = Ragged(np.asarray([0], np.int32), {"ids": np.zeros(0, np.int32)})
    assert back(store, MASK, put(store, MASK, 1, sampling_mask=bare), "sampling_mask").row_columns["flags"].tolist() == [0]
    with pytest.raises(PayloadError, match="row columns"):
        put(store, MASK, 1, sampling_mask=Ragged(bare.counts, bare.columns, (), {"other": np.zeros(1)}))
    with pytest.raises(PayloadError, match="1 tokens"):
        put(store, MASK, 1, sampling_mask=Ragged(bare.counts, bare.columns, (), {"flags": np.zeros(2, np.uint8)}))


@pytest.mark.payload("E6")
def test_a_prefix_cuts_ids_at_the_counts_sum(store: Store) -> None:
    mask = Ragged(np.asarray([2, 0, 3], np.int32), {"ids": np.asarray([5, 6, 7, 8, 9])})
    kept = put(store, MASK, 3, sampling_mask=mask).truncated(2)
    assert back(store, MASK, kept, "sampling_mask").columns["ids"].tolist() == [5, 6]
    cut = exports.cut(mask, 0, 2)
    assert isinstance(cut, Ragged)
    assert cut.columns["ids"].tolist() == [5, 6]
    with pytest.raises(PayloadError, match="there are 3"):
        exports.cut(mask, 0, 4)


@pytest.mark.payload("E7", "E10")
def test_rows_are_dense_only_on_request_and_heads_of_different_k_stand_side_by_side() -> None:
    data = Ragged(np.asarray([0, 1, 5], np.int32), {"ids": np.arange(6)})
    values, valid = exports.rectangle(data, "ids", width=5, fill=-1)
    assert values.tolist() == [[-1] * 5, [0, -1, -1, -1, -1], [1, 2, 3, 4, 5]]
    assert valid.sum(axis=1).tolist() == [0, 1, 5]
    heads = Ragged(np.asarray([2, 4], np.int32), {"ids": np.asarray([1, 2, 1, 2, 3, 4])})
    assert exports.rectangle(heads, "ids", width=4)[0].tolist() == [[1, 2, 0, 0], [1, 2, 3, 4]]
    with pytest.raises(PayloadError, match="row 2 has 5 values, which do not fit a width of 4"):
        exports.rectangle(data, "ids", width=4)


@pytest.mark.payload("G1")
def test_after_the_first_decode_only_raw_bytes_move(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).integers(1, 16, (40, 2, 2)).astype(np.uint8)
    decodes: list[int] = []
    real = text.decode_base64

    def counting(*args: Any, **kwargs: Any) -> bytes:
        decodes.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(routing, "decode_base64", counting)
    decoded = routing.decode_routed_experts(base64.b64encode(encode_npy(rows)).decode(), start=0, token_count=41)
    assert decoded is not None
    schema = routed()
    ref = put(store, schema, 40, routed_experts=Dense(decoded.rows))
    message = msgspec.json.encode(ref.to_json())
    got = back(store, schema, PayloadRef.decode(msgspec.json.decode(message)), "routed_experts")
    assert np.array_equal(got.rows, rows)
    assert len(decodes) == 1
    assert len(message) < 250 + 8 * len(ref.segments)


@pytest.mark.payload("G2")
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "numcodecs"])
def test_encoding_lets_other_threads_run(kernels: bool, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without forced switches a thread runs beside the compressor only where that gives the interpreter away."""
    if kernels:
        needs.program("cc")
        assert native.KERNELS is not None
    else:
        monkeypatch.setattr(native, "KERNELS", None)
    owner, name = (native.Kernels, "pack") if kernels else (blosc, "compress")
    schema = Schema((routed_experts(layer_ids=range(48), top_k=8, expert_count=128),))
    rows = np.random.default_rng(0).integers(0, 128, (16_384, 48, 8)).astype(np.uint8)
    ticks, inside, done = [0], [0], threading.Event()
    real = getattr(owner, name)

    def compress(*args: Any, **kwargs: Any) -> Any:
        before = ticks[0]
        out = real(*args, **kwargs)
        inside[0] += ticks[0] - before
        return out

    def work() -> None:
        try:
            for _ in range(50):  # a busy machine may not run the other thread within one of them
                put(store, schema, len(rows), routed_experts=Dense(rows))
                if inside[0]:
                    return
        finally:
            done.set()

    monkeypatch.setattr(owner, name, compress)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        while not done.is_set():
            ticks[0] += 1
            time.sleep(0)
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert inside[0] > 0, "no other thread ran while a chunk was compressed"
