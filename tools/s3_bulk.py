"""A run of 10,000 objects in a bucket, listed, audited and removed: its time, and its requests. A part of ``tools.s3_bench``."""

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from fsref.config import LedgerSection
from fsref.journal import create_run
from fsref.objects import encode
from fsref.reaper import EnvHolder, Verdict, audit, close_run
from fsref.refs import Dense, Payload, Schema, object_name, routed_experts
from fsref.store import Store
from tests.support.faultproxy import FaultProxy
from tests.support.s3servers import S3Server

COUNT: Final = 10_000
THREADS: Final = 8


class Opener(Protocol):
    """The way to one server."""

    @property
    def endpoint(self) -> str:
        """Its own, without a proxy."""

    def store(self, driver: str = "obstore", *, run: str = "bench", endpoint: str = "") -> Store:
        """Opens a run's root there, through ``endpoint`` if given."""


def bulk(at: Opener) -> dict[str, dict[str, float]]:
    """10,000 objects of a run listed, audited and removed: seconds straight, requests through the proxy."""
    straight, _ = _bulk(at, "bulk-straight", "")
    host = S3Server("seaweedfs", at.endpoint)
    with FaultProxy(host) as proxy:
        _, requests = _bulk(at, "bulk-counted", proxy.endpoint, proxy)
    out = {name: {"seconds": straight[name], "requests": float(requests[name])} for name in straight}
    print(f"bulk: {out}", flush=True)
    return out


def _bulk(at: Opener, name: str, endpoint: str, proxy: FaultProxy | None = None) -> tuple[dict[str, float], dict[str, int]]:
    seconds: dict[str, float] = {}
    requests: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder, at.store(run=name, endpoint=endpoint) as store, ThreadPoolExecutor(THREADS) as pool:
        ledger = Path(folder) / "ledger"
        schema = Schema((routed_experts(layer_ids=range(2), top_k=2, expert_count=8),))
        encoded = encode(
            Payload(np.arange(8, dtype=np.int32), {"routed_experts": Dense(np.zeros((8, 2, 2), np.uint8))}).checked(schema), schema
        )
        run = create_run(store, name, schema)

        @contextmanager
        def timed(what: str) -> Iterator[None]:
            if proxy is not None:
                proxy.clear()
            began = time.perf_counter()
            yield
            seconds[what] = time.perf_counter() - began
            requests[what] = proxy.counts().total() if proxy is not None else 0

        env = EnvHolder(store, ledger, run=run, label="bench-0-0", section=LedgerSection())

        def put(_: int) -> None:
            seq = env.next_seq()
            store.put(object_name(f"{env.inc}/{seq}"), encoded.buffers)
            env.keep(seq, byte_count=encoded.byte_count, checksum=encoded.checksum, token_count=8, fields=1)

        with timed("published"):
            list(pool.map(put, range(COUNT)))
        with timed("listed"):
            assert sum(1 for _ in store.list("obj")) == COUNT
        with timed("audited"):
            found = audit(store, ledger, run=run.run, run_uuid=run.run_uuid)
        assert found.verdict is Verdict.BALANCED, found.render()
        with timed("removed, by the worker that kept them"):
            assert env.close() == 0
        with timed("closed and audited"):
            found = close_run(store, ledger, run=run)
        assert found.verdict is Verdict.PROVED, found.render()
        assert next(store.list("obj"), None) is None
    return seconds, requests
