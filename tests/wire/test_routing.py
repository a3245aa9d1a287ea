"""Routed experts in both forms, with the right values written down, and inputs that must be refused."""

import base64
from typing import Any

import numpy as np
import pytest

from fsref.errors import WireError
from fsref.wire.modelconfig import ModelShape
from fsref.wire.npy import encode_npy
from fsref.wire.routing import Routing, decode_routed_experts, encode_routed_experts, packed_routed_experts
from tests.wire.recorded import NAMES, choices, load, start_of

ROWS = np.array([[[3, 1], [2, 0]], [[1, 3], [0, 2]], [[2, 3], [1, 0]]], dtype=np.uint8)
"""Three rows, two layers, two experts of four."""
SHAPE = ModelShape(layer_ids=(0, 1), layer_count=2, top_k=2, expert_count=4, vocab_count=16)


def text(array: Any) -> str:
    return base64.b64encode(encode_npy(np.asarray(array))).decode()


def packed(**over: Any) -> dict[str, Any]:
    return {"data": base64.b64encode(ROWS.tobytes()).decode(), "shape": [3, 2, 2], "dtype": "uint8", "start": 2, **over}


@pytest.mark.parametrize("name", NAMES)
def test_recorded_replies_have_a_row_for_every_token_but_the_last(name: str) -> None:
    case = load(name)
    for choice in choices(name):
        assert choice.routing is not None
        tokens = len(case["request"]["token_ids"]) + len(choice.token_ids)
        assert choice.routing.start == start_of(case)
        assert choice.routing.rows.shape == (tokens - 1 - start_of(case), 4, 4)
        assert choice.routing.rows.dtype == np.uint8


def test_recorded_rows_are_those_that_vllm_sent() -> None:
    routing = choices("one_token")[0].routing
    assert routing is not None
    assert routing.rows[0].tolist() == [[15, 3, 2, 10], [10, 14, 11, 9], [5, 0, 3, 2], [5, 9, 3, 10]]
    assert routing.rows[-1].tolist() == [[5, 14, 12, 3], [4, 14, 8, 9], [3, 9, 4, 0], [15, 10, 3, 5]]


def test_a_later_turn_carries_the_true_row_of_the_earlier_turns_last_token() -> None:
    full, tail = choices("second_turn_full_rows")[0].routing, choices("second_turn_bridged_start")[0].routing
    assert full is not None
    assert tail is not None
    assert tail.start == 31
    np.testing.assert_array_equal(tail.rows[:5], full.rows[31:36])  # the prompt's rows; the completions are two samples
    first = choices("single_turn")[0].routing
    assert first is not None
    np.testing.assert_array_equal(full.rows[:31], first.rows)


def test_every_sample_of_the_same_prompt_has_the_same_prompt_rows() -> None:
    (one,), both = choices("one_token"), choices("two_choices")
    assert one.routing is not None
    assert [c.index for c in both] == [0, 1]
    for choice in both:
        assert choice.routing is not None
        np.testing.assert_array_equal(choice.routing.rows[:24], one.routing.rows)


def test_a_prefix_from_the_cache_has_the_rows_of_a_cold_one() -> None:
    (cold,), (cached,) = choices("cold_prefix"), choices("cached_prefix")
    assert cold.routing is not None
    assert cached.routing is not None
    assert len(cached.routing.rows) == 141
    np.testing.assert_array_equal(cached.routing.rows[:140], cold.routing.rows[:140])


def test_the_native_form_takes_its_start_from_the_request() -> None:
    got = decode_routed_experts(text(ROWS), start=2, token_count=6, model=SHAPE)
    assert got is not None
    assert got.start == 2
    np.testing.assert_array_equal(got.rows, ROWS)


def test_the_packed_form_says_its_own_start() -> None:
    got = decode_routed_experts(packed(), start=0, token_count=6, model=SHAPE)
    assert got is not None
    assert got.start == 2
    np.testing.assert_array_equal(got.rows, ROWS)


def test_the_packed_form_may_hold_a_memoryview_of_its_text() -> None:
    got = decode_routed_experts(packed(data=memoryview(packed()["data"].encode())), start=0, token_count=6)
    assert got is not None
    np.testing.assert_array_equal(got.rows, ROWS)


def test_no_array_is_none_and_not_an_empty_one() -> None:
    assert decode_routed_experts(None, start=0, token_count=6) is None


def test_an_empty_capture_of_a_single_token_is_legal() -> None:
    got = decode_routed_experts(text(ROWS[:0]), start=0, token_count=1, model=SHAPE)
    assert got is not None
    assert got.rows.shape == (0, 2, 2)


def test_as_many_rows_as_tokens_are_accepted() -> None:
    got = decode_routed_experts(text(ROWS), start=3, token_count=6, model=SHAPE)
    assert got is not None
    assert len(got.rows) == 3


@pytest.mark.parametrize(("start", "token_count"), [(0, 2), (4, 6), (0, 5), (2, 7), (7, 6), (-1, 3)])
def test_rows_that_do_not_fit_the_tokens_are_refused(start: int, token_count: int) -> None:
    with pytest.raises(WireError, match=r"start|rows found"):
        decode_routed_experts(text(ROWS), start=start, token_count=token_count, model=SHAPE)


