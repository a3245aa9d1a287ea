"""SGLang's reply, by hand as its server writes it, and how forms are told apart."""

import base64
import json
from typing import Any

import numpy as np
import pytest

from fsref.errors import WireError
from fsref.wire.forms import Form, decode_reply, detect
from fsref.wire.modelconfig import ModelShape
from fsref.wire.sglang import decode_flat_routed_experts, decode_sglang, encode_flat_routed_experts
from tests.wire.recorded import FOLDER, TINY, load, start_of

MODEL = ModelShape(layer_ids=(1, 2), layer_count=3, top_k=2, expert_count=8, vocab_count=100)
ROWS = np.asarray([[[1, 2], [3, 4]], [[5, 6], [7, 0]], [[2, 1], [4, 3]], [[6, 5], [0, 7]]])
"""Four rows, two routing layers, two experts of eight."""


def reply(**meta: Any) -> dict[str, Any]:
    """Three prompt tokens, two sampled ones."""
    return {
        "text": "",
        "output_ids": [40, 41],
        "meta_info": {
            "finish_reason": {"type": "length", "length": 2},
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "output_token_logprobs": [[-0.5, 40, None], [-1.5, 41, None]],
            "output_top_logprobs": [[[-0.25, 7, None], [-0.5, 40, None]], [[-1.5, 41, None]]],
            "output_token_sampling_mask": [[7, 40], [41]],
            "routed_experts": encode_flat_routed_experts(ROWS),
            **meta,
        },
    }


@pytest.mark.payload("A4")
def test_every_array_of_a_reply_is_read() -> None:
    got = decode_sglang(reply(), prompt_count=3, model=MODEL)
    assert got.routing is not None
    assert got.routing.start == 0
    assert got.routing.rows.tolist() == ROWS.tolist()
    assert got.routing.rows.dtype == np.uint8
    assert got.logprobs is not None
    assert got.logprobs.tolist() == [-0.5, -1.5]
    assert got.top_logprobs is not None
    assert (got.top_logprobs.counts.tolist(), got.top_logprobs.columns["ids"].tolist()) == ([2, 1], [7, 40, 41])
    assert got.sampling_mask is not None
    assert got.sampling_mask.columns["ids"].tolist() == [7, 40, 41]
    assert got.sampling_mask.row_columns["flags"].tolist() == [0, 0]
    assert got.finish_reason == "length"


@pytest.mark.payload("A4", "A5")
def test_the_start_is_the_requests_and_a_reply_that_says_another_is_refused() -> None:
    sent = reply(routed_experts=encode_flat_routed_experts(ROWS[2:]), routed_experts_start_len=2)
    got = decode_sglang(sent, prompt_count=3, start=2, model=MODEL)
    assert got.routing is not None
    assert (got.routing.start, got.routing.rows.tolist()) == (2, ROWS[2:].tolist())
    with pytest.raises(WireError, match="routed_experts_start_len is 2, 1 by the request"):
        decode_sglang(sent, prompt_count=3, start=1, model=MODEL)
    with pytest.raises(WireError, match="32 bytes of int32 found, none of: 4 rows of 3 layers or 5 rows of 3 layers"):
        decode_sglang({**sent, "meta_info": {**sent["meta_info"], "routed_experts_start_len": None}}, prompt_count=3, model=MODEL)


@pytest.mark.payload("C2")
def test_rows_of_all_layers_are_cut_to_those_that_route() -> None:
    every = np.concatenate([np.zeros((4, 1, 2), np.int64), ROWS], axis=1)
    got = decode_sglang(reply(routed_experts=encode_flat_routed_experts(every)), prompt_count=3, model=MODEL)
    assert got.routing is not None
    assert got.routing.rows.tolist() == ROWS.tolist()


@pytest.mark.payload("B16")
def test_bytes_that_two_shapes_account_for_are_refused() -> None:
    model = ModelShape(layer_ids=(1, 2, 3), layer_count=4, top_k=2, expert_count=8, vocab_count=100)
    with pytest.raises(WireError, match="several of: 3 rows of 4 layers or 4 rows of 4 layers or 3 rows of 3 layers or 4 rows of 3"):
        decode_flat_routed_experts(encode_flat_routed_experts(np.ones((3, 4, 2))), start=0, token_count=4, model=model)


@pytest.mark.payload("A7", "A15")
def test_an_empty_or_absent_array_is_legal() -> None:
    assert decode_flat_routed_experts(None, start=0, token_count=3, model=MODEL) is None
    got = decode_flat_routed_experts("", start=2, token_count=3, model=MODEL)
    assert got is not None
    assert got.rows.shape == (0, 2, 2)
    aborted = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "prompt_tokens": 3, "completion_tokens": 0}}
    choice = decode_sglang(aborted, prompt_count=3, model=MODEL)
    assert (choice.routing, choice.finish_reason, len(choice.token_ids)) == (None, "abort", 0)


