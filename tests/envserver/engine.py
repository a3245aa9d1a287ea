"""A stand-in for vLLM's generate endpoint, in a thread of the test, with rows that follow from the tokens alone.

Row t depends on the tokens up to t, as in a causal model, so tests know the truth of any sequence (``routing_of``, ``head_of``,
``mask_of``) without asking how it came about. Replies have the form of vLLM 0.32. Faults are set on the object: requests can be held
at a gate, fail, or lose or damage a field.
"""

import asyncio
import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from tests.envserver.model_folder import END, EXPERTS, LAYERS, MOE_LAYERS, TOP_K, VOCAB

MASK_COUNT = 5
PRINTABLE = range(74, 100)


def states_of(ids: Any) -> NDArray[np.int64]:
    """[T], a number for each position that depends on all tokens up to it."""
    out, state = [], 1
    for i in ids:
        state = (state * 31 + int(i) + 7) % 1_000_003
        out.append(state)
    return np.asarray(out, dtype=np.int64)


def routing_of(ids: Any) -> NDArray[np.uint8]:
    """[T, L, K] over all layers; no layer is zero throughout."""
    states = states_of(ids)[:, None, None]
    layer, slot = np.arange(LAYERS)[None, :, None], np.arange(TOP_K)[None, None, :]
    first = (states * 7 + layer * 5) % EXPERTS
    return np.asarray((first + slot * (1 + states % 3)) % EXPERTS, np.uint8)


def moe_routing_of(ids: Any) -> NDArray[np.uint8]:
    """[T, MoE layers, K]: what is stored."""
    return routing_of(ids)[:, MOE_LAYERS, :]


def candidates_of(state: int, sampled: int, count: int) -> list[tuple[int, float]]:
    """The most probable tokens after a state, most probable first; the sampled one is not among them."""
    ids = [int((state + 17 * n) % (VOCAB - 120)) + 120 for n in range(count)]
    return [(i, -1.0 - 0.25 * n - (state % 5) / 64) for n, i in enumerate(ids) if i != sampled]


def head_of(ids: Any, position: int, k: int) -> list[tuple[int, float]]:
    """The k-entry head of the token at ``position``."""
    return candidates_of(int(states_of(ids[:position])[-1]), int(ids[position]), k)


def mask_of(ids: Any, position: int) -> list[int]:
    """The sampling mask of the token at ``position``."""
    state = int(states_of(ids[:position])[-1])
    return [int(ids[position]), *(i for i, _ in candidates_of(state, int(ids[position]), MASK_COUNT - 1))]


@dataclass
class Seen:
    """One request that reached the engine."""

    prompt_ids: list[int]
    sampling: dict[str, Any]
    completion_ids: list[int] = field(default_factory=list)


class Engine:
    """Serves while the context is open."""

    def __init__(self) -> None:
        self.requests: list[Seen] = []
        self.failures_left = 0
        """That many requests answer 500."""
        self.drop: set[str] = set()
        """Fields that replies lack."""
        self.damage: set[str] = set()
        """Fields that replies carry in a broken form."""
        self.ends_early = True
        """Whether completions end with the end-of-turn token at their maximum length."""
        self._lock = threading.Lock()
        self._open = threading.Event()
        self._open.set()
        self._held = threading.Condition(self._lock)
        self.held = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self.port = 0

    def __enter__(self) -> "Engine":
        self._thread.start()
        assert self._ready.wait(120)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def gate(self) -> Iterator[None]:
        """While open, requests wait here before they are answered."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def wait_held(self, count: int, deadline_s: float = 120.0) -> None:
        """Until that many requests wait at the gate."""
        with self._held:
            assert self._held.wait_for(lambda: self.held >= count, deadline_s), f"{self.held} requests wait, {count} expected"

    def _serve(self) -> None:
        loop = self._loop = asyncio.new_event_loop()
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        loop.run_until_complete(site.start())
        self.port = runner.addresses[0][1]
        self._ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "max_model_len": 100_000}]})

    async def _chat(self, _: web.Request) -> web.Response:
        choice = {"index": 0, "message": {"role": "assistant", "content": "aeiou"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
        return web.json_response(
            {"id": "c", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice], "usage": usage}
        )

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        seen = Seen(body["token_ids"], body["sampling_params"])
        with self._lock:
            self.requests.append(seen)
            number = len(self.requests)
            fails = self.failures_left > 0
            self.failures_left -= fails
        await self._pass_gate()
        if fails:
            return web.json_response({"error": {"message": "out of order", "type": "x", "code": 500}}, status=500)
        seen.completion_ids = self._sample(seen, number)
        return web.json_response({"request_id": f"r{number}", "choices": [self._choice(seen)]}, dumps=_compact)

    async def _pass_gate(self) -> None:
        if self._open.is_set():
            return
        with self._held:
            self.held += 1
            self._held.notify_all()
        try:
            while not self._open.is_set():
                await asyncio.sleep(0.005)
        finally:
            with self._held:
                self.held -= 1

    def _sample(self, seen: Seen, number: int) -> list[int]:
        rng = np.random.default_rng([number, len(seen.prompt_ids)])
        out = [int(i) for i in rng.choice(list(PRINTABLE), seen.sampling["max_tokens"])]
        if self.ends_early:
            out[-1] = END
        return out

    def _choice(self, seen: Seen) -> dict[str, Any]:
        ids = seen.prompt_ids + seen.completion_ids
        start = seen.sampling.get("routed_experts_prompt_start") or 0
        asked = seen.sampling.get("logprobs") or 1
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": seen.completion_ids,
            "finish_reason": "stop" if self.ends_early else "length",
            "logprobs": {"content": [_entry(ids, p, asked) for p in range(len(seen.prompt_ids), len(ids))]},
            "routed_experts": _npy(routing_of(ids)[start : len(ids) - 1]),
            "sampling_mask": [mask_of(ids, p) for p in range(len(seen.prompt_ids), len(ids))],
            "weight_versions": [{"version": "7", "start": 0, "end": len(seen.completion_ids)}],
        }
        if "routed_experts" in self.damage:
            choice["routed_experts"] = _npy(routing_of(ids)[start : len(ids) - 3])
        if "sampling_mask" in self.damage:
            choice["sampling_mask"][0] = [VOCAB + 5]
        for name in self.drop:
            choice.pop(name, None)
        return choice


def _entry(ids: list[int], position: int, asked: int) -> dict[str, Any]:
    state = int(states_of(ids[:position])[-1])
    top = [(ids[position], -9.0), *candidates_of(state, ids[position], asked)][:asked]
    return {"token_id": ids[position], "logprob": -9.0, "top_logprobs": [{"token_id": i, "logprob": v} for i, v in top]}


def _npy(rows: NDArray[np.uint8]) -> str:
    out = io.BytesIO()
    np.save(out, rows)
    return base64.b64encode(out.getvalue()).decode()


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
