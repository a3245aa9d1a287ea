"""What of vLLM's request is understood, and what is refused by name."""

import json
from typing import Any

import pytest

from fsref.inference.engine import Request
from fsref.inference.protocol import BadRequest, Limits, NoSuchModel, engine_requests, error_body, parse_generate

LIMITS = Limits(model="policy", context_max=64, vocab_count=512, logprobs_max=20, eos_token_id=2)


def parsed(prompt_count: int = 5, **params: Any) -> list[Request]:
    body = json.dumps({"model": "policy", "token_ids": list(range(prompt_count)), "sampling_params": params}).encode()
    return engine_requests(parse_generate(body, LIMITS), LIMITS, seed=1000)


def test_what_verifiers_train_client_sends_is_understood() -> None:
    (request,) = parsed(
        top_k=-1,
        min_p=0.0,
        temperature=1.0,
        top_p=0.9,
        max_tokens=8,
        logprobs=10,
        stop_token_ids=[2, 0],
        skip_special_tokens=False,
        extra_args={"prl_compact_logprobs": True},
        routed_experts_prompt_start=4,
    )
    assert (request.sampling.top_k, request.sampling.top_p, request.sampling.head) == (0, 0.9, 10)
    assert (request.tokens_max, request.start, sorted(request.stop_ids)) == (8, 4, [0, 2])


def test_defaults_are_vllms() -> None:
    (request,) = parsed()
    assert (request.tokens_max, request.sampling.temperature, request.sampling.head, list(request.stop_ids)) == (16, 1.0, None, [2])


def test_a_completion_is_cut_to_the_context() -> None:
    assert parsed(60, max_tokens=16)[0].tokens_max == 4
    assert parsed(5, max_tokens=None)[0].tokens_max == 59


def test_ignore_eos_leaves_the_other_stop_tokens() -> None:
    assert parsed(ignore_eos=True, stop_token_ids=[7])[0].stop_ids == {7}


def test_choices_draw_by_consecutive_seeds() -> None:
    assert [r.seed for r in parsed(n=3)] == [1000, 1001, 1002]
    assert [r.seed for r in parsed(n=2, seed=7)] == [7, 8]


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"routed_experts_prompt_start": 6}, r"6 is not in 0\.\.5"),
        ({"routed_experts_prompt_start": -1}, r"-1 is not in 0\.\.5"),
        ({"logprobs": 21}, "21, which is greater than max allowed: 20"),
        ({"logprobs": -1}, "logprobs"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, r"\$\.sampling_params\.n"),
        ({"n": 65}, r"\$\.sampling_params\.n"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"presence_penalty": 0.5}, "presence_penalty = 0.5 is not supported"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"stop": ["x"]}, "stop"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"tempreature": 1.0}, "tempreature"),
    ],
)
def test_parameters_out_of_bounds_or_not_implemented_are_refused_by_name(params: dict[str, Any], word: str) -> None:
    with pytest.raises(BadRequest, match=word):
        parsed(**params)


def test_neutral_values_of_what_is_not_implemented_pass() -> None:
    assert parsed(presence_penalty=0, frequency_penalty=0.0, repetition_penalty=1.0, min_tokens=0, stop=[], logit_bias=None)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"[]", "object"),
        (b'{"token_ids": [1]}', "sampling_params"),
        (b'{"token_ids": [], "sampling_params": {}}', "token_ids"),
        (b'{"token_ids": [-1], "sampling_params": {}}', "token_ids"),
        (b'{"token_ids": [1.5], "sampling_params": {}}', "token_ids"),
        (b'{"token_ids": [512], "sampling_params": {}}', "512 is out of vocabulary"),
        (json.dumps({"token_ids": [1] * 64, "sampling_params": {}}).encode(), "64 tokens"),
        (b'{"token_ids": [1], "sampling_params": {}, "stream": true}', "stream"),
        (b'{"token_ids": [1], "sampling_params": {}, "content_parts": [{}]}', "content_parts"),
    ],
)
def test_bodies_that_are_no_request_are_refused(body: bytes, word: str) -> None:
    with pytest.raises(BadRequest, match=word):
        parse_generate(body, LIMITS)


def test_another_model_is_not_found() -> None:
    with pytest.raises(NoSuchModel, match="`x` does not exist; this server has `policy`") as caught:
        parse_generate(b'{"model": "x", "token_ids": [1], "sampling_params": {}}', LIMITS)
    assert caught.value.status == 404


def test_errors_have_vllms_body() -> None:
    assert json.loads(error_body("no", "BadRequestError", 400)) == {
        "error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}
    }
