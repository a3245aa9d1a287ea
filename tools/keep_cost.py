"""What keeping costs an env-server worker, and what each adapter costs per reply. Writes docs/results/keep.json and prints it.

    python -m tools.keep_cost            # 16k and 128k tokens, all three fields; about two minutes
    python -m tools.keep_cost 4096       # other sizes

Arrays have the shape of Qwen3-30B-A3B (48 layers, 8 of 128 experts), heads of 128 and masks of up to 64 for every completion token.
*pause* is how much later than asked a 1 ms timer on the event loop fired, idle and during the work; *RSS* is of this process.
"""

import asyncio
import functools
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsref.envserver.capture import Capture
from fsref.envserver.generate import Adapter
from fsref.events import memory_metrics
from fsref.inference.middleware import packed_reply
from fsref.refs import Dense, Payload, Ragged, Schema, TokenRange, routed_experts, sampling_mask, top_logprobs
from fsref.store import open_root
from fsref.store.base import Durability
from fsref.wire.logprobs import encode_content
from fsref.wire.masks import encode_sampling_mask
from fsref.wire.routing import encode_routed_experts
from fsref.writer import Receipts, Writer

LAYERS, TOP_K, EXPERTS, HEAD, MASK, VOCAB = 48, 8, 128, 128, 64, 151_936
SCHEMA = Schema((routed_experts(layer_ids=range(LAYERS), top_k=TOP_K, expert_count=EXPERTS), top_logprobs(), sampling_mask()))
REPEATS = 5
DURABILITIES: tuple[Durability, ...] = ("process", "node")
OUT = Path(__file__).resolve().parent.parent / "docs" / "results" / "keep.json"


def experts(rng: np.random.Generator, tokens: int) -> NDArray[np.uint8]:
    """[T, L, K] without repeats in a row, some experts twice as popular as others."""
    out = np.empty((tokens, LAYERS, TOP_K), np.uint8)
    for at in range(0, tokens, 2048):
        some = out[at : at + 2048]
        weights = rng.random((len(some), LAYERS, EXPERTS), np.float32) * (1 + (np.arange(EXPERTS) % 2))
        some[...] = np.argpartition(weights, -TOP_K, axis=-1)[..., -TOP_K:]
    return out


def ragged(rng: np.random.Generator, counts: NDArray[np.int32], *, logprobs: bool) -> Ragged:
    """Ids without repeats in a row, and values in descending order."""
    total = int(counts.sum())
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    ids = ((np.repeat(rng.integers(0, VOCAB, len(counts)), counts) + within * 7919) % VOCAB).astype(np.int32)
    columns: dict[str, NDArray[Any]] = {"ids": ids}
    if logprobs:
        columns["logprobs"] = (-0.01 - within * 0.05 - rng.random(total) * 0.04).astype(np.float32)
    return Ragged(counts, columns)


def make(tokens: int) -> Payload:
    """All three fields of one branch, of which all but the first 256 tokens were sampled."""
    rng = np.random.default_rng(0)
    sampled = np.arange(tokens) >= 256
    heads = ragged(rng, np.where(sampled, HEAD, 0).astype(np.int32), logprobs=True)
    masks = ragged(rng, np.where(sampled, rng.integers(1, MASK + 1, tokens), 0).astype(np.int32), logprobs=False)
    routing = Dense(experts(rng, tokens), (TokenRange(tokens - 1, tokens),))
    ids = rng.integers(0, VOCAB, tokens).astype(np.int32)
    return Payload(ids, {"routed_experts": routing, "top_logprobs": heads, "sampling_mask": masks})


def raw_bytes(payload: Payload) -> int:
    return sum(
        d.rows.nbytes if isinstance(d, Dense) else d.counts.nbytes + sum(c.nbytes for c in d.columns.values())
        for d in payload.fields.values()
    )


class Heartbeat:
    """A 1 ms timer on the event loop and a watch on memory, while its context is open."""

    def __init__(self) -> None:
        self.late_ms: list[float] = []
        self.rss_peak = 0.0

    async def __aenter__(self) -> "Heartbeat":
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _beat(self) -> None:
        while True:
            asked = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            self.late_ms.append((time.perf_counter() - asked) * 1e3)
            if len(self.late_ms) % 16 == 0:
                self.rss_peak = max(self.rss_peak, memory_metrics()["memory/rss_bytes"])

    def figures(self) -> dict[str, float]:
        ordered = sorted(self.late_ms) or [0.0]
        return {"p99_ms": round(ordered[math.ceil(0.99 * len(ordered)) - 1], 2), "longest_ms": round(ordered[-1], 2)}


