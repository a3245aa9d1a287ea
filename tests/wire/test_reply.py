"""A whole choice in vLLM 0.32's form, written by hand with the right values."""

import base64
from typing import Any

import numpy as np
import pytest

from fsref.errors import WireError
from fsref.wire.modelconfig import ModelShape
from fsref.wire.npy import encode_npy
from fsref.wire.reply import decode_choice
from tests.wire.recorded import NAMES, choices, load

SHAPE = ModelShape(layer_ids=(1,), layer_count=2, top_k=2, expert_count=4, vocab_count=16)
ROWS = np.array([[[1, 0]], [[2, 3]], [[0, 1]]], dtype=np.int32)


def choice(**over: Any) -> dict[str, Any]:
    """Three prompt tokens, two sampled (7, then 2), asked with start = 1, logprobs = 3, top_k = 2."""
    return {
        "index": 0,
        "token_ids": [7, 2],
        "finish_reason": "stop",
        "logprobs": {
            "content": [
                {
                    "token_id": 7,
                    "logprob": -1.5,
                    "rank": 2,
                    "top_logprobs": [
                        {"token_id": 7, "logprob": -1.5},
                        {"token_id": 9, "logprob": -0.25},
                        {"token_id": 1, "logprob": -9999.0},
                    ],
                },
                {"token_id": 2, "logprob": 0.0, "rank": 1, "top_logprobs": [{"token_id": 2, "logprob": 0}]},
            ]
        },
        "routed_experts": base64.b64encode(encode_npy(ROWS)).decode(),
        "sampling_mask": [[9, 7], [2]],
        **over,
    }


def test_every_array_of_a_0_32_choice_is_read() -> None:
    got = decode_choice(choice(), prompt_count=3, start=1, head=2, model=SHAPE)
    assert got.token_ids.tolist() == [7, 2]
    assert got.finish_reason == "stop"
    assert got.logprobs is not None
    assert got.logprobs.tolist() == [-1.5, 0.0]
    assert got.routing is not None
    assert got.routing.start == 1
    assert got.routing.rows.dtype == np.uint8
    assert got.routing.rows.tolist() == ROWS.tolist()
    assert got.top_logprobs is not None
    assert got.top_logprobs.counts.tolist() == [2, 1]
    assert got.top_logprobs.columns["ids"].tolist() == [9, 7, 2]
    assert got.sampling_mask is not None
    assert got.sampling_mask.columns["ids"].tolist() == [9, 7, 2]


def test_what_the_engine_did_not_send_is_none() -> None:
    got = decode_choice({"index": 0, "token_ids": [7]}, prompt_count=3)
    assert (got.logprobs, got.routing, got.top_logprobs, got.sampling_mask) == (None, None, None, None)


@pytest.mark.parametrize("name", NAMES)
def test_recorded_choices_carry_their_tokens(name: str) -> None:
    sent = load(name)["response"]["choices"]
    assert [c.token_ids.tolist() for c in choices(name)] == [c["token_ids"] for c in sent]
    assert all(c.sampling_mask is None for c in choices(name))


@pytest.mark.parametrize(
    "over",
    [
        {"token_ids": None},
        {"token_ids": [7, -2]},
        {"token_ids": [7, "2"]},
        {"token_ids": [7, 1 << 31]},
        {"token_ids": [7]},
        {"index": -1},
        {"index": "0"},
        {"logprobs": 3},
        {"sampling_mask": [[9, 7]]},
        {"routed_experts": base64.b64encode(encode_npy(ROWS[:1])).decode()},
    ],
)
def test_a_choice_that_contradicts_itself_is_refused(over: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        decode_choice(choice(**over), prompt_count=3, start=1, model=SHAPE)


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_a_choice_is_an_object(value: Any) -> None:
    with pytest.raises(WireError, match="object expected"):
        decode_choice(value, prompt_count=3)
