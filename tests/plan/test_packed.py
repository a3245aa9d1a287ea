"""Which token stands at each row of a rank, for every layout: by example, and against an oracle of lists."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsref.errors import ConfigError, PayloadError
from fsref.plan import (
    PADDING,
    ContextLayout,
    PackedRows,
    Run,
    check_placements,
    check_stages,
    held_layers,
    packed,
    padded_bounds,
    padded_to,
    padding_count,
    placed,
    rank_layers,
    rank_rows,
    split_context,
    split_tensor,
    virtual_slices,
)
from fsref.plan.padding import take
from fsref.refs import routed_experts
from tests.support import layouts


def whole(*lengths: int) -> PackedRows:
    bounds = [0, *accumulate(lengths)]
    return packed(bounds, bounds)


def tokens(rows: PackedRows) -> list[tuple[int, int, int]]:
    return [(s.sequence, s.tokens.start, s.tokens.stop) for s in rows.spans()]


@pytest.mark.payload("D2")
def test_zigzag_gives_the_first_rank_the_first_and_the_last_part() -> None:
    assert tokens(split_context(whole(16), ContextLayout.ZIGZAG, rank=0, ranks=2)) == [(0, 0, 4), (0, 12, 16)]
    assert tokens(split_context(whole(16), ContextLayout.ZIGZAG, rank=1, ranks=2)) == [(0, 4, 12)]


@pytest.mark.payload("D3")
def test_contiguous_gives_the_first_rank_the_first_half() -> None:
    assert tokens(split_context(whole(16), ContextLayout.CONTIGUOUS, rank=0, ranks=2)) == [(0, 0, 8)]


@pytest.mark.payload("D3")
def test_the_same_sequences_lie_differently_in_each_layout() -> None:
    two = whole(8, 16)
    found = {layout: tokens(split_context(two, layout, rank=0, ranks=2)) for layout in ContextLayout}
    assert found == {
        ContextLayout.ZIGZAG: [(0, 0, 2), (0, 6, 8), (1, 0, 4), (1, 12, 16)],
        ContextLayout.CONTIGUOUS: [(0, 0, 4), (1, 0, 8)],
        ContextLayout.ALLGATHER: [(0, 0, 8), (1, 0, 4)],
    }


@pytest.mark.payload("D3")
def test_there_is_no_layout_by_default() -> None:
    with pytest.raises(TypeError, match="layout"):
        split_context(whole(16), rank=0, ranks=2)  # type: ignore[call-arg]


@pytest.mark.payload("D4")
def test_sequences_are_padded_before_the_split_and_the_batch_after_it() -> None:
    bounds = padded_bounds([0, 5, 12], multiple=4)
    assert bounds == [0, 8, 16]
    rows = [
        rank_rows(
            packed([0, 5, 12], bounds), ContextLayout.ZIGZAG,
            context_rank=r, context_ranks=2, tensor_rank=0, tensor_ranks=1, multiple=10, first_slot=4,
        )
        for r in range(2)
    ]  # fmt: skip
    assert [tokens(r) for r in rows] == [[(0, 0, 2), (1, 0, 2), (1, 6, 7)], [(0, 2, 5), (1, 2, 6)]]
    assert rows[0].index().tolist() == [0, 1, -1, -1, 5, 6, 11, -1, -1, -1]
    assert rows[1].index().tolist() == [2, 3, 4, -1, 7, 8, 9, 10, -1, -1]
    assert rows[0].padding().tolist() == [False, False, True, True, False, False, False, True, True, True]
    assert rows[0].positions().tolist() == [0, 1, 6, 7, 0, 1, 6, 7, 0, 1]
    assert rows[0].cu_seqlens().tolist() == [0, 4, 8, 10]
    assert rows[0].sequence_ids().tolist() == [0] * 4 + [1] * 4 + [PADDING] * 2
    slots = np.concatenate([r.row_slots()[r.padding()] for r in rows])
    assert sorted(slots.tolist()) == list(range(8)), "every padding row has a slot of its own"


@pytest.mark.payload("D5")
def test_a_split_that_does_not_divide_is_an_error_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"10 rows do not split evenly over 4 tensor parallel ranks \(2 are left over\).* 12, "):
        split_tensor(whole(10), rank=0, ranks=4)
    with pytest.raises(
        ConfigError, match=r"sequence 1 has 6 rows, which zigzag over 2 .* 4 equal parts: pad it to 8 \(cu_seqlens_padded\)"
    ):
        split_context(whole(8, 6), ContextLayout.ZIGZAG, rank=0, ranks=2)
    with pytest.raises(ConfigError, match="7 rows do not split evenly over 2 context parallel ranks"):
        split_context(whole(3, 4), ContextLayout.ALLGATHER, rank=0, ranks=2)
    with pytest.raises(ConfigError, match="the padding has 3 rows, which contiguous over 2"):
        split_context(padded_to(whole(4), multiple=7, first_slot=0), ContextLayout.CONTIGUOUS, rank=0, ranks=2)


def test_ranks_that_do_not_exist_are_refused() -> None:
    for rank, ranks in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError, match=f"context parallel rank {rank} of {ranks}"):
            split_context(whole(4), ContextLayout.ALLGATHER, rank=rank, ranks=ranks)
    with pytest.raises(ConfigError, match="tensor parallel rank 1 of 1"):
        split_tensor(whole(4), rank=1, ranks=1)


def test_bounds_that_do_not_fit_are_refused() -> None:
    for tight, padded, message in (
        ([0, 5], [0, 4], "sequence 0 has 5 tokens, cu_seqlens_padded leaves 4"),
        ([0, 5, 3], [0, 8, 16], "cu_seqlens descends at sequence 1"),
        ([1, 5], [0, 8], "starts with 0"),
        ([], [0], "starts with 0"),
        ([0, 5], [0, 5, 6], "1 sequences, cu_seqlens_padded 2"),
    ):
        with pytest.raises(PayloadError, match=message):
            packed(tight, padded)
    with pytest.raises(ConfigError, match="multiple of 0"):
        padded_bounds([0, 5], multiple=0)
    with pytest.raises(ConfigError, match="multiple of 0"):
        padded_to(whole(4), multiple=0, first_slot=0)


@pytest.mark.payload("D10")
def test_a_short_and_a_long_sequence_take_their_tokens_and_no_rectangle() -> None:
    rows = whole(1, 1000)
    assert rows.row_count == 1001
    assert rows.cu_seqlens().tolist() == [0, 1, 1001]


@pytest.mark.payload("D15")
def test_a_placement_says_which_sequences_stand_where_and_their_numbers_stay() -> None:
    rows = placed(whole(3, 2, 4), [2, 0, 1])
    assert tokens(rows) == [(2, 0, 4), (0, 0, 3), (1, 0, 2)]
    values = np.arange(9) * 10
    assert take(values, rows.index())[0].tolist() == [50, 60, 70, 80, 0, 10, 20, 30, 40]
    assert rows.sequences == (2, 0, 1)


@pytest.mark.payload("D15")
def test_placements_of_a_step_hold_every_sequence_once() -> None:
    check_placements([[2, 0], [1]], sequence_count=3)
    with pytest.raises(ConfigError, match=r"\[1\] placed nowhere, \[2\] more than once, \[7\] unknown"):
        check_placements([[2, 0], [2, 7]], sequence_count=3)
    with pytest.raises(ConfigError, match=r"sequences \[3\] placed, there are \[0, 1, 2\]"):
        placed(whole(1, 1, 1), [3])


def test_a_sequence_may_stand_twice() -> None:
    rows = split_context(placed(whole(4, 4), [1, 1]), ContextLayout.ZIGZAG, rank=0, ranks=2)
    assert tokens(rows) == [(1, 0, 1), (1, 3, 4), (1, 0, 1), (1, 3, 4)]
    assert rows.cu_seqlens().tolist() == [0, 2, 4]


def test_neighbouring_parts_of_a_sequence_are_one_run() -> None:
    assert split_context(whole(8), ContextLayout.ZIGZAG, rank=0, ranks=1).runs == (Run(0, 0, 8),)
    assert split_context(whole(8), ContextLayout.ZIGZAG, rank=1, ranks=2).runs == (Run(0, 2, 6),)


@pytest.mark.payload("C4", "C5")
def test_stages_hold_the_layers_that_the_caller_says() -> None:
    field = routed_experts(layer_ids=[0, 1, 2, 4, 5], top_k=1, expert_count=4)
    stages = [[[0, 1], [4, 5]], [[2, 3], [6]]]
    check_stages(field, stages)
    assert rank_layers(stages, 0) == (0, 1, 4, 5)
    assert rank_layers(stages, 1) == (2, 3, 6)
    assert held_layers(field, rank_layers(stages, 1)) == (2,)
    assert virtual_slices(field, stages, 0) == (slice(0, 2), slice(2, 4))
    assert virtual_slices(field, stages, 1) == (slice(0, 1), slice(1, 1))
    assert rank_layers([[[0]], [[1, 2, 3]]], 1) == (1, 2, 3)


@pytest.mark.payload("C5")
def test_stages_that_leave_out_or_repeat_a_layer_are_refused() -> None:
    field = routed_experts(layer_ids=range(4), top_k=1, expert_count=4)
    with pytest.raises(ConfigError, match=r"layers \[2\] of field 'routed_experts' are in none, layers \[1\] in several"):
        check_stages(field, [[[0, 1]], [[1, 3]]])
    with pytest.raises(ConfigError, match="pipeline rank 2 of 2"):
        rank_layers([[[0]], [[1]]], 2)


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.payload("D1", "D2", "D3", "D4")
def test_rows_of_every_rank_are_those_of_the_oracle_and_together_the_whole_once(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(layouts.LAYOUTS))
    ranks = data.draw(st.sampled_from([1, 2, 3, 4]))
    tensor_ranks = data.draw(st.sampled_from([1, 2, 3]))
    lengths = data.draw(st.lists(st.integers(0, 40), max_size=5))
    rooms = [layouts.room_of(n, layout, ranks, data.draw(st.integers(0, 1))) for n in lengths]
    order = data.draw(st.permutations(range(len(lengths))))
    multiple = tensor_ranks * data.draw(st.integers(1, 4))
    step = packed([0, *accumulate(lengths)], [0, *accumulate(rooms)])
    expected = layouts.rank_rows([(n, rooms[n]) for n in order], layout, ranks=ranks, multiple=multiple)
    seen: list[tuple[int, int]] = []
    slots: list[int] = []
    for rank, rows_of_rank in enumerate(expected):
        size = len(rows_of_rank) // tensor_ranks
        for tensor_rank in range(tensor_ranks):
            got = rank_rows(
                placed(step, order), ContextLayout(layout), context_rank=rank, context_ranks=ranks,
                tensor_rank=tensor_rank, tensor_ranks=tensor_ranks, multiple=multiple, first_slot=padding_count(step),
            )  # fmt: skip
            rows = rows_of_rank[tensor_rank * size : (tensor_rank + 1) * size]
            assert got.row_count == len(rows)
            real = [row is not None and row[1] < lengths[row[0]] for row in rows]
            assert got.padding().tolist() == [not r for r in real]
            assert got.sequence_ids().tolist() == [PADDING if row is None else row[0] for row in rows]
            assert [p for p, row in zip(got.positions().tolist(), rows, strict=True) if row] == [row[1] for row in rows if row]
            offsets = [0, *accumulate(lengths)]
            assert got.index().tolist() == [offsets[row[0]] + row[1] if row and ok else -1 for row, ok in zip(rows, real, strict=True)]
            assert int(got.cu_seqlens()[-1]) == len(rows)
            seen += [row for row, ok in zip(rows, real, strict=True) if row and ok]
            slots += got.row_slots()[got.padding()].tolist()
    assert sorted(seen) == sorted((n, p) for n, length in enumerate(lengths) for p in range(length))
    assert sorted(slots) == list(range(len(slots))), "slots are numbered on, over sequences and ranks"
