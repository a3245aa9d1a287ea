"""Merging engine replies by absolute position."""

import numpy as np
import pytest
from numpy.typing import NDArray

from fsref.envserver.capture import Capture, TurnArrays, turn_arrays
from fsref.refs import Dense, Ragged, TokenRange


def rows(values: list[int]) -> NDArray[np.uint8]:
    """[R, 1, 1]"""
    return np.asarray(values, np.uint8)[:, None, None]


def turn(prompt: list[int], completion: list[int], *, start: int = 0, values: list[int] | None = None, mask: bool = True) -> TurnArrays:
    """A reply whose routing rows are ``values`` (by default the token ids themselves) and whose masks hold the token and its successor."""
    ids = prompt + completion
    if values is None:
        values = ids[start:-1]
    ragged = {}
    if mask:
        flat = [v for i in completion for v in (i, i + 1)]
        ragged["sampling_mask"] = Ragged(np.full(len(completion), 2, np.int32), {"ids": np.asarray(flat, np.int32)})
    return turn_arrays(prompt_ids=prompt, completion_ids=completion, dense={"routed_experts": (start, rows(values))}, ragged=ragged)


def capture(*turns: TurnArrays) -> Capture:
    out = Capture()
    out.open("t")
    for t in turns:
        out.add("t", t)
    return out


def merged(found: Capture, ids: list[int], sampled: list[int]) -> tuple[Dense, Ragged]:
    flags = np.zeros(len(ids), np.bool_)
    flags[sampled] = True
    fields = found.fields("t", token_ids=np.asarray(ids, np.int32), sampled=flags)
    dense, ragged = fields["routed_experts"], fields["sampling_mask"]
    assert isinstance(dense, Dense)
    assert isinstance(ragged, Ragged)
    return dense, ragged


@pytest.mark.payload("A1")
def test_the_last_token_has_no_row() -> None:
    dense, _ = merged(capture(turn([1, 2], [3, 4])), [1, 2, 3, 4], [2, 3])
    assert dense.rows[:3, 0, 0].tolist() == [1, 2, 3]
    assert dense.missing == (TokenRange(3, 4),)


@pytest.mark.payload("A3")
def test_the_next_turn_fills_the_last_row_of_the_one_before() -> None:
    found = capture(turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6], start=3, values=[14, 15]))
    dense, _ = merged(found, [1, 2, 3, 4, 5, 6], [2, 3, 5])
    assert dense.rows[:5, 0, 0].tolist() == [1, 2, 3, 14, 15]
    assert dense.missing == (TokenRange(5, 6),)


@pytest.mark.payload("A4", "A8")
def test_a_turn_that_starts_behind_the_end_leaves_a_hole() -> None:
    found = capture(turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6], start=4))
    dense, _ = merged(found, [1, 2, 3, 4, 5, 6], [2, 3, 5])
    assert dense.missing == (TokenRange(3, 4), TokenRange(5, 6))


@pytest.mark.payload("A5")
def test_of_two_real_rows_the_earlier_stays_and_the_difference_is_counted() -> None:
    found = capture(turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6], start=1, values=[2, 33, 14, 15]))
    dense, _ = merged(found, [1, 2, 3, 4, 5, 6], [2, 3, 5])
    assert dense.rows[:5, 0, 0].tolist() == [1, 2, 3, 14, 15]
    assert found.conflicts == 1


@pytest.mark.payload("D11")
def test_a_reply_that_repeats_the_whole_context_is_held_once() -> None:
    one = capture(turn([1, 2], [3, 4], mask=False))
    low = one.nbytes
    one.add("t", turn([1, 2, 3, 4, 5], [6], values=[1, 2, 9, 14, 15], mask=False))
    assert one.conflicts == 1
    assert one.nbytes - low == 2 + 6 * 4, "rows of two tokens, and six token ids"


def test_a_fork_takes_rows_of_the_shared_part_from_the_turn_that_has_them() -> None:
    found = capture(turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6], start=3), turn([1, 2, 3, 4, 7], [8], start=3))
    dense, ragged = merged(found, [1, 2, 3, 4, 7, 8], [2, 3, 5])
    assert dense.rows[:5, 0, 0].tolist() == [1, 2, 3, 4, 7]
    assert ragged.columns["ids"].tolist() == [3, 4, 4, 5, 8, 9]
    assert ragged.counts.tolist() == [0, 0, 2, 2, 0, 2]
    assert ragged.missing == ()


@pytest.mark.payload("A6")
def test_a_generation_that_was_aborted_and_resumed_keeps_the_rows_of_its_first_weights() -> None:
    """Three tokens of prompt and two sampled before the abort; the engine sends all rows again with three more tokens."""
    found = capture(turn([1, 2, 3], [4, 5]), turn([1, 2, 3, 4, 5], [6, 7, 8], values=[91, 92, 93, 94, 15, 16, 17]))
    dense, ragged = merged(found, [1, 2, 3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 7])
    assert dense.rows[:7, 0, 0].tolist() == [1, 2, 3, 4, 15, 16, 17]
    assert dense.missing == (TokenRange(7, 8),)
    assert ragged.counts.tolist() == [0, 0, 0, 2, 2, 2, 2, 2]
    assert found.conflicts == 4


