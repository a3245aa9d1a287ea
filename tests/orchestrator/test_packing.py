"""Placement of samples: budget, balance, equal counts, kinds apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsref.errors import ConfigError
from fsref.orchestrator.packing import place

samples = st.lists(st.tuples(st.integers(0, 100), st.booleans()), max_size=40)


def test_four_samples_on_two_ranks_balance_exactly() -> None:
    placed = place([70, 50, 30, 10], [True] * 4, data_ranks=2, tokens_max=100)
    assert placed == [[[0, 3]], [[1, 2]]]


def test_a_full_micro_batch_takes_no_more() -> None:
    assert place([60, 60, 40], [True] * 3, data_ranks=1, tokens_max=100) == [[[0, 2], [1]]]


def test_samples_with_and_without_routing_do_not_share_a_micro_batch() -> None:
    assert place([10, 10, 10], [True, False, True], data_ranks=1, tokens_max=100) == [[[0, 2], [1]]]


def test_a_rank_with_fewer_micro_batches_splits_one_before_it_gets_a_dummy() -> None:
    # Rank 0 needs two (90 does not fit beside 20); rank 1 has four small ones that would fit one.
    placed = place([90, 30, 30, 20, 20], [True, True, True, True, True], data_ranks=2, tokens_max=100)
    assert [[sum([90, 30, 30, 20, 20][i] for i in b) for b in rank] for rank in placed] == [[90], [100]]
    placed = place([90, 90, 60, 60, 40, 20], [True] * 6, data_ranks=2, tokens_max=100)
    assert {len(rank) for rank in placed} == {2}
    assert all(batch for rank in placed for batch in rank)


def test_a_rank_without_samples_gets_a_dummy() -> None:
    assert place([5], [True], data_ranks=2, tokens_max=100) == [[[0]], [[]]]


def test_no_samples_give_no_micro_batches() -> None:
    assert place([], [], data_ranks=3, tokens_max=10) == [[], [], []]


def test_a_sample_beyond_the_budget_is_refused_with_the_setting_to_change() -> None:
    with pytest.raises(ConfigError, match=r"101 tokens.*tokens_per_micro_batch"):
        place([101], [True], data_ranks=1, tokens_max=100)


@given(samples, st.integers(1, 5))
def test_every_sample_stands_once_within_budget_and_kind(items: list[tuple[int, bool]], data_ranks: int) -> None:
    tokens, routed = [t for t, _ in items], [r for _, r in items]
    placed = place(tokens, routed, data_ranks=data_ranks, tokens_max=100)
    assert len(placed) == data_ranks
    assert sorted(i for rank in placed for batch in rank for i in batch) == list(range(len(items)))
    assert len({len(rank) for rank in placed}) == 1
    for batch in (b for rank in placed for b in rank):
        assert sum(tokens[i] for i in batch) <= 100
        assert len({routed[i] for i in batch}) <= 1


@given(samples, st.integers(1, 5))
def test_rank_loads_differ_by_at_most_the_largest_sample(items: list[tuple[int, bool]], data_ranks: int) -> None:
    tokens = [t for t, _ in items]
    loads = [
        sum(tokens[i] for b in rank for i in b) for rank in place(tokens, [r for _, r in items], data_ranks=data_ranks, tokens_max=100)
    ]
    assert max(loads) - min(loads) <= max(tokens, default=0)


@given(samples, st.integers(1, 5))
def test_a_dummy_stands_only_where_no_micro_batch_of_its_rank_can_be_split(items: list[tuple[int, bool]], data_ranks: int) -> None:
    for rank in place([t for t, _ in items], [r for _, r in items], data_ranks=data_ranks, tokens_max=100):
        if [] in rank:
            assert all(len(batch) <= 1 for batch in rank)
