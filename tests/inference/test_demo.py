"""The HTTP application in front of an engine, in this process."""

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from fsref.inference.demo import DemoServer, version_of
from fsref.inference.engine import Engine
from fsref.inference.protocol import Limits
from fsref.wire.modelconfig import read_model_shape
from fsref.wire.reply import Choice, decode_choice

PROMPT = [5, 300, 17, 44, 9]
LIMITS = Limits(model="policy", context_max=256, vocab_count=512, logprobs_max=20, eos_token_id=2)
Use = Callable[[httpx.AsyncClient], Awaitable[Any]]


def server(engine: Engine, folder: Path, **over: Any) -> DemoServer:
    return DemoServer(engine, LIMITS, folder=folder, dtype=torch.float32, seed=1, **over)


def ask(demo: DemoServer, use: Use) -> Any:
    """Runs ``use`` with a client of the application."""

    async def run() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(demo.app), base_url="http://demo") as client:
            return await use(client)

    return asyncio.run(run())


def generate(demo: DemoServer, prompt: list[int] = PROMPT, **params: Any) -> httpx.Response:
    body = {"model": "policy", "token_ids": prompt, "sampling_params": {"max_tokens": 6, "ignore_eos": True, "seed": 3, **params}}
    got = ask(demo, lambda c: c.post("/inference/v1/generate", json=body))
    assert isinstance(got, httpx.Response)
    return got


def choices(response: httpx.Response, folder: Path, *, start: int = 0, head: int | None = None) -> list[Choice]:
    assert response.status_code == 200, response.text
    model = read_model_shape(folder)
    return [decode_choice(c, prompt_count=len(PROMPT), start=start, head=head, model=model) for c in response.json()["choices"]]


def test_a_reply_carries_every_array_in_the_native_form(engine: Engine, model_folder: Path) -> None:
    response = generate(server(engine, model_folder), top_k=4, logprobs=6, routed_experts_prompt_start=3)
    (choice,) = choices(response, model_folder, start=3, head=4)
    assert choice.token_ids.shape == (6,)
    assert choice.finish_reason == "length"
    assert choice.routing is not None
    assert choice.routing.rows.shape == (5 + 6 - 1 - 3, 2, 2)
    assert choice.sampling_mask is not None
    assert choice.sampling_mask.counts.tolist() == [4] * 6
    assert choice.top_logprobs is not None
    assert choice.top_logprobs.counts.tolist() == [4] * 6
    raw = response.json()
    assert isinstance(raw["choices"][0]["routed_experts"], str)
    assert raw["choices"][0]["logprobs"]["content"][0]["token_id"] == choice.token_ids[0]
    assert raw["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    assert raw["choices"][0]["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]


def test_without_logprobs_or_truncation_those_arrays_are_null(engine: Engine, model_folder: Path) -> None:
    raw = generate(server(engine, model_folder)).json()["choices"][0]
    assert raw["logprobs"] is None
    assert raw["sampling_mask"] is None


def test_choices_are_numbered_samples_of_their_own(engine: Engine, model_folder: Path) -> None:
    got = choices(generate(server(engine, model_folder), n=3), model_folder)
    assert [c.index for c in got] == [0, 1, 2]
    assert len({tuple(c.token_ids.tolist()) for c in got}) == 3


def test_a_seed_repeats_a_sample_and_none_does_not(engine: Engine, model_folder: Path) -> None:
    demo = server(engine, model_folder)
    ids = [choices(generate(demo, seed=s), model_folder)[0].token_ids.tolist() for s in (3, 3, None, None)]
    assert ids[0] == ids[1]
    assert ids[2] != ids[3]


@pytest.mark.parametrize("params", [{"routed_experts_prompt_start": 6}, {"no_such_parameter": 1}])
def test_a_bad_request_gets_vllms_error_body_and_serving_goes_on(engine: Engine, model_folder: Path, params: dict[str, Any]) -> None:
    demo = server(engine, model_folder)
    response = generate(demo, **params)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "BadRequestError"
    assert response.json()["error"]["code"] == 400
    assert generate(demo).status_code == 200