@pytest.mark.payload("E4", "E8")
def test_flags_tell_truncated_and_full_supports_apart() -> None:
    sent = reply(output_token_sampling_mask=[[7, 40], []], output_token_sampling_mask_truncated=[True, False])
    mask = decode_sglang(sent, prompt_count=3, model=MODEL).sampling_mask
    assert mask is not None
    assert mask.row_columns["flags"].tolist() == [2, 1]
    with pytest.raises(WireError, match="one bool per row"):
        decode_sglang(reply(output_token_sampling_mask_truncated=[1, 0]), prompt_count=3, model=MODEL)


@pytest.mark.parametrize(
    ("meta", "word"),
    [
        ({"prompt_tokens": 4}, "prompt_tokens is 4, 3 by"),
        ({"completion_tokens": 1}, "completion_tokens is 1, 2 by"),
        ({"routed_experts": base64.b64encode(b"123").decode()}, "3 bytes of int32 found"),
        ({"routed_experts": encode_flat_routed_experts(ROWS - 1)}, "expert id -1"),
        ({"routed_experts": encode_flat_routed_experts(ROWS + 1)}, "expert id 8 found, the model has 8"),
        ({"routed_experts": encode_flat_routed_experts(ROWS * [[1], [0]])}, "layer 2 are 0"),
        ({"output_token_logprobs": [[-0.5, 40, None]]}, "a list of 2 entries"),
        ({"output_token_logprobs": [[-0.5, 40, None], [None, 41, None]]}, "logprob None"),
        ({"output_token_logprobs": [[-0.5, 40, None], [-0.5, 42, None]]}, "token id 42 found"),
        ({"output_top_logprobs": [[]]}, "a list of 2 lists"),
        ({"output_top_logprobs": [[7], [8]]}, "a logprob is"),
        ({"output_token_sampling_mask": [[7], [41]]}, "sampled token 40 is not among"),
    ],
)
def test_wrong_replies_are_refused(meta: dict[str, Any], word: str) -> None:
    with pytest.raises(WireError, match=word):
        decode_sglang(reply(**meta), prompt_count=3, model=MODEL)


CASES = sorted(p.relative_to(FOLDER).as_posix() for p in FOLDER.glob("*/*.json"))


def test_every_form_has_a_case() -> None:
    assert {detect(json.loads((FOLDER / c).read_text())["response"]) for c in CASES} >= {Form.VLLM_0_32, Form.PRIME_RL, Form.SGLANG}
    assert detect(load("single_turn")["response"]) is Form.VLLM_0_27


@pytest.mark.parametrize("case", CASES)
def test_the_same_arrays_come_out_of_every_form(case: str) -> None:
    wanted = load("top_logprobs_8")
    reference = decode_reply(wanted["response"], prompt_count=len(wanted["request"]["token_ids"]), start=start_of(wanted), model=TINY)[0]
    found = json.loads((FOLDER / case).read_text())
    got = decode_reply(found["response"], prompt_count=len(found["request"]["token_ids"]), start=found["start"], model=TINY)[0]
    assert got.token_ids.tolist() == reference.token_ids.tolist()
    assert got.routing is not None
    assert reference.routing is not None
    assert got.routing.start == found["start"]
    np.testing.assert_array_equal(got.routing.rows, reference.routing.rows[found["start"] :])
    assert got.routing.rows.dtype == np.uint8
    np.testing.assert_array_equal(got.logprobs, reference.logprobs)
    assert got.top_logprobs is not None
    assert reference.top_logprobs is not None
    assert got.top_logprobs.columns["ids"].tolist() == reference.top_logprobs.columns["ids"].tolist()
    assert got.sampling_mask is not None
    assert [len(m) for m in found["mask"]] == got.sampling_mask.counts.tolist()
    assert got.sampling_mask.columns["ids"].tolist() == [i for m in found["mask"] for i in m]


@pytest.mark.parametrize("unknown", [{}, {"choices": []}, {"choices": [{"text": "hi"}]}, {"output_ids": [1]}, "text", None, [], 7])
def test_an_unknown_form_says_what_was_found_what_is_known_and_what_to_do(unknown: Any) -> None:
    with pytest.raises(WireError, match=r"no known form: .* found; known are vLLM 0.27 .*SGLang generate.*recorded reply"):
        detect(unknown)