@pytest.mark.payload("A7")
def test_a_resume_that_samples_nothing_changes_nothing() -> None:
    found = capture(turn([1, 2, 3], [4, 5]), turn([1, 2, 3, 4, 5], [], values=[1, 2, 3, 4]))
    dense, ragged = merged(found, [1, 2, 3, 4, 5], [3, 4])
    assert dense.rows[:4, 0, 0].tolist() == [1, 2, 3, 4]
    assert dense.missing == (TokenRange(4, 5),)
    assert ragged.counts.tolist() == [0, 0, 0, 2, 2]
    assert found.conflicts == 0


@pytest.mark.payload("A16")
def test_a_turn_without_arrays_leaves_a_hole_and_the_other_turns_stay() -> None:
    bare = turn_arrays(prompt_ids=[1, 2, 3, 4, 5], completion_ids=[6], dense={}, ragged={})
    found = capture(turn([1, 2], [3, 4]), bare, turn([1, 2, 3, 4, 5, 6, 7], [8], start=5))
    dense, ragged = merged(found, [1, 2, 3, 4, 5, 6, 7, 8], [2, 3, 5, 7])
    assert dense.rows[[0, 1, 2, 5, 6], 0, 0].tolist() == [1, 2, 3, 6, 7]
    assert dense.missing == (TokenRange(3, 5), TokenRange(7, 8))
    assert ragged.counts.tolist() == [0, 0, 2, 2, 0, 0, 0, 2]
    assert ragged.missing == (TokenRange(5, 6),)


def test_a_turn_of_another_branch_only_fills_rows_that_no_own_turn_has() -> None:
    other = turn([1, 2, 3, 4, 5], [6], values=[91, 92, 93, 94, 95])
    found = capture(other, turn([1, 2, 3, 4, 7], [8], start=2, values=[3, 4, 7]))
    dense, _ = merged(found, [1, 2, 3, 4, 7, 8], [5])
    assert dense.rows[:5, 0, 0].tolist() == [91, 92, 3, 4, 7]


def test_a_sampled_token_without_a_row_of_its_own_is_missing() -> None:
    found = capture(turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6], start=3, mask=False))
    _, ragged = merged(found, [1, 2, 3, 4, 5, 6], [2, 3, 5])
    assert ragged.counts.tolist() == [0, 0, 2, 2, 0, 0]
    assert ragged.missing == (TokenRange(5, 6),)


def test_values_stay_with_their_tokens_whatever_the_order_of_replies() -> None:
    inner = turn([1, 2, 3], [4, 5])
    outer = turn([1, 2], [3, 4, 5, 6])
    _, ragged = merged(capture(inner, outer), [1, 2, 3, 4, 5, 6], [2, 3, 4, 5])
    assert ragged.columns["ids"].tolist() == [3, 4, 4, 5, 5, 6, 6, 7]


def test_replies_of_forgotten_and_unknown_traces_are_ignored() -> None:
    found = capture(turn([1, 2], [3]))
    found.forget(["t"])
    found.add("t", turn([1, 2], [3]))
    found.add("u", turn([1, 2], [3]))
    assert found.nbytes == 0
    assert found.fields("t", token_ids=np.asarray([1, 2, 3], np.int32), sampled=np.asarray([False, False, True])) == {}


def test_the_first_failure_of_a_trace_is_remembered() -> None:
    found = capture()
    found.fail("t", ValueError("one"))
    found.fail("t", ValueError("two"))
    found.fail("u", ValueError("three"))
    assert str(found.failure("t")) == "one"
    assert found.failure("u") is None


@pytest.mark.parametrize("ids", [[1, 2, 3, 4], [1, 9, 3, 4, 5, 6], [9, 2, 3, 4, 5, 6]])
def test_a_branch_that_parts_before_the_reply_takes_no_more_than_the_shared_rows(ids: list[int]) -> None:
    found = capture(turn([1, 2, 3, 4, 5], [6]), turn([1, 2, 3, 4, 5, 6, 7], [8], start=5))
    fields = found.fields("t", token_ids=np.asarray(ids, np.int32), sampled=np.zeros(len(ids), np.bool_))
    assert fields == {}, "no turn is wholly a part of the branch, so it has no arrays of its own"


@pytest.mark.payload("G3")
def test_rows_share_no_memory_with_the_reply() -> None:
    buffer = rows([1, 2, 3, 4, 5])
    found = capture(turn([1, 2], [3, 4]))
    found.add("t", turn_arrays(prompt_ids=[1, 2, 3, 4, 5], completion_ids=[6], dense={"routed_experts": (0, buffer)}, ragged={}))
    held = found._traces["t"].turns[1].dense["routed_experts"][1]
    assert not np.shares_memory(held, buffer)
