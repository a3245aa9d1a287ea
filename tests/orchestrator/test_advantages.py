"""Group-relative advantages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsref.orchestrator.advantages import group_advantages, has_spread, shuffled

rewards = st.lists(st.floats(-10, 10), min_size=1, max_size=16)


def test_advantages_are_rewards_minus_their_mean() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 3.0], normalise=False) == [0.0, -1.0, -1.0, 2.0]


def test_normalised_advantages_are_divided_by_the_population_deviation() -> None:
    assert group_advantages([1.0, 3.0], normalise=True) == [-1.0, 1.0]
    assert group_advantages([0.0, 0.0, 0.0, 4.0], normalise=True) == pytest.approx([-(3**-0.5)] * 3 + [3**0.5])


def test_a_group_of_equal_rewards_has_exactly_zero_advantages() -> None:
    # 0.1 * 3 != 0.3 in binary: the mean alone would leave a rest that normalising blows up to 1.
    assert group_advantages([0.1, 0.1, 0.1], normalise=True) == [0.0, 0.0, 0.0]
    assert not has_spread([0.1, 0.1 + 1e-9])
    assert not has_spread([])


@given(rewards, st.booleans())
def test_advantages_sum_to_zero(values: list[float], normalise: bool) -> None:
    assert sum(group_advantages(values, normalise=normalise)) == pytest.approx(0, abs=1e-6)


@given(rewards, st.floats(-5, 5))
def test_a_shift_of_all_rewards_changes_nothing(values: list[float], shift: float) -> None:
    if has_spread(values) != has_spread([v + shift for v in values]):
        return  # at the threshold itself rounding decides
    plain = group_advantages(values, normalise=False)
    assert group_advantages([v + shift for v in values], normalise=False) == pytest.approx(plain, abs=1e-9)


@given(st.lists(st.integers()), st.integers(0, 5), st.integers(0, 5))
def test_a_shuffle_permutes_and_repeats(values: list[int], seed: int, step: int) -> None:
    assert sorted(shuffled(values, seed=seed, step=step)) == sorted(values)
    assert shuffled(values, seed=seed, step=step) == shuffled(values, seed=seed, step=step)


def test_two_steps_shuffle_differently() -> None:
    assert shuffled(range(20), seed=1, step=0) != shuffled(range(20), seed=1, step=1)
