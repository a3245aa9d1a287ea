"""The record that every hook gets, and the figures that every role has of itself (its memory). Refuses to know who listens."""

import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

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


def memory_metrics() -> dict[str, float]:
    """Resident memory of this process now and at its highest, in bytes; the peak stands for both where the system does not say."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = float(peak if sys.platform == "darwin" else peak << 10)
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return {"memory/rss_bytes": peak_bytes, "memory/rss_peak_bytes": peak_bytes}
    return {"memory/rss_bytes": float(pages * resource.getpagesize()), "memory/rss_peak_bytes": peak_bytes}
