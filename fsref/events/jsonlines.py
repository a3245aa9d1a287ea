"""Events as lines of metrics.jsonl, which the launcher's table and everything after the run reads."""

import json
import time
from pathlib import Path
from typing import Any

from fsref.events.records import Event


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
