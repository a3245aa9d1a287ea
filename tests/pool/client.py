"""A role on a node of a pool: keeps objects, then reads them each time it is told to, and says what became of every one.

python -m tests.pool.client COUNT, with the endpoint in the environment. Commands come on stdin, one a line: ``read``, ``put``, ``end``;
each answer is a line of JSON.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from fsref.config import StoreSection
from fsref.errors import StoreError
from fsref.reader import Reader
from fsref.refs import Dense, Payload, PayloadRef, Schema, routed_experts
from fsref.store import open_root
from fsref.writer import Receipts, Writer

SCHEMA = Schema((routed_experts(layer_ids=range(8), top_k=8, expert_count=64),))
TOKENS = 2_000
THREADS = 16


def rows(n: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return np.random.default_rng(n).integers(0, 64, (TOKENS, 8, 8), np.uint8)


def read(reader: Reader, ref: PayloadRef, n: int) -> str:
    """``equal``, or what went wrong."""
    try:
        found = reader.read(ref)["routed_experts"]
    except StoreError as e:
        return type(e).__name__
    assert isinstance(found, Dense)
    return "equal" if np.array_equal(found.rows, rows(n)) else "different"


def say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    count = int(sys.argv[1])
    section = StoreSection(addressing="path", stall_s=4.0, connect_s=2.0, request_s=8.0, retries_max=1, retry_s=8.0)
    tokens = np.arange(TOKENS, dtype=np.int32)
    with (
        open_root("s3://fsref/runs", run="pooled", settings=section) as store,
        Reader(store, SCHEMA, threads=THREADS, deadline_s=60.0) as reader,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        writer = Writer(store, SCHEMA, Receipts("env-0"))
        refs = [writer.put(Payload(tokens, {"routed_experts": Dense(rows(n))})) for n in range(count)]
        say({"put": len(refs)})
        for line in sys.stdin:
            began = time.monotonic()
            if line.strip() == "read":
                answer: dict[str, object] = {"found": [*pool.map(partial(read, reader), refs, range(len(refs)))]}
            elif line.strip() == "put":
                refs.append(writer.put(Payload(tokens, {"routed_experts": Dense(rows(len(refs)))})))
                answer = {"put": len(refs)}
            else:
                return
            say(answer | {"seconds": time.monotonic() - began})


if __name__ == "__main__":
    main()
