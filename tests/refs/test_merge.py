"""Rows of several replies, merged by position, with the right rows written down and against a loop over tokens."""

import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsref.errors import PayloadError
from fsref.refs import Dense, Merged, Piece, Ragged, TokenRange, flags_of, merge, ranges_where
from fsref.refs.merge import splice


def dense(*values: int | None, width: int = 1) -> Dense:
    """Rows [R, width] with one value each; ``None`` is missing."""
    rows = np.asarray([[77 if v is None else v] * width for v in values], np.uint8).reshape(len(values), width)
    return Dense(rows, ranges_where(np.asarray([v is None for v in values], np.bool_)))


def values(merged: Merged | None) -> list[int | None]:
    assert merged is not None
    data = merged.data
    assert isinstance(data, Dense)
    gone = flags_of(data.missing, len(data.rows))
    return [None if g else int(r[0]) for r, g in zip(data.rows, gone, strict=True)]


@pytest.mark.payload("A1")
def test_one_row_less_than_tokens_leaves_the_tail_missing_and_as_many_are_taken_whole() -> None:
    assert values(merge([Piece(0, dense(1, 2, 3, 4, 5, width=4))], token_count=6)) == [1, 2, 3, 4, 5, None]
    assert values(merge([Piece(0, dense(1, 2, 3, 4, 5, 6))], token_count=6)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.payload("A3")
def test_the_next_turn_repairs_the_boundary_row() -> None:
    merged = merge([Piece(0, dense(1, 2, 3, None)), Piece(3, dense(9, 8))], token_count=6)
    assert values(merged) == [1, 2, 3, 9, 8, None]
    assert merged is not None
    assert merged.conflicts == 0


@pytest.mark.payload("A4")
def test_a_start_beyond_what_is_held_names_the_gap() -> None:
    pieces = [Piece(0, dense(0, 1, 2, 3, 4)), Piece(7, dense(7, 8))]
    with pytest.raises(PayloadError, match=r"rows of tokens \[5, 7\) are missing: the pieces hold \[0, 5\), \[7, 9\)"):
        merge(pieces, token_count=9, gaps="refuse")
    with pytest.raises(PayloadError, match=r"\[0, 2\) are missing"):
        merge([Piece(2, dense(1))], token_count=4, gaps="refuse")
    assert values(merge(pieces, token_count=9)) == [0, 1, 2, 3, 4, None, None, 7, 8]
    assert values(merge([Piece(0, dense(1, 2))], token_count=3, gaps="refuse")) == [1, 2, None]


@pytest.mark.payload("A5")
def test_a_start_at_the_cached_prefix_overlaps_what_is_held() -> None:
    held = Piece(0, dense(0, 1, 2, 3, 4))
    for repeated, conflicts in ((dense(3, 4, 5), 0), (dense(3, 40, 5), 1)):
        merged = merge([held, Piece(3, repeated)], token_count=7)
        assert values(merged) == [0, 1, 2, 3, 4, 5, None]
        assert merged is not None
        assert merged.conflicts == conflicts


@pytest.mark.payload("A6")
def test_a_resumed_generation_that_resends_everything_keeps_the_first_versions_rows() -> None:
    first, resumed = Piece(0, dense(1, 2, 3, 4)), Piece(0, dense(11, 12, 13, 14, 5, 6, 7))
    merged = merge([first, resumed], token_count=8)
    assert values(merged) == [1, 2, 3, 4, 5, 6, 7, None]
    assert merged is not None
    assert merged.conflicts == 4


@pytest.mark.payload("A7")
def test_a_resume_without_new_tokens_changes_nothing() -> None:
    held = Piece(0, dense(1, 2, 3, 4, 5))
    for nothing in (None, dense()):
        for start in (0, 5):
            assert values(merge([held, Piece(start, nothing)], token_count=5)) == [1, 2, 3, 4, 5]
    assert values(merge([held, held], token_count=5)) == [1, 2, 3, 4, 5]
    assert merge([Piece(0, None), Piece(0, dense())], token_count=5) is None


@pytest.mark.payload("A8")
def test_holes_in_the_middle_are_coverage() -> None:
    assert values(merge([Piece(0, dense(1, 2, 3, None, None, 6, 7, None))], token_count=8)) == [1, 2, 3, None, None, 6, 7, None]


@pytest.mark.payload("A9")
def test_surplus_rows_are_an_error_with_numbers() -> None:
    with pytest.raises(PayloadError, match=r"\[0, 6\) found, the sequence has 4 tokens"):
        merge([Piece(0, dense(1, 2, 3, 4, 5, 6))], token_count=4)


@pytest.mark.payload("A16")
def test_one_node_without_rows_does_not_take_those_of_the_others() -> None:
    nodes = [Piece(0, dense(1, 2)), Piece(2, None), Piece(4, dense(5, 6))]
    assert values(merge(nodes, token_count=6)) == [1, 2, None, None, 5, 6]


@pytest.mark.payload("A19")
def test_a_splice_takes_prompt_rows_from_prefill_and_the_rest_from_decode() -> None:
    prefill, decode = Piece(0, dense(1, 1, 1, 1)), Piece(0, dense(0, 0, 0, 0, 2, 2, 2, 2, 2))
    merged = splice(prefill, decode, prompt_count=4, token_count=10)
    assert values(merged) == [1, 1, 1, 1, 2, 2, 2, 2, 2, None]
    assert merged is not None
    assert merged.sources == ((TokenRange(0, 4), "prefill"), (TokenRange(4, 9), "decode"))
    assert merged.conflicts == 0
    cached = splice(prefill, decode, prompt_count=4, token_count=10, external=[TokenRange(0, 2)])
    assert values(cached) == [None, None, 1, 1, 2, 2, 2, 2, 2, None]


def test_ragged_rows_merge_with_their_values_and_flags() -> None:
    first = Ragged(
        np.asarray([0, 2, 0], np.int32), {"ids": np.asarray([4, 5])}, (TokenRange(2, 3),), {"flags": np.asarray([0, 1, 0], np.uint8)}
    )
    second = Ragged(np.asarray([3, 1], np.int32), {"ids": np.asarray([7, 8, 9, 6])}, (), {"flags": np.asarray([2, 0], np.uint8)})
    merged = merge([Piece(0, first), Piece(2, second)], token_count=5)
    assert merged is not None
    data = merged.data
    assert isinstance(data, Ragged)
    assert data.counts.tolist() == [0, 2, 3, 1, 0]
    assert data.columns["ids"].tolist() == [4, 5, 7, 8, 9, 6]
    assert data.row_columns["flags"].tolist() == [0, 1, 2, 0, 0]
    assert data.missing == (TokenRange(4, 5),)
    again = merge([Piece(0, first), Piece(1, Ragged(np.asarray([2], np.int32), {"ids": np.asarray([4, 6])}))], token_count=3)
    assert again is not None
    assert again.conflicts == 1


def test_pieces_of_another_form_are_refused() -> None:
    ragged = Ragged(np.asarray([1], np.int32), {"ids": np.asarray([1])})
    with pytest.raises(PayloadError, match="dense and ragged"):
        merge([Piece(0, dense(1)), Piece(1, ragged)], token_count=2)
    with pytest.raises(PayloadError, match="shapes"):
        merge([Piece(0, dense(1)), Piece(1, dense(1, width=2))], token_count=2)
    with pytest.raises(PayloadError, match="columns"):
        merge([Piece(0, ragged), Piece(1, Ragged(np.asarray([1], np.int32), {"x": np.asarray([1])}))], token_count=2)


@pytest.mark.payload("B11")
def test_pieces_that_number_experts_differently_are_refused() -> None:
    logical, physical = (Dense(np.zeros((1, 1, 2), np.uint8), (), space) for space in ("logical", "physical"))
    with pytest.raises(PayloadError, match="number experts differently"):
        merge([Piece(0, logical), Piece(1, physical)], token_count=2)


@pytest.mark.payload("B3")
def test_pieces_of_different_width_are_widened() -> None:
    merged = merge([Piece(0, Dense(np.asarray([40], np.uint8))), Piece(1, Dense(np.asarray([511], np.uint16)))], token_count=2)
    assert merged is not None
    assert isinstance(merged.data, Dense)
    assert merged.data.rows.dtype == np.uint16
    assert merged.data.rows.tolist() == [40, 511]


@pytest.mark.payload("G3")
def test_a_merged_array_keeps_no_engine_reply_alive() -> None:
    reply = np.arange(1000, dtype=np.uint8)
    gone = weakref.ref(reply)
    merged = merge([Piece(0, Dense(reply[10:20]))], token_count=12)
    del reply
    assert gone() is None
    assert merged is not None
    assert isinstance(merged.data, Dense)
    assert merged.data.rows[:10].tolist() == list(range(10, 20))


def test_float_rows_are_compared_bit_for_bit() -> None:
    quiet, negative = np.asarray([np.nan, 0.0], np.float32), np.asarray([np.nan, -0.0], np.float32)
    merged = merge([Piece(0, Dense(quiet)), Piece(0, Dense(negative))], token_count=2)
    assert merged is not None
    assert merged.conflicts == 1, "the NaN equals itself, -0.0 is not 0.0"


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=8)), min_size=1, max_size=5))
def test_merging_is_what_a_loop_over_tokens_gives(parts: list[tuple[int, list[int | None]]]) -> None:
    expected: list[Any] = [None] * 20
    conflicts = 0
    for start, rows in parts:
        for n, value in enumerate(rows):
            if value is not None and expected[start + n] is None:
                expected[start + n] = value
            elif value is not None and expected[start + n] != value:
                conflicts += 1
    merged = merge([Piece(start, dense(*rows)) for start, rows in parts], token_count=20)
    if merged is None:
        assert not any(rows for _, rows in parts)
        return
    assert values(merged) == expected
    assert merged.conflicts == conflicts
    assert sum(len(r) for r, _ in merged.sources) == sum(v is not None for v in expected)
