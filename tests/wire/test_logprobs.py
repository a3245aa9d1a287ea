"""Sampled logprobs and top-k heads in both token forms, what is kept of a head, and what is refused."""

from typing import Any

import numpy as np
import pytest

from fsref.errors import WireError
from fsref.refs import Ragged
from fsref.wire.logprobs import decode_logprobs, decode_top_logprobs, encode_content
from tests.wire.recorded import choices, load


def entry(token_id: int, logprob: float, *candidates: tuple[int, float], old: bool = False) -> dict[str, Any]:
    def named(i: int, v: float) -> dict[str, Any]:
        return {"token": f"token_id:{i}", "logprob": v, "bytes": None} if old else {"token_id": i, "logprob": v, "rank": 1}

    return {**named(token_id, logprob), "top_logprobs": [named(i, v) for i, v in candidates]}


def rows_of(ragged: Ragged) -> list[list[tuple[int, float]]]:
    ends = np.cumsum(ragged.counts)
    pairs = list(zip(ragged.columns["ids"].tolist(), ragged.columns["logprobs"].tolist(), strict=True))
    return [pairs[a - n : a] for a, n in zip(ends, ragged.counts, strict=True)]


CONTENT = [
    entry(9, -4.0, (9, -4.0), (5, -0.5), (3, -1.0), (8, -2.0)),  # the sampled token is outside the top 3
    entry(5, -0.25, (5, -0.25), (3, -1.5), (8, -2.5), (1, -2.5)),  # it is the best; 8 and 1 tie
]


@pytest.mark.parametrize("old", [False, True])
def test_both_token_forms_are_read(old: bool) -> None:
    content = [entry(7, -0.5, (7, -0.5), (2, -1.0), old=old)]
    np.testing.assert_array_equal(decode_logprobs(content, token_ids=[7]), np.asarray([-0.5], np.float32))
    assert rows_of(decode_top_logprobs(content, token_ids=[7])) == [[(7, -0.5), (2, -1.0)]]


def test_without_a_head_size_entries_stay_as_sent_with_the_sampled_token_first() -> None:
    assert [[i for i, _ in row] for row in rows_of(decode_top_logprobs(CONTENT, token_ids=[9, 5]))] == [[9, 5, 3, 8], [5, 3, 8, 1]]


def test_a_head_holds_the_most_probable_tokens_whichever_was_sampled() -> None:
    assert rows_of(decode_top_logprobs(CONTENT, token_ids=[9, 5], head=2)) == [[(5, -0.5), (3, -1.0)], [(5, -0.25), (3, -1.5)]]


def test_entries_tied_across_the_cut_leave_the_head_together() -> None:
    got = decode_top_logprobs(CONTENT, token_ids=[9, 5], head=3)
    assert got.counts.tolist() == [3, 2]
    assert [[i for i, _ in row] for row in rows_of(got)] == [[5, 3, 8], [5, 3]]


def test_entries_tied_within_the_head_stand_by_id() -> None:
    assert [i for i, _ in rows_of(decode_top_logprobs(CONTENT, token_ids=[9, 5], head=4))[1]] == [5, 3, 1, 8]


def test_recorded_heads_of_eight() -> None:
    sent = choices("top_logprobs_8")[0].top_logprobs
    assert sent is not None
    assert sent.counts.tolist() == [8] * 6
    assert sent.columns["ids"][:8].tolist() == [132, 175, 68, 340, 391, 142, 467, 457]
    np.testing.assert_array_equal(sent.columns["logprobs"][:2], np.asarray([-5.205692291259766, -4.135379791259766], np.float32))
    head = choices("top_logprobs_8", head=5)[0].top_logprobs
    assert head is not None
    assert head.counts.tolist() == [5, 4, 5, 5, 5, 5]  # in row 1 tokens 45 and 301 tie at the cut
    assert head.columns["ids"][5:9].tolist() == [222, 433, 244, 16]


def test_recorded_logprobs_are_the_sampled_tokens() -> None:
    case, choice = load("top_logprobs_8"), choices("top_logprobs_8")[0]
    assert choice.logprobs is not None
    assert choice.logprobs.dtype == np.float32
    want = [e["logprob"] for e in case["response"]["choices"][0]["logprobs"]["content"]]
    np.testing.assert_array_equal(choice.logprobs, np.asarray(want, np.float32))


