"""``fsref bench memory``: what the orchestrator holds per sample in flight, inline against by reference, and what a trainer rank takes.

Each way runs in a process of its own that builds up samples (``fsref.orchestrator``'s noun: token ids, loss mask, logprobs, and a
reference or nothing) and weighs itself as it grows; inline means the same arrays in the message that brought them. The slope is per sample,
over everything but the first tenth.
"""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final

import msgspec
import numpy as np

from fsref.bench.measure import machine, peak_growth, rss_bytes
from fsref.bench.methods import Fsref
from fsref.bench.shapes import payload, shape_of
from fsref.bench.workload import Options, arrays, workload
from fsref.orchestrator.samples import Sample
from fsref.reader import REQUEST_BYTES_LOCAL
from fsref.refs import PayloadRef

INLINE_BYTES_MAX: Final = 512 << 20
"""Inline samples are held up to this many bytes; the slope does not need more."""
WAYS: Final = ("without arrays", "by reference", "inline")


def memory(options: Options, *, samples: int = 2000) -> dict[str, Any]:
    """Measures; ``samples`` are held by reference, and as many inline as fit."""
    shape = shape_of(options.shape).without(heads=options.heads, masks=options.masks)
    with workload(msgspec.structs.replace(options, samples=1), shape) as work:
        ref = json.dumps(work.refs["default"][0].to_json())
        inline = min(samples, max(10, INLINE_BYTES_MAX // work.raw_bytes))
        rows = []
        for way in WAYS:
            count = inline if way == "inline" else samples
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                rows.append({"way": way, "samples": count, **pool.submit(_hold, way, count, options, ref).result()})
        extra = rows[1]["slope_bytes"] - rows[0]["slope_bytes"]
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            trainer = pool.submit(_trainer, options).result()
    return {
        "bench": "memory",
        "machine": machine(),
        "shape": shape.name,
        "tokens": options.tokens,
        "raw_bytes": work.raw_bytes,
        "rows": rows,
        "trainer": trainer,
        "ratios": [
            _at_most("orchestrator, bytes per sample beyond a run without arrays", extra, 2048),
            _at_most("inline / by reference, bytes per sample", rows[2]["slope_bytes"] / max(rows[1]["slope_bytes"], 1), 0),
            _at_most(
                "trainer rank, peak beside the tensors / what requests under way take", trainer["peak"] / trainer["inflight_bytes"], 2.0
            ),
        ],
    }


def _at_most(label: str, value: float, reach: float) -> dict[str, Any]:
    value = round(value, 2)
    return {"ratio": label, "median": value, "least": value, "most": value, "reach": reach, "at_least": False}


def _hold(way: str, count: int, options: Options, ref: str) -> dict[str, Any]:
    """In a process of its own: bytes per sample held, by the resident memory after a tenth and after all."""
    shape = shape_of(options.shape).without(heads=options.heads, masks=options.masks)
    message = b""
    if way == "inline":
        whole = payload(shape, options.tokens, skew=options.skew)
        message = msgspec.msgpack.encode(
            {n: {c: np.ascontiguousarray(v).tobytes() for c, v in columns.items()} for n, columns in arrays(whole, options.tokens).items()}
        )
    held: list[Any] = []
    first = 0
    mark = max(1, count // 10)
    for n in range(count):
        sample = Sample(
            name=f"trace-{n}/0",
            group=n // 8,
            agent="",
            trace=f"trace-{n}",
            token_ids=np.full(options.tokens, n, np.int32),
            loss_mask=np.ones(options.tokens, np.bool_),
            logprobs=np.full(options.tokens, -1.0, np.float32),
            ref=PayloadRef.decode(json.loads(ref)) if way == "by reference" else None,
            reward=1.0,
            version=0,
            temperature=1.0,
        )
        held.append((sample, msgspec.msgpack.decode(message) if message else None))
        if n == mark - 1:
            first = rss_bytes()
    last = rss_bytes()
    return {"slope_bytes": (last - first) // max(1, count - mark), "rss_bytes": last}


def _trainer(options: Options) -> dict[str, int]:
    """In a process of its own: what a fetch takes beside the buffers that it fills, and the stored bytes that its threads hold at once."""
    shape = shape_of(options.shape).without(heads=options.heads, masks=options.masks)
    with workload(msgspec.structs.replace(options, samples=4, root=""), shape) as work:
        work.clear()  # makes the buffers
        method = Fsref(work, "default")
        try:
            peak = peak_growth(method.run)
        finally:
            method.close()
        chunk = max(len(p.target) for r in work.ranged("default") for p in r.places)
        return {"peak": peak, "inflight_bytes": options.threads * (REQUEST_BYTES_LOCAL * 5 // 4 + chunk), "tensors_bytes": work.raw_bytes}
