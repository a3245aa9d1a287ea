"""Arrays of a ``RequestOutput`` in this process: positions, heads, and what is refused."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fsref.errors import WireError
from fsref.refs import Dense, Ragged, Schema, TokenRange, routed_experts, sampling_mask, top_logprobs
from fsref.wire.modelconfig import ModelShape
from fsref.wire.outputs import payload_from_output

MODEL = ModelShape(layer_ids=(0, 2), layer_count=3, top_k=2, expert_count=8, vocab_count=100)
SCHEMA = Schema((routed_experts(layer_ids=(0, 2), top_k=2, expert_count=8), top_logprobs(), sampling_mask()))
ROWS = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2) % 8
"""For three tokens of prompt and two sampled: the last one has no row."""


def lp(value: float) -> Any:
    return SimpleNamespace(logprob=value, rank=1, decoded_token=None)


def output(**changes: Any) -> Any:
    completion = SimpleNamespace(
        **{
            "token_ids": [7, 9],
            "logprobs": [{7: lp(-2.5), 4: lp(-0.5), 3: lp(-1.5), 8: lp(-3.0)}, {9: lp(-0.1), 1: lp(-2.0), 2: lp(float("-inf"))}],
            "routed_experts": ROWS,
            "finish_reason": "length",
            **changes,
        }
    )
    return SimpleNamespace(prompt_token_ids=[5, 6, 5], outputs=[completion])


def dense(data: Any) -> Dense:
    assert isinstance(data, Dense)
    return data


def ragged(data: Any) -> Ragged:
    assert isinstance(data, Ragged)
    return data


@pytest.mark.payload("A1", "C1", "C2")
def test_rows_stand_at_their_tokens_and_the_last_sampled_one_is_missing() -> None:
    payload = payload_from_output(output(), schema=SCHEMA, model=MODEL)
    assert payload.token_ids.tolist() == [5, 6, 5, 7, 9]
    routing = dense(payload.fields["routed_experts"])
    np.testing.assert_array_equal(routing.rows[:4], ROWS[:, (0, 2)])
    assert routing.missing == (TokenRange(4, 5),)
    assert routing.rows.dtype == np.uint8


@pytest.mark.payload("A4")
def test_rows_from_a_start_on_leave_the_earlier_ones_missing() -> None:
    payload = payload_from_output(output(routed_experts=ROWS[3:]), schema=SCHEMA, model=MODEL, start=3)
    routing = dense(payload.fields["routed_experts"])
    assert routing.missing == (TokenRange(0, 3), TokenRange(4, 5))
    np.testing.assert_array_equal(routing.rows[3], ROWS[3, (0, 2)])


@pytest.mark.payload("A20", "E10")
def test_heads_are_the_most_probable_whether_sampled_or_not_and_stand_at_the_sampled_tokens() -> None:
    head = ragged(payload_from_output(output(), schema=SCHEMA, model=MODEL, head=2).fields["top_logprobs"])
    assert head.counts.tolist() == [0, 0, 0, 2, 2]
    assert head.columns["ids"].tolist() == [4, 3, 9, 1]
    np.testing.assert_array_equal(head.columns["logprobs"], np.asarray([-0.5, -1.5, -0.1, -2.0], np.float32))


def test_masks_stand_at_the_sampled_tokens() -> None:
    mask = ragged(payload_from_output(output(sampling_mask=[[4, 7], [9]]), schema=SCHEMA, model=MODEL).fields["sampling_mask"])
    assert mask.counts.tolist() == [0, 0, 0, 2, 1]
    assert mask.columns["ids"].tolist() == [4, 7, 9]


@pytest.mark.payload("A14")
def test_what_the_engine_did_not_return_is_absent_not_zero() -> None:
    payload = payload_from_output(output(routed_experts=None, logprobs=None), schema=SCHEMA, model=MODEL)
    assert dict(payload.fields) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"finish_reason": None}, "not finished"),
        ({"routed_experts": ROWS[:3]}, "3 rows found for 5 tokens"),
        ({"routed_experts": ROWS + 1}, "expert id"),
        ({"logprobs": [{7: lp(-1.0)}]}, "1 entries found for 2"),
        ({"logprobs": [{7: lp(-1.0)}, {8: lp(-1.0)}]}, "sampled token 9"),
        ({"logprobs": [{7: lp(-1.0)}, {9: lp(float("nan"))}]}, "nan"),
        ({"sampling_mask": [[4], [9]]}, "sampled token 7"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=message):
        payload_from_output(output(**changes), schema=SCHEMA, model=MODEL)


def test_a_completion_that_is_not_there_is_named() -> None:
    with pytest.raises(WireError, match="completion 1 was asked for, the output has 1"):
        payload_from_output(output(), 1, schema=SCHEMA)
