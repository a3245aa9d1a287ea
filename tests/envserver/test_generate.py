"""Taking arrays out of engine replies: what the engine is asked, what goes on, what is remembered."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import renderers.client

from fsref.envserver.capture import Capture
from fsref.envserver.generate import Adapter
from fsref.errors import WireError
from fsref.refs import Dense, Lints, Ragged
from tests.envserver.engine import Engine, Seen, _compact, head_of, routing_of

TRACE = "t"


class Http:
    """As much of an OpenAI client as is used; answers as the engine would."""

    base_url = "http://127.0.0.1:1/v1"

    def __init__(self, engine: Engine, damage: bytes | None = None) -> None:
        self.engine, self.damage = engine, damage
        self.bodies: list[dict[str, Any]] = []

    async def get(self, path: str, **_: Any) -> Any:
        return {"data": [{"id": "policy", "max_model_len": 1000}]} if path == "/models" else None

    async def post(self, endpoint: str, *, body: dict[str, Any], **_: Any) -> Any:
        assert endpoint.endswith("/inference/v1/generate")
        self.bodies.append(body)
        seen = Seen(body["token_ids"], body["sampling_params"])
        seen.completion_ids = [80, 81, 2]
        reply = _compact({"request_id": "r", "choices": [self.engine._choice(seen)]}).encode()
        return type("Response", (), {"content": self.damage if self.damage is not None else reply})


class Renderer:
    """Parses nothing."""

    supports_tools = True

    def get_stop_token_ids(self) -> list[int]:
        return [2]

    def parse_response(self, token_ids: list[int], **_: Any) -> Any:
        return type("Parsed", (), {"content": str(token_ids), "reasoning_content": "", "tool_calls": [], "reasoning_complete": True})


def ask(http: Http, capture: Capture, *, prompt: list[int], **sampling: Any) -> dict[str, Any]:
    """Through the real ``renderers.client.generate`` with the adapter installed."""
    with ThreadPoolExecutor(1) as pool:
        undo = Adapter(capture=capture, executor=pool, model=None).install()
        try:
            result = asyncio.run(
                renderers.client.generate(
                    client=http,
                    renderer=Renderer(),
                    messages=[],
                    model="policy",
                    prompt_ids=prompt,
                    sampling_params={"max_tokens": 3, **sampling},
                    extra_headers={"X-Session-ID": TRACE},
                )
            )
        finally:
            undo()
    assert isinstance(result, dict)
    return result


@pytest.fixture
def capture() -> Capture:
    out = Capture()
    out.open(TRACE)
    return out


@pytest.fixture
def http() -> Http:
    return Http(Engine())


def test_renderers_sees_tokens_and_logprobs_and_no_array(http: Http, capture: Capture) -> None:
    result = ask(http, capture, prompt=[5, 6, 7], logprobs=2)
    assert result["completion_ids"] == [80, 81, 2]
    np.testing.assert_array_equal(result["completion_logprobs"], np.full(3, -9.0, np.float32))
    assert result["weight_versions"] == [{"version": "7", "start": 0, "end": 3}]
    for name in ("routed_experts", "sampling_mask", "completion_top_ids", "completion_top_logprobs"):
        assert result[name] is None


def test_the_arrays_are_remembered_for_the_trace(http: Http, capture: Capture) -> None:
    ask(http, capture, prompt=[5, 6, 7], logprobs=2)
    ids = np.asarray([5, 6, 7, 80, 81, 2], np.int32)
    fields = capture.fields(TRACE, token_ids=ids, sampled=np.arange(6) >= 3)
    dense, heads = fields["routed_experts"], fields["top_logprobs"]
    assert isinstance(dense, Dense)
    assert isinstance(heads, Ragged)
    np.testing.assert_array_equal(dense.rows[:5], routing_of(ids)[:5])
    assert heads.columns["ids"].tolist() == [i for p in (3, 4, 5) for i, _ in head_of(ids, p, 2)]


def test_two_more_candidates_are_asked_for_than_the_head_keeps(http: Http, capture: Capture) -> None:
    ask(http, capture, prompt=[5, 6], logprobs=2)
    ask(http, capture, prompt=[5, 6])
    assert [b["sampling_params"]["logprobs"] for b in http.bodies] == [4, 1]


@pytest.mark.parametrize(("start", "asked"), [(1, 1), (3, 2), (99, 2)])
def test_a_start_behind_the_prompt_never_reaches_the_engine(http: Http, capture: Capture, start: int, asked: int) -> None:
    ask(http, capture, prompt=[5, 6, 7], routed_experts_prompt_start=start)
    assert http.bodies[0]["sampling_params"]["routed_experts_prompt_start"] == asked


@pytest.mark.parametrize(
    "reply", [b"<html>", b"{}", b'{"choices":[]}', b'{"choices":[{"token_ids":5}]}', b'{"choices":[{"routed_experts":"abc']
)
def test_a_reply_that_is_none_fails_the_request_and_is_remembered(capture: Capture, reply: bytes) -> None:
    with pytest.raises(WireError) as found:
        ask(Http(Engine(), reply), capture, prompt=[5, 6])
    assert capture.failure(TRACE) is found.value


def test_a_reply_of_several_choices_is_refused_because_verifiers_would_read_the_first_only(capture: Capture) -> None:
    choice = Engine()._choice(Seen([5, 6], {"max_tokens": 3}, [80, 81, 2]))
    reply = json.dumps({"request_id": "r", "choices": [choice, choice]}).encode()
    with pytest.raises(WireError, match=r"2 choices, verifiers reads one: ask once per sample"):
        ask(Http(Engine(), reply), capture, prompt=[5, 6])


def test_an_engine_that_spells_its_json_with_spaces_is_read(capture: Capture) -> None:
    engine = Engine()
    seen = Seen([5, 6], {"max_tokens": 3}, [80, 81, 2])
    spaced = json.dumps({"request_id": "r", "choices": [engine._choice(seen)]}, indent=1).encode()
    ask(Http(engine, spaced), capture, prompt=[5, 6])
    ids = np.asarray([5, 6, 80, 81, 2], np.int32)
    assert "routed_experts" in capture.fields(TRACE, token_ids=ids, sampled=np.arange(5) >= 2)


def test_replies_are_decoded_outside_the_event_loop(http: Http, capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    monkeypatch.setattr("fsref.envserver.generate.decode_routed_experts", lambda *_a, **_k: threads.append(threading.current_thread().name))
    ask(http, capture, prompt=[5, 6])
    assert threads
    assert threading.main_thread().name not in threads


@pytest.mark.payload("E3")
def test_what_a_lint_refuses_fails_the_request_and_what_it_warns_of_passes(capture: Capture) -> None:
    choice = {"index": 0, "token_ids": [7], "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}]}, "sampling_mask": [[5, 6]]}
    raw = json.dumps({"choices": [choice]}).encode()
    body = {"token_ids": [1, 2], "sampling_params": {}}
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(WireError, match="sampled token 7 is not among"):
            Adapter(capture, pool, None).read(raw, body, trace_id=None, head=None)
        Adapter(capture, pool, None, (), Lints(sampled_outside="warn")).read(raw, body, trace_id=None, head=None)
