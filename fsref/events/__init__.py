"""Frozen metric records and who listens to them: metrics.jsonl, and a Weights & Biases run or a Prometheus text file where asked for.

Roles make an ``Event`` and call a hook with it; they do not know who listens.
"""

from fsref.events.backends import Backends, MetricsSettings, check_installed, open_backends
from fsref.events.jsonlines import JsonLines
from fsref.events.records import Event, Hook, memory_metrics
from fsref.events.textfile import TextFile
from fsref.events.tracking import Tracking

__all__ = [
    "Backends",
    "Event",
    "Hook",
    "JsonLines",
    "MetricsSettings",
    "TextFile",
    "Tracking",
    "check_installed",
    "memory_metrics",
    "open_backends",
]