def test_tokens_that_truncation_removed_are_never_kept() -> None:
    content = [entry(4, -0.75, (4, -0.75), (2, -0.5), (6, -9999.0), (1, -9999.0))]
    for head in (None, 2, 8):
        assert [i for i, _ in rows_of(decode_top_logprobs(content, token_ids=[4], head=head))[0]] in ([4, 2], [2, 4])


def test_an_empty_completion_has_no_rows() -> None:
    for head in (None, 3):
        got = decode_top_logprobs([], token_ids=[], head=head)
        assert got.counts.shape == got.columns["ids"].shape == got.columns["logprobs"].shape == (0,)
    assert decode_logprobs([], token_ids=[]).shape == (0,)


def test_float32_values_survive_the_json_text() -> None:
    value = np.float32(-0.1)
    content = [entry(1, float(value), (1, float(value)))]
    assert decode_logprobs(content, token_ids=[1])[0] == value
    assert decode_top_logprobs(content, token_ids=[1]).columns["logprobs"][0] == value


def test_the_encoder_is_read_back() -> None:
    heads = Ragged(
        np.asarray([2, 3], np.int32),
        {"ids": np.asarray([4, 1, 5, 4, 0], np.int32), "logprobs": np.asarray([-1, -0.5, -2, -0.25, -np.inf], np.float32)},
    )
    content = encode_content(token_ids=[4, 5], logprobs=np.asarray([-1, -2], np.float32), heads=heads, ranks=[2, 7])
    assert content[1]["top_logprobs"][2] == {"token_id": 0, "logprob": -9999.0}
    assert [e["rank"] for e in content] == [2, 7]
    np.testing.assert_array_equal(decode_logprobs(content, token_ids=[4, 5]), np.asarray([-1, -2], np.float32))
    assert rows_of(decode_top_logprobs(content, token_ids=[4, 5])) == [[(4, -1.0), (1, -0.5)], [(5, -2.0), (4, -0.25)]]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "list expected"),
        ("x", "list expected"),
        ([], "0 entries found for 1"),
        ([entry(3, -1.0), entry(3, -1.0)], "2 entries found for 1"),
        ([None], "NoneType"),
        ([entry(4, -1.0)], "token id 4 found, the completion has 3"),
        ([{"token_id": -3, "logprob": -1.0}], "token_id -3"),
        ([{"token_id": True, "logprob": -1.0}], "token_id True"),
        ([{"token_id": "3", "logprob": -1.0}], "token_id '3'"),
        ([{"token": "token_id:", "logprob": -1.0}], "must name"),
        ([{"token": "token_id:-3", "logprob": -1.0}], "must name"),
        ([{"token": "token_id:³", "logprob": -1.0}], "must name"),
        ([{"token": "hello", "logprob": -1.0}], "must name"),
        ([{"token_id": 3}], "logprob None"),
        ([entry(3, float("nan"))], "finite"),
        ([entry(3, float("-inf"))], "finite"),
        ([entry(3, 10**400)], "finite"),
        ([entry(3, 0.5)], "at most 0"),
        ([entry(3, -9999.0)], "no evidence"),
        ([{"token_id": 3, "logprob": "-1"}], "finite"),
        ([{"token_id": 3, "logprob": True}], "finite"),
    ],
)
def test_sampled_logprobs_without_evidence_are_refused(content: Any, word: str) -> None:
    with pytest.raises(WireError, match=word):
        decode_logprobs(content, token_ids=[3])


@pytest.mark.parametrize(
    ("candidates", "word"),
    [
        (None, "candidates expected"),
        ([], "candidates expected"),
        ("x", "candidates expected"),
        ([None], "NoneType"),
        ([{"token_id": -1, "logprob": -1.0}], "token_id -1"),
        ([{"token_id": 1 << 40, "logprob": -1.0}], "int32"),
        ([{"token_id": 3, "logprob": None}], "finite"),
        ([{"token_id": 3, "logprob": -1.0}, {"token_id": 3, "logprob": -1.0}], "stands twice"),
        ([{"token_id": 3, "logprob": -1.0}, {"token": "token_id:3", "logprob": -1.0}], "stands twice"),
    ],
)
def test_candidates_of_an_unknown_form_are_refused(candidates: Any, word: str) -> None:
    with pytest.raises(WireError, match=word):
        decode_top_logprobs([{"token_id": 3, "logprob": -1.0, "top_logprobs": candidates}], token_ids=[3])
