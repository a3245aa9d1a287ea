"""Interleaved repeats: every method has its turn in every round, in a rotating order, so that what else the machine does meets all alike.

A turn is a method at work, as a trainer's step is: one run that is not counted (threads wake up, caches fill with this method's data), then
runs for ``TURN_S``. Single runs of some 20 ms say more about where the kernel had put the threads that the method before left asleep.

Owns timing and its statistics. Refuses to know what is measured.
"""

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fsref.objects.native import ABOUT, KERNELS

TURN_S: Final = 0.12
"""Seconds of a turn at least; a single run where that takes longer."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one run, in each round: the mean of a turn."""

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    """Of this process, all threads."""

    def figures(self, raw_bytes: int = 0) -> dict[str, float]:
        """Median, least and most, in milliseconds; with ``raw_bytes`` also GB/s at the median."""
        median = statistics.median(self.wall_s)
        out = {
            "ms": round(median * 1e3, 3),
            "ms_min": round(min(self.wall_s) * 1e3, 3),
            "ms_max": round(max(self.wall_s) * 1e3, 3),
            "cpu_ms": round(statistics.median(self.cpu_s) * 1e3, 3),
        }
        return out | ({"gb_per_s": round(raw_bytes / median / 1e9, 2)} if raw_bytes else {})


def _nothing() -> None:
    """After a turn that leaves nothing behind."""


def interleaved(
    cases: Mapping[str, Callable[[], Any]], *, repeats: int, turn_s: float = TURN_S, after: Callable[[], None] = _nothing
) -> dict[str, Timing]:
    """Times every case in ``repeats`` rounds. Rounds start with another case each time.

    ``turn_s`` 0: one run is a turn, after one that is not counted. ``after`` runs behind every turn, for what it left on disk.
    """
    names = list(cases)
    turns: dict[str, list[tuple[float, float]]] = {n: [] for n in names}
    for round_ in range(repeats):
        for n in range(len(names)):
            name = names[(n + round_) % len(names)]
            turns[name].append(_turn(cases[name], turn_s))
            after()
    return {n: Timing(tuple(w for w, _ in t), tuple(c for _, c in t)) for n, t in turns.items()}


def _turn(case: Callable[[], Any], turn_s: float) -> tuple[float, float]:
    """Seconds of one run on the clock and of the processor."""
    case()
    gc.collect()
    gc.disable()
    runs = 0
    try:
        start_cpu, start = time.process_time(), time.perf_counter()
        while not runs or time.perf_counter() - start < turn_s:
            case()
            runs += 1
        return (time.perf_counter() - start) / runs, (time.process_time() - start_cpu) / runs
    finally:
        gc.enable()


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one method is as another: by round, so that both met the same machine."""

    median: float
    least: float
    most: float
    cpu: float
    """The same by processor time of this process, which other work on the machine disturbs less."""

    def text(self) -> str:
        """``1.25 (1.20-1.31)``."""
        return f"{self.median:.2f} ({self.least:.2f}-{self.most:.2f})"


def ratio(timings: Mapping[str, Timing], fast: str, slow: str) -> Ratio | None:
    """Speed of ``fast`` over that of ``slow``; None where one was not measured."""
    if fast not in timings or slow not in timings:
        return None
    each = [s / f for s, f in zip(timings[slow].wall_s, timings[fast].wall_s, strict=True)]
    cpu = statistics.median(timings[slow].cpu_s) / max(statistics.median(timings[fast].cpu_s), 1e-9)
    return Ratio(round(statistics.median(each), 3), round(min(each), 3), round(max(each), 3), round(cpu, 3))


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)] if ordered else 0.0


def rss_bytes() -> int:
    """Resident memory of this process now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rss_peak_bytes() -> int:
    """Highest resident memory of this process since the mark was reset; ``ru_maxrss`` would include the process that started it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def peak_growth(work: Callable[[], Any]) -> int:
    """Bytes by which ``work`` raised the resident memory at its highest; -1 where the system does not let the mark be reset."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return -1
    before = rss_bytes()
    work()
    return max(0, rss_peak_bytes() - before)


def machine() -> str:
    """For people: cores, processor, Python, kernels."""
    kernels = f"kernels with {ABOUT}" if KERNELS is not None else "no compiled kernels"
    return f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, Python {platform.python_version()}, {kernels}"
