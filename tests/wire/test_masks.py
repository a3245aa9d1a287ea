"""Sampling masks in both forms and what is refused."""

import base64
from typing import Any

import numpy as np
import pytest

from fsref.errors import WireError
from fsref.wire.masks import decode_sampling_mask, encode_sampling_mask


def packed(values: list[int], **over: Any) -> dict[str, Any]:
    return {"data": base64.b64encode(np.asarray(values, "<i4").tobytes()).decode(), "shape": [len(values)], "dtype": "int32", **over}


def test_one_list_per_token_becomes_counts_and_ids_in_the_engines_order() -> None:
    got = decode_sampling_mask([[9, 4, 7], [2]], token_ids=[7, 2])
    assert got is not None
    assert got.counts.tolist() == [3, 1]
    assert got.columns["ids"].tolist() == [9, 4, 7, 2]
    assert got.counts.dtype == got.columns["ids"].dtype == np.int32


def test_the_packed_form_says_the_same() -> None:
    got = decode_sampling_mask({"ids": packed([9, 4, 7, 2]), "counts": packed([3, 1])}, token_ids=[7, 2])
    assert got is not None
    assert got.counts.tolist() == [3, 1]
    assert got.columns["ids"].tolist() == [9, 4, 7, 2]


def test_offsets_in_place_of_counts_say_the_same() -> None:
    got = decode_sampling_mask({"ids": packed([9, 7, 2]), "offsets": packed([0, 2, 2, 3])}, token_ids=[7, 5, 2])
    assert got is not None
    assert got.counts.tolist() == [2, 0, 1]
    assert got.columns["ids"].tolist() == [9, 7, 2]


def test_an_empty_row_means_that_nothing_was_truncated() -> None:
    got = decode_sampling_mask([[], [5]], token_ids=[7, 5])
    assert got is not None
    assert got.counts.tolist() == [0, 1]


def test_ties_may_keep_more_than_top_k_and_large_vocabularies_fit() -> None:
    got = decode_sampling_mask([[151_935, 1, 2]], token_ids=[1], vocab_count=151_936)
    assert got is not None
    assert got.columns["ids"].tolist() == [151_935, 1, 2]


def test_no_mask_is_none_and_an_empty_completion_has_no_rows() -> None:
    assert decode_sampling_mask(None, token_ids=[1]) is None
    got = decode_sampling_mask([], token_ids=[])
    assert got is not None
    assert got.counts.shape == (0,)


def test_the_encoder_is_read_back() -> None:
    sent = [[3, 1], [], [2]]
    got = decode_sampling_mask(sent, token_ids=[1, 4, 2])
    assert got is not None
    assert encode_sampling_mask(got) == sent


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (7, "int found"),
        ([[1]], "1 rows found for 2"),
        ([[1], None], "NoneType found"),
        ([[1], [2.0]], "float found"),
        ([[1], [True]], "bool found"),
        ([[1], [[2]]], "list found"),
        ([[1], [-2]], "not token ids"),
        ([[1], [2, 1 << 40]], "not token ids"),
        ([[1], [2, 16]], "0..15 are legal"),
        ([[1], [3]], "sampled token 2 is not among"),
        ([[1], [2, 3, 2]], "stands twice"),
        ({}, "packed int32"),
        ({"ids": packed([1, 2]), "counts": packed([1, 1], dtype="int64")}, "counts: a packed int32"),
        ({"ids": packed([1, 2], shape=[1 << 40]), "counts": packed([1, 1])}, "out of bounds"),
        ({"ids": packed([1, 2], shape=[3]), "counts": packed([1, 1])}, "needs 12 bytes, 8 found"),
        ({"ids": packed([1, 2], shape=[2, 1]), "counts": packed([1, 1])}, "shape"),
        ({"ids": packed([1, 2], data="?"), "counts": packed([1, 1])}, "base64"),
        ({"ids": packed([1, 2]), "counts": packed([1, 2])}, "sum to 3 found for 2"),
        ({"ids": packed([1, 2]), "counts": packed([3, -1])}, "counts that sum"),
        ({"ids": packed([1, 2]), "offsets": packed([])}, "start with 0"),
        ({"ids": packed([1, 2]), "offsets": packed([1, 2, 3])}, "start with 0"),
        ({"ids": packed([1, 2]), "offsets": packed([0, 3, 2])}, "counts that sum"),
        ({"ids": packed([1, 2]), "offsets": packed([0, 2])}, "1 rows found for 2"),
    ],
)
def test_hostile_masks_are_refused(value: Any, word: str) -> None:
    with pytest.raises(WireError, match=word):
        decode_sampling_mask(value, token_ids=[1, 2], vocab_count=16)
