"""Rows side by side give what a sort of all values gives."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsref.wire import rows
from fsref.wire.rows import first_repeat, most_probable

VALUES = st.sampled_from([1e-6, 0.0, -0.0, -1e-6, -0.5, -1.0, -2.5, -9000.0, float("-inf")])


def slow_repeat(counts: np.ndarray[Any, Any], ids: np.ndarray[Any, Any]) -> tuple[int, int] | None:
    at = 0
    for row, count in enumerate(counts.tolist()):
        these = ids[at : at + count].tolist()
        at += count
        again = sorted(i for i in set(these) if these.count(i) > 1)
        if again:
            return row, again[0]
    return None


@given(st.lists(st.lists(st.integers(0, 40), max_size=9), max_size=12), st.sampled_from([1, 5, 1 << 18]), st.sampled_from([0, 1, 4]))
def test_the_first_repeat_is_what_a_loop_finds(lists: list[list[int]], block: int, padding: int) -> None:
    counts, ids = np.asarray([len(r) for r in lists], np.int64), np.asarray([i for r in lists for i in r], np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_BLOCK_VALUES", block)
        patch.setattr(rows, "_PADDING_MAX", padding)
        assert first_repeat(counts, ids) == slow_repeat(counts, ids)


@given(
    st.lists(st.dictionaries(st.integers(0, 2**31 - 1), VALUES, max_size=9), max_size=12),
    st.integers(1, 10),
    st.sampled_from([1, 5, 1 << 18]),
    st.sampled_from([0, 1, 4]),
)
def test_the_most_probable_are_what_a_sort_of_tuples_gives(lists: list[dict[int, float]], head: int, block: int, padding: int) -> None:
    counts = np.asarray([len(r) for r in lists], np.int64)
    ids = np.asarray([i for r in lists for i in r], np.int64)
    values = np.asarray([v for r in lists for v in r.values()], np.float32)
    expected: list[int] = []
    sizes: list[int] = []
    at = 0
    for count in counts.tolist():
        order = sorted(range(at, at + count), key=lambda n: (-values[n], ids[n]))
        kept = [n for n in order[:head] if count <= head or values[n] != values[order[head]]]
        expected += kept
        sizes.append(len(kept))
        at += count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_BLOCK_VALUES", block)
        patch.setattr(rows, "_PADDING_MAX", padding)
        got_counts, got = most_probable(counts, ids, values, head=head)
    assert got_counts.tolist() == sizes
    assert got.tolist() == expected


def test_one_row_of_a_whole_vocabulary_among_short_ones_is_not_padded_to() -> None:
    counts = np.asarray([2, 150_000, 1, 2] * 3, np.int64)
    ids = np.concatenate([[5, 6], np.arange(150_000), [9], [7, 8]] * 3).astype(np.int64)
    assert first_repeat(counts, ids) is None
    ids[-1] = 7
    assert first_repeat(counts, ids) == (11, 7)
