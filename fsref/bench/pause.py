"""How much later than asked a 1 ms timer on an event loop fires while work runs in a thread beside it."""

import asyncio
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fsref.bench.measure import quantile, rss_bytes


class Heartbeat:
    """A 1 ms timer on the event loop and a watch on memory, while its context is open."""

    def __init__(self) -> None:
        self.late_ms: list[float] = []
        self.rss_peak = 0

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
                self.rss_peak = max(self.rss_peak, rss_bytes())

    def figures(self) -> dict[str, float]:
        """``p99_ms`` and ``longest_ms``."""
        return {"p99_ms": round(quantile(self.late_ms, 0.99), 2), "longest_ms": round(max(self.late_ms, default=0.0), 2)}


async def watched(work: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """``work`` in a thread, ``repeats`` times, beside a heartbeat: median time, pauses, and resident memory before, during and after."""
    seconds: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        loop = asyncio.get_running_loop()
        before = rss_bytes()
        async with Heartbeat() as beat:
            for _ in range(repeats):
                start = time.perf_counter()
                await loop.run_in_executor(pool, work)
                seconds.append(time.perf_counter() - start)
        after = rss_bytes()
    mib = {n: round(v / 2**20) for n, v in (("before", before), ("during", max(beat.rss_peak, before, after)), ("after", after))}
    return {"median_ms": round(statistics.median(seconds) * 1e3, 1), "pause": beat.figures(), "rss_mib": mib}


async def idle(seconds: float = 2.0) -> dict[str, float]:
    """The pauses of an event loop that does nothing."""
    async with Heartbeat() as beat:
        await asyncio.sleep(seconds)
    return beat.figures()
