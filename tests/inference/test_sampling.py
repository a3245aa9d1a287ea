"""Truncation, processed logprobs and draws, on logits with the right answers written down."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from fsref.inference.sampling import Drawn, Sampling, draw, heads_sampled_first

PROBS = [0.05, 0.4, 0.1, 0.3, 0.15]
"""Descending: tokens 1, 3, 4, 2, 0."""
LOGITS = torch.tensor([PROBS]).log()


def sampling(**over: Any) -> Sampling:
    return Sampling(**{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "head": None, **over})


def kept(drawn: Drawn, row: int = 0) -> list[int]:
    ids: list[int] = drawn.top_ids[row, : drawn.kept[row]].tolist()
    return ids


@pytest.mark.parametrize(
    ("over", "want"),
    [
        ({}, [1, 3, 4, 2, 0]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [1, 3, 4, 2, 0]),
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.71}, [1, 3, 4]),
        ({"top_p": 0.01}, [1]),
        ({"min_p": 0.3}, [1, 3, 4]),  # at least 0.3 of the best one's 0.4
        ({"min_p": 1.0}, [1]),
        ({"top_k": 3, "top_p": 0.8}, [1, 3]),  # of 0.85 the first two are 0.82
        ({"top_k": 4, "min_p": 0.3, "top_p": 0.99}, [1, 3, 4]),
        ({"temperature": 0.5, "top_p": 0.87}, [1, 3]),  # the squares are 0.561, 0.316, ... of their sum
    ],
)
def test_kept_sets(over: dict[str, Any], want: list[int]) -> None:
    assert kept(draw(LOGITS, [sampling(**over)], [0.0])) == want


def test_logprobs_are_of_the_renormalised_kept_set_after_temperature() -> None:
    drawn = draw(LOGITS, [sampling(top_k=2, head=4, temperature=0.5)], [0.99])
    squares = np.asarray([0.16, 0.09])
    want = np.log(squares / squares.sum())
    np.testing.assert_allclose(drawn.top_logprobs[0, :2], want, rtol=1e-5)
    assert np.all(np.isneginf(drawn.top_logprobs[0, 2:]))
    assert drawn.ids.tolist() == [3]
    assert drawn.ranks.tolist() == [2]
    np.testing.assert_allclose(drawn.logprobs, want[1:], rtol=1e-5)


def test_a_grid_of_uniforms_draws_each_token_as_often_as_it_is_probable() -> None:
    grid = [(i + 0.5) / 200 for i in range(200)]
    ids = draw(LOGITS.expand(200, 5), [sampling()] * 200, grid).ids
    assert np.bincount(ids, minlength=5).tolist() == [10, 80, 20, 60, 30]


@pytest.mark.parametrize("top_k", [0, 3])
def test_the_largest_uniform_never_leaves_the_kept_set(top_k: int) -> None:
    flat = torch.zeros(1, 4096)
    drawn = draw(flat, [sampling(top_k=top_k)], [math.nextafter(1.0, 0.0)])
    assert drawn.ids[0] in drawn.top_ids[0, : drawn.kept[0]]
    assert np.isfinite(drawn.logprobs[0])


def test_greedy_takes_the_best_token_and_truncates_nothing() -> None:
    greedy = sampling(temperature=0.0, top_k=2, top_p=0.1)
    drawn = draw(LOGITS, [greedy], [0.99])
    assert drawn.ids.tolist() == [1]
    assert not greedy.truncates
    np.testing.assert_allclose(drawn.logprobs, [math.log(0.4)], rtol=1e-5)


def test_sequences_in_one_batch_keep_their_own_rules() -> None:
    rules = [sampling(top_k=2), sampling(), sampling(temperature=0.0), sampling(top_p=0.5)]
    drawn = draw(LOGITS.expand(4, 5), rules, [0.99, 0.99, 0.99, 0.99])
    assert drawn.ids.tolist() == [3, 0, 1, 3]
    assert drawn.kept.tolist() == [2, 5, 5, 2]
    alone = [draw(LOGITS, [r], [0.99]) for r in rules]
    np.testing.assert_allclose(drawn.logprobs, np.concatenate([a.logprobs for a in alone]), rtol=1e-6)


def test_a_head_wider_than_the_kept_set_shows_what_was_removed() -> None:
    drawn = draw(LOGITS, [sampling(top_k=2, head=3)], [0.0])
    assert drawn.top_ids.shape == (1, 3)
    assert drawn.top_ids[0, 2] == 4
    assert np.isneginf(drawn.top_logprobs[0, 2])


def test_the_sampled_token_comes_first_and_pushes_out_the_last_only_if_it_is_outside() -> None:
    top_ids = np.asarray([[5, 3, 8], [5, 3, 8], [5, 3, 8]])
    top_logprobs = np.asarray([[-1.0, -2.0, -3.0]] * 3, np.float32)
    ids, logprobs = heads_sampled_first(top_ids, top_logprobs, np.asarray([3, 9, 5]), np.asarray([-2.0, -7.0, -1.0], np.float32))
    assert ids.tolist() == [[3, 5, 8], [9, 5, 3], [5, 3, 8]]
    assert logprobs.tolist() == [[-2.0, -1.0, -3.0], [-7.0, -1.0, -2.0], [-1.0, -2.0, -3.0]]