@pytest.mark.parametrize("code", [">u2", "<i4", ">i4", "<i8"])
def test_the_dtype_follows_the_expert_count_whatever_was_sent(code: str) -> None:
    wide = ModelShape(layer_ids=(0, 1), layer_count=2, top_k=2, expert_count=512, vocab_count=16)
    for model, dtype in ((SHAPE, np.uint8), (wide, np.uint16)):
        got = decode_routed_experts(text(ROWS.astype(code)), start=2, token_count=6, model=model)
        assert got is not None
        assert got.rows.dtype == dtype
        assert got.rows.flags.c_contiguous
        np.testing.assert_array_equal(got.rows, ROWS)


def test_uint16_ids_above_256_survive() -> None:
    model = ModelShape(layer_ids=(0,), layer_count=1, top_k=4, expert_count=512, vocab_count=16)
    ids = np.array([[[0, 255, 256, 511]]], dtype=np.uint16)
    got = decode_routed_experts(text(ids), start=0, token_count=2, model=model)
    assert got is not None
    assert got.rows.tolist() == [[[0, 255, 256, 511]]]


def test_slot_order_is_kept() -> None:
    model = ModelShape(layer_ids=(0,), layer_count=1, top_k=2, expert_count=16, vocab_count=16)
    got = decode_routed_experts(text(np.array([[[7, 2]]], dtype=np.uint8)), start=0, token_count=2, model=model)
    assert got is not None
    assert got.rows.tolist() == [[[7, 2]]]


def test_all_layers_or_only_those_that_route_are_accepted() -> None:
    model = ModelShape(layer_ids=(1, 2, 4), layer_count=6, top_k=2, expert_count=8, vocab_count=16)
    six = np.array([[[0, 0], [1, 2], [3, 4], [0, 0], [5, 6], [0, 0]]], dtype=np.uint8)
    for sent in (six, six[:, [1, 2, 4]]):
        got = decode_routed_experts(text(sent), start=0, token_count=2, model=model)
        assert got is not None
        assert got.rows.tolist() == [[[1, 2], [3, 4], [5, 6]]]
    with pytest.raises(WireError, match="4 layers of 2 experts found; the model has 6 layers, 3 of them route"):
        decode_routed_experts(text(six[:, :4]), start=0, token_count=2, model=model)


def test_a_layer_of_zeros_was_not_captured_unless_one_expert_is_used() -> None:
    zeros = np.stack([ROWS[:, 0], np.zeros((3, 2), np.uint8)], axis=1)
    with pytest.raises(WireError, match="layer 1 are 0"):
        decode_routed_experts(text(zeros), start=2, token_count=6, model=SHAPE)
    single = ModelShape(layer_ids=(0, 1), layer_count=2, top_k=1, expert_count=4, vocab_count=16)
    assert decode_routed_experts(text(zeros[:, :, :1]), start=2, token_count=6, model=single) is not None


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (7, "int found"),
        ([1, 2], "list found"),
        ("%%%", "base64"),
        (text(ROWS)[:-3], "base64|needs"),
        (text(ROWS)[:-4], "needs"),
        (text(ROWS.astype("f4")), "float32"),
        (text(ROWS[0]), r"\(2, 2\)"),
        (text(ROWS.astype("i2") - 1), "expert id -1"),
        (text(ROWS + 1), "expert id 4 found, the model has 4"),
        (packed(shape=[1 << 40, 1, 1]), "out of bounds"),
        (packed(shape=[-3, 2, -2]), "out of bounds"),
        (packed(shape=[3, 2, 3]), "needs 18 bytes, 12 found"),
        (packed(shape="3,2,2"), "shape"),
        (packed(shape=[3, 2, True]), "shape"),
        (packed(dtype="object"), "dtype"),
        (packed(dtype="V1"), "dtype"),
        (packed(dtype=None), "dtype"),
        (packed(start="2"), "start"),
        (packed(data=None), "base64 text expected"),
        (packed(data="AAA"), "base64"),
        ({}, "shape"),
    ],
)
def test_hostile_values_are_refused_with_the_fields_name(value: Any, word: str) -> None:
    with pytest.raises(WireError, match=word) as caught:
        decode_routed_experts(value, start=2, token_count=6, model=SHAPE)
    assert "routed_experts" in str(caught.value)


def test_a_text_that_would_decode_to_too_much_is_refused_unread() -> None:
    with pytest.raises(WireError, match="more than 10 bytes"):
        decode_routed_experts("A" * 4000, start=0, token_count=6, bytes_max=10)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_both_encoders_are_read_back(dtype: Any) -> None:
    rows = ROWS.astype(dtype)
    for sent in (encode_routed_experts(rows), packed_routed_experts(Routing(rows, 2))):
        got = decode_routed_experts(sent, start=2, token_count=6)
        assert got is not None
        assert got.start == 2
        assert got.rows.dtype == dtype
        np.testing.assert_array_equal(got.rows, rows)


def test_the_packed_encoder_normalises_byte_order_and_strides() -> None:
    odd = np.asfortranarray(ROWS.astype(">u2"))
    out = packed_routed_experts(Routing(odd, 0))
    assert out["dtype"] == "uint16"
    assert base64.b64decode(out["data"]) == ROWS.astype("<u2").tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_recorded_strings_are_written_back_byte_for_byte(name: str) -> None:
    for sent, choice in zip(load(name)["response"]["choices"], choices(name), strict=True):
        assert choice.routing is not None
        assert encode_routed_experts(choice.routing.rows) == sent["routed_experts"]
