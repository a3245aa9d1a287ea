"""What keeping costs an env-server worker, and what each adapter costs per reply.

    python -m tools.keep_cost            # 16k and 128k tokens, all three fields; under three minutes; writes docs/results/keep.json
    python -m tools.keep_cost 4096       # other sizes; prints only

Arrays have the shape of Qwen3-30B-A3B (48 layers, 8 of 128 experts), heads of 128 and masks of up to 64 for every completion token.
*pause* is how much later than asked a 1 ms timer on the event loop fired, idle and during the work; *RSS* is of this process.
"""

import asyncio
import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np

from fsref.bench.measure import machine
from fsref.bench.pause import idle, watched
from fsref.bench.shapes import PROMPT_SHARE, SHAPES, payload, raw_bytes
from fsref.envserver.capture import Capture
from fsref.envserver.generate import Adapter
from fsref.inference.middleware import packed_reply
from fsref.refs import Dense, Payload, Ragged
from fsref.store import open_root
from fsref.store.base import Durability
from fsref.wire.logprobs import encode_content
from fsref.wire.masks import encode_sampling_mask
from fsref.wire.routing import encode_routed_experts
from fsref.writer import Receipts, Writer
from tools.results import replace_section

SHAPE: Final = SHAPES["qwen3-30b"]
SIZES: Final = (16_384, 131_072)
REPEATS: Final = 5
ADAPTED_TOKENS_MAX: Final = 32_768
"""Longer replies are gigabytes of Python objects to make."""
DURABILITIES: Final[tuple[Durability, ...]] = ("process", "node")
OUT: Final = Path(__file__).resolve().parent.parent / "docs" / "results" / "keep.json"


async def keep(tokens: int, folder: str) -> dict[str, Any]:
    """Encoding and publishing one branch of that many tokens."""
    sample = payload(SHAPE, tokens)
    raw = raw_bytes(sample)
    with open_root(folder, run=f"keep-{tokens}", create=True) as store:
        out: dict[str, Any] = {"raw_mb": round(raw / 1e6, 1)}
        for durability in DURABILITIES:
            writer = Writer(store, SHAPE.schema(), Receipts(f"bench-{durability}"), durability=durability)
            out[durability] = await watched(functools.partial(writer.put, sample), REPEATS)
            out[durability]["raw_gb_per_s"] = round(raw / out[durability]["median_ms"] / 1e6, 2)
        out["object_mb"] = round(writer.put(sample).byte_count / 1e6, 1)
    return out


def reply(sample: Payload, *, head: int) -> tuple[bytes, dict[str, Any]]:
    """vLLM's reply (0.32's form), as bytes, and the request."""
    ids = sample.token_ids.tolist()
    routing, heads, masks = (sample.fields[n] for n in ("routed_experts", "top_logprobs", "sampling_mask"))
    assert isinstance(routing, Dense)
    assert isinstance(heads, Ragged)
    assert isinstance(masks, Ragged)
    prompt = len(ids) // PROMPT_SHARE
    rows = len(ids) - prompt
    cut = {n: v.reshape(rows, SHAPE.head)[:, :head].reshape(-1) for n, v in heads.columns.items()}
    counts = np.full(rows, head, np.int32)
    content = encode_content(token_ids=ids[prompt:], logprobs=np.full(rows, -1.0, np.float32), heads=Ragged(counts, cut))
    choice = {
        "index": 0,
        "token_ids": ids[prompt:],
        "logprobs": {"content": content},
        "finish_reason": "length",
        "routed_experts": encode_routed_experts(routing.rows[:-1]),
    }
    if head > 1:  # with masks, whose ids hold the sampled token
        lists = encode_sampling_mask(Ragged(masks.counts[prompt:], masks.columns))
        choice["sampling_mask"] = [[t, *(i for i in row[1:] if i != t)] for t, row in zip(ids[prompt:], lists, strict=True)]
    body = {"token_ids": ids[:prompt], "sampling_params": {}}
    return json.dumps({"request_id": "r", "choices": [choice]}, separators=(",", ":")).encode(), body


