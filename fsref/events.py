"""Frozen records for metrics hooks.

Owns the record types, and the figures that every role has of itself (its memory). Refuses to know who listens: metrics.jsonl, wandb and
Prometheus are listeners that roles attach.
"""

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One record of one role."""

    role: str
    """``orchestrator``, ``trainer``, ``env`` or ``inference``."""
    step: int
    """The training step that it belongs to; -1 where there is none."""
    metrics: Mapping[str, float]
    """Names as in the docs' metrics table, for example ``payload/fetch_time``."""


Hook = Callable[[Event], None]


class JsonLines:
    """A hook that appends one JSON line per event; lines of several processes do not tear (one ``write`` each, O_APPEND)."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def __call__(self, event: Event) -> None:
        record: dict[str, Any] = {"ms": time.time_ns() // 1_000_000, "role": event.role, "step": event.step, **event.metrics}
        self._file.write(json.dumps(record).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def memory_metrics() -> dict[str, float]:
    """Resident memory of this process now and at its highest, in bytes; the peak stands for both where the system does not say."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = float(peak if sys.platform == "darwin" else peak << 10)
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return {"memory/rss_bytes": peak_bytes, "memory/rss_peak_bytes": peak_bytes}
    return {"memory/rss_bytes": float(pages * resource.getpagesize()), "memory/rss_peak_bytes": peak_bytes}