async def watched(work: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """``work`` in a thread, ``repeats`` times, beside a heartbeat."""
    seconds: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        loop = asyncio.get_running_loop()
        before = memory_metrics()["memory/rss_bytes"]
        async with Heartbeat() as beat:
            for _ in range(repeats):
                start = time.perf_counter()
                await loop.run_in_executor(pool, work)
                seconds.append(time.perf_counter() - start)
        after = memory_metrics()["memory/rss_bytes"]
    mib = {n: round(v / 2**20) for n, v in (("before", before), ("during", beat.rss_peak), ("after", after))}
    return {"median_ms": round(statistics.median(seconds) * 1e3, 1), "pause": beat.figures(), "rss_mib": mib}


async def idle() -> dict[str, float]:
    async with Heartbeat() as beat:
        await asyncio.sleep(2)
    return beat.figures()


async def keep(tokens: int, folder: str) -> dict[str, Any]:
    payload = make(tokens)
    with open_root(folder, run=f"keep-{tokens}", create=True) as store:
        out: dict[str, Any] = {"raw_mb": round(raw_bytes(payload) / 1e6, 1)}
        for durability in DURABILITIES:
            writer = Writer(store, SCHEMA, Receipts(f"bench-{durability}"), durability=durability)
            out[durability] = await watched(functools.partial(writer.put, payload), REPEATS)
            out[durability]["raw_gb_per_s"] = round(raw_bytes(payload) / out[durability]["median_ms"] / 1e6, 2)
        out["object_mb"] = round(writer.put(payload).byte_count / 1e6, 1)
    return out


def reply(payload: Payload, *, head: int) -> tuple[bytes, dict[str, Any]]:
    """vLLM's reply (0.32's form) to a prompt of 256 tokens, as bytes, and the request."""
    ids = payload.token_ids.tolist()
    routing, heads, masks = (payload.fields[n] for n in ("routed_experts", "top_logprobs", "sampling_mask"))
    assert isinstance(routing, Dense)
    assert isinstance(heads, Ragged)
    assert isinstance(masks, Ragged)
    rows = len(ids) - 256
    cut = {n: v.reshape(rows, HEAD)[:, :head].reshape(-1) for n, v in heads.columns.items()}
    counts = np.full(rows, head, np.int32)
    content = encode_content(token_ids=ids[256:], logprobs=np.full(rows, -1.0, np.float32), heads=Ragged(counts, cut))
    choice = {
        "index": 0,
        "token_ids": ids[256:],
        "logprobs": {"content": content},
        "finish_reason": "length",
        "routed_experts": encode_routed_experts(routing.rows[:-1]),
    }
    if head > 1:  # with masks, whose ids hold the sampled token
        lists = encode_sampling_mask(Ragged(masks.counts[256:], masks.columns))
        choice["sampling_mask"] = [[t, *(i for i in row[1:] if i != t)] for t, row in zip(ids[256:], lists, strict=True)]
    body = {"token_ids": ids[:256], "sampling_params": {}}
    return json.dumps({"request_id": "r", "choices": [choice]}, separators=(",", ":")).encode(), body


async def adapters(tokens: int) -> dict[str, Any]:
    payload = make(tokens)
    cases = (("routing and sampled logprobs", 1), ("heads of 8 and masks", 8), (f"heads of {HEAD} and masks", HEAD))
    return {label: await one_reply(*reply(payload, head=head), head=head) for label, head in cases}


async def one_reply(raw: bytes, body: dict[str, Any], *, head: int) -> dict[str, Any]:
    with ThreadPoolExecutor(1) as pool:
        adapter = Adapter(capture=Capture(), executor=pool, model=None)
        read = await watched(lambda: adapter.read(raw, body, trace_id="t", head=head), REPEATS)
    found = {"reply_mb": round(len(raw) / 1e6, 1), "env server": read}
    if head == 1:
        found["middleware"] = await watched(lambda: packed_reply(raw, start=0), REPEATS)
    return found


async def measure(sizes: list[int]) -> dict[str, Any]:
    out: dict[str, Any] = {"machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"}
    out["idle"] = await idle()
    with tempfile.TemporaryDirectory() as folder:
        out["keep"] = {str(n): await keep(n, folder) for n in sizes}
    out["adapters"] = {str(n): await adapters(n) for n in sizes if n <= 32_768}
    return out


def main(sizes: list[int]) -> int:
    found = asyncio.run(measure(sizes))
    text = json.dumps(found, indent=1) + "\n"
    print(text)
    OUT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main([int(a) for a in sys.argv[1:]] or [16_384, 131_072]))
