"""The newest figures in Prometheus' text format, in a file that its node exporter collects (``--collector.textfile.directory``).

Owns the file, which is replaced as a whole and never read half. Refuses to serve HTTP: a training process opens no port for its metrics.
"""

import math
import re
from pathlib import Path
from typing import Final

from fsref.events.records import Event

_FOREIGN: Final = re.compile(r"[^a-zA-Z0-9_]")


class TextFile:
    """A hook that keeps the newest value of each metric; ``payload/fetch_time`` is ``fsref_payload_fetch_time``."""

    def __init__(self, path: Path, *, run: str, role: str) -> None:
        """``run`` and ``role`` are the labels of every value. The file stays when the process ends: it says what was last."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._labels = path, f'{{run="{_escaped(run)}",role="{_escaped(role)}"}}'
        self._values: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        if event.step >= 0:
            self._values["fsref_step"] = float(event.step)
        self._values |= {"fsref_" + _FOREIGN.sub("_", name): value for name, value in event.metrics.items()}
        lines = [f"# TYPE {name} gauge\n{name}{self._labels} {_number(self._values[name])}\n" for name in sorted(self._values)]
        staging = self._path.with_name(f".{self._path.name}.tmp")
        staging.write_text("".join(lines), encoding="utf-8")
        staging.replace(self._path)

    def close(self) -> None:
        """Nothing is open between events."""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else f"{'+' if value > 0 else '-'}Inf"
