"""vLLM's replies rewritten on vLLM's side, read by renderers as verifiers calls it, without fsref's adapter."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from fsref.inference import middleware
from fsref.inference.middleware import PATH, RoutedExpertsMiddleware
from fsref.wire.routing import decode_routed_experts, encode_routed_experts
from tests.support import needs

ROWS = (np.arange(9 * 3 * 2) % 7).astype(np.uint8).reshape(9, 3, 2)
"""Of 6 prompt tokens and 4 sampled ones; the last has none."""


def reply(start: int, count: int = 1) -> dict[str, Any]:
    content = [{"token_id": t, "logprob": -0.5, "top_logprobs": [{"token_id": t, "logprob": -0.5}]} for t in (7, 8, 9, 10)]
    choice = {"token_ids": [7, 8, 9, 10], "finish_reason": "length", "logprobs": {"content": content}}
    routing = {"routed_experts": encode_routed_experts(ROWS[start:])}
    return {"request_id": "r", "choices": [{"index": n, **choice, **routing} for n in range(count)]}


async def generate(request: Request) -> Response:
    body = await request.json()
    sampling = body["sampling_params"]
    start = sampling.get("routed_experts_prompt_start") or 0
    if sampling.get("seed") == 500:
        return JSONResponse({"error": {"message": "out of order"}}, status_code=500)
    if sampling.get("seed") == 1:
        return Response(json.dumps(reply(0)).replace("k05VTVBZ", "AAAABBBB"), media_type="application/json")  # blanks: vLLM writes none
    if sampling.get("seed") == 2:
        return Response(compact(reply(0)).replace("k05VTVBZ", "AAAABBBB"), media_type="application/json")
    if body.get("stream"):
        return StreamingResponse(events(), media_type="text/event-stream")
    return Response(compact(reply(start, sampling.get("n", 1))), media_type="application/json", headers={"x-request-id": "r"})


async def events() -> AsyncIterator[bytes]:
    yield b"data: " + compact(reply(0)).encode() + b"\n\n"


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


async def other(request: Request) -> Response:
    return Response(await request.body(), media_type="application/json")


APP = Starlette(routes=[Route(PATH, generate, methods=["POST"]), Route("/other", other, methods=["POST"])])


def ask(path: str = PATH, **body: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=RoutedExpertsMiddleware(APP))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return await client.post(path, json={"token_ids": [1, 2, 3, 4, 5, 6], "sampling_params": {}, **body})

    return asyncio.run(go())


@pytest.mark.parametrize("start", [0, 5])
def test_routing_becomes_the_form_that_says_where_it_starts(start: int) -> None:
    response = ask(sampling_params={"routed_experts_prompt_start": start})
    assert response.status_code == 200
    assert response.headers["content-length"] == str(len(response.content))
    assert response.headers["x-request-id"] == "r"
    (choice,) = response.json()["choices"]
    assert choice["routed_experts"]["start"] == start
    found = decode_routed_experts(choice["routed_experts"], start=0, token_count=10)
    assert found is not None
    np.testing.assert_array_equal(found.rows, ROWS[start:])
    assert b'"routed_experts":{"data":"' in response.content  # where renderers cuts it out


def test_every_choice_is_rewritten_and_nothing_else_changes() -> None:
    response = ask(sampling_params={"n": 2})
    choices = response.json()["choices"]
    assert [c["routed_experts"]["shape"] for c in choices] == [[9, 3, 2]] * 2
    for choice in choices:
        del choice["routed_experts"]
    expected = reply(0, 2)["choices"]
    for choice in expected:
        del choice["routed_experts"]
    assert choices == expected


def test_errors_streams_and_other_paths_pass_as_they_came() -> None:
    assert ask(sampling_params={"seed": 500}).json() == {"error": {"message": "out of order"}}
    assert ask(stream=True).content == b"data: " + compact(reply(0)).encode() + b"\n\n"
    assert ask("/other", x=1).json()["x"] == 1


def test_routing_that_cannot_be_read_is_an_error_not_a_wrong_array() -> None:
    response = ask(sampling_params={"seed": 2})
    assert response.status_code == 502
    assert "npy" in response.json()["error"]["message"]


def test_spelling_that_vllm_does_not_use_passes_for_the_reader_to_judge() -> None:
    (choice,) = ask(sampling_params={"seed": 1}).json()["choices"]
    assert choice["routed_experts"].startswith("AAAABBBB")


def test_a_request_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "REQUEST_BYTES_MAX", 64)
    response = ask(token_ids=list(range(100)))
    assert response.status_code == 413
    assert "64 bytes" in response.json()["error"]["message"]


@pytest.fixture
def served() -> Iterator[str]:
    """The application behind the middleware on a loopback port."""
    started = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            started.set()

    server = Server(uvicorn.Config(RoutedExpertsMiddleware(APP), host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert started.wait(60)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


def test_renderers_reads_it_without_any_adapter(served: str) -> None:
    client = needs.extra("renderers.client", "verifiers")
    openai = needs.extra("openai", "verifiers")

    class Fixed:
        """As much of a renderer as a request with token ids uses."""

        def parse_response(self, *_: Any, **__: Any) -> Any:
            return SimpleNamespace(content="text", reasoning_content=None, tool_calls=[], reasoning_complete=True)

        def get_stop_token_ids(self) -> list[int]:
            return []

    async def go() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{served}/v1", api_key="none", http_client=httpx.AsyncClient(trust_env=False)) as engine:
            return await client.generate(
                client=engine,
                renderer=Fixed(),
                messages=[{"role": "user", "content": "x"}],
                model="policy",
                prompt_ids=[1, 2, 3, 4, 5, 6],
                sampling_params={"max_tokens": 4, "routed_experts_prompt_start": 5},
            )

    result = asyncio.run(go())
    assert result["completion_ids"] == [7, 8, 9, 10]
    found = decode_routed_experts(result["routed_experts"], start=0, token_count=10)
    assert found is not None
    assert found.start == 5
    np.testing.assert_array_equal(found.rows, ROWS[5:])