def test_models_health_and_the_cache_reset_answer(engine: Engine, model_folder: Path) -> None:
    demo = server(engine, model_folder)
    (card,) = ask(demo, lambda c: c.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"], card["weights_version"]) == ("policy", 256, "0")
    assert ask(demo, lambda c: c.get("/health")).status_code == 200
    assert ask(demo, lambda c: c.post("/reset_prefix_cache")).status_code == 200
    assert ask(demo, lambda c: c.get("/load")).json() == {"server_load": 0}
    engine.close()
    assert ask(demo, lambda c: c.get("/health")).status_code == 503
    assert generate(demo).status_code == 503


def reload(demo: DemoServer, folder: object, method: str = "reload_weights") -> httpx.Response:
    body = {"method": method, "kwargs": {"weights_path": str(folder)}}
    got = ask(demo, lambda c: c.post("/collective_rpc", json=body))
    assert isinstance(got, httpx.Response)
    return got


def test_a_reload_changes_what_is_sampled_and_the_version_that_replies_name(engine: Engine, model_folder: Path, other_folder: Path) -> None:
    demo = server(engine, model_folder)
    before = generate(demo).json()["choices"][0]
    assert reload(demo, other_folder).json() == {"results": [None]}
    after = generate(demo).json()["choices"][0]
    assert before["token_ids"] != after["token_ids"]
    assert after["weight_versions"] == [{"version": "12", "start": 0, "end": 6}]


def test_a_reload_that_fails_leaves_the_weights(engine: Engine, model_folder: Path, tmp_path: Path) -> None:
    demo = server(engine, model_folder)
    before = generate(demo).json()["choices"][0]
    assert reload(demo, tmp_path).status_code == 400
    assert reload(demo, tmp_path / "absent").status_code == 400
    assert reload(demo, model_folder, method="shut_down").status_code == 400
    assert generate(demo).json()["choices"][0] == before


def test_versions_follow_the_trainers_folder_names() -> None:
    assert version_of("weights/step_000012") == "12"
    assert version_of("/models/policy") == "0"
    assert version_of("/models/policy", current="4") == "5"


def test_a_client_that_hangs_up_frees_its_slots(engine: Engine, model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    demo = server(engine, model_folder)
    body = json.dumps({"token_ids": PROMPT, "sampling_params": {"max_tokens": 250, "n": 8, "ignore_eos": True}}).encode()
    scope = {"type": "http", "method": "POST", "path": "/inference/v1/generate", "raw_path": b"", "query_string": b"", "headers": []}
    messages = [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(demo.app(scope, receive, send))
    assert sent[0]["status"] == 499
    assert len(choices(generate(demo), model_folder)[0].token_ids) == 6
    assert not engine._running  # the eight left before the last reply was made
    gc.collect()
    assert not caplog.records  # asyncio logs exceptions that nobody looked at


def test_an_engine_that_stops_fails_every_choice_quietly(engine: Engine, model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    demo = server(engine, model_folder)

    async def close_while_it_runs(client: httpx.AsyncClient) -> Any:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 250, "n": 32, "ignore_eos": True}}
        asked = asyncio.ensure_future(client.post("/inference/v1/generate", json=body))
        while engine.load < 32:
            await asyncio.sleep(0)
        await asyncio.to_thread(engine.close)
        return await asked

    assert ask(demo, close_while_it_runs).status_code == 503
    gc.collect()
    assert not [r for r in caplog.records if r.name == "asyncio"]


def test_the_servers_own_log_holds_what_it_replied(engine: Engine, model_folder: Path, tmp_path: Path) -> None:
    demo = server(engine, model_folder, routes_log=tmp_path)
    response = generate(demo, n=2, routed_experts_prompt_start=2)
    got = choices(response, model_folder, start=2)
    paths = sorted(tmp_path.glob("*.npz"))
    assert len(paths) == 2
    for path, choice in zip(paths, got, strict=True):
        with np.load(path) as log:
            assert str(log["request_id"]) == response.json()["request_id"]
            assert int(log["choice"]) == choice.index
            assert log["token_ids"].tolist() == [*PROMPT, *choice.token_ids.tolist()]
            assert (int(log["prompt_count"]), int(log["start"])) == (5, 2)
            assert log["versions"].tolist() == [[0, 0, 6]]
            assert choice.routing is not None
            np.testing.assert_array_equal(log["routes"], choice.routing.rows)