async def adapters(tokens: int) -> dict[str, Any]:
    sample = payload(SHAPE, tokens)
    cases = (("routing and sampled logprobs", 1), ("heads of 8 and masks", 8), (f"heads of {SHAPE.head} and masks", SHAPE.head))
    return {label: await one_reply(*reply(sample, head=head), head=head) for label, head in cases}


async def one_reply(raw: bytes, body: dict[str, Any], *, head: int) -> dict[str, Any]:
    with ThreadPoolExecutor(1) as pool:
        adapter = Adapter(capture=Capture(), executor=pool, model=None)
        read = await watched(lambda: adapter.read(raw, body, trace_id="t", head=head), REPEATS)
    found = {"reply_mb": round(len(raw) / 1e6, 1), "env server": read}
    if head == 1:
        found["middleware"] = await watched(lambda: packed_reply(raw, start=0), REPEATS)
    return found


async def measure(sizes: list[int]) -> dict[str, Any]:
    """Everything, of every size."""
    out: dict[str, Any] = {"machine": machine(), "load": round(os.getloadavg()[0], 1)}
    out["idle"] = await idle()
    with tempfile.TemporaryDirectory() as folder:
        out["keep"] = {str(n): await keep(n, folder) for n in sizes}
    out["adapters"] = {str(n): await adapters(n) for n in sizes if n <= ADAPTED_TOKENS_MAX}
    return out


def section(found: dict[str, Any]) -> Iterator[str]:
    """The lines of docs/results.md."""
    quiet = found["idle"]
    yield f"`python -m tools.keep_cost` on {found['machine']} (load {found['load']:g} at first); raw values in `docs/results/keep.json`."
    yield f"The idle event loop's 1 ms timer was late by {quiet['p99_ms']} ms (p99), {quiet['longest_ms']} at most."
    yield ""
    yield "| tokens | arrays | object | put, rename only | put, with fsync | timer late, p99 / longest | RSS before / during / after |"
    yield "|---|---|---|---|---|---|---|"
    for tokens, k in found["keep"].items():
        rename, pause, rss = k["process"], k["process"]["pause"], k["process"]["rss_mib"]
        yield (
            f"| {int(tokens):,} | {k['raw_mb']} MB | {k['object_mb']} MB | {rename['median_ms']} ms | {k['node']['median_ms']} ms"
            f" | {pause['p99_ms']} / {pause['longest_ms']} ms | {rss['before']} / {rss['during']} / {rss['after']} MiB |"
        )
    for tokens, replies in found["adapters"].items():
        yield ""
        yield f"| reply to {int(tokens):,} tokens | size | env server's adapter | its timer late, p99 / longest | middleware |"
        yield "|---|---|---|---|---|"
        for name, r in replies.items():
            read, other = r["env server"], f"{r['middleware']['median_ms']} ms" if "middleware" in r else "-"
            pause = read["pause"]
            yield f"| {name} | {r['reply_mb']} MB | {read['median_ms']} ms | {pause['p99_ms']} / {pause['longest_ms']} ms | {other} |"
    yield ""
    yield PROSE


PROSE: Final = """\
Heads of 128 over 16,384 tokens are 113 MB of JSON. They once took 2.2 s of processor time: 1.3 s in two sorts of all candidates (now rows
are sorted side by side, `fsref/wire/rows.py`), the rest in parsing piece by piece; now it is 0.6 s together. The one search that held
the interpreter for 16 ms goes a megabyte at a time. Between pieces the parsing thread gives the interpreter
away, without which the event loop was seen to wait for the whole list, half a second."""


def main(sizes: list[int]) -> int:
    """The command line."""
    found = asyncio.run(measure(sizes or list(SIZES)))
    text = json.dumps(found, indent=1) + "\n"
    print(text)
    if not sizes:
        OUT.write_text(text, encoding="utf-8")
        replace_section("What keeping costs", list(section(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main([int(a) for a in sys.argv[1:]]))
