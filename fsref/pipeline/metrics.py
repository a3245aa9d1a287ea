"""Follows a run's metrics.jsonl and keeps one row per step for people.

Owns the choice of columns and how they are printed. Refuses to judge: a metric that nobody wrote shows as ``-``.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

LAUNCHER: Final = "launcher"
"""Role of the line that says from where a run went on after an interruption."""
TRAINED: Final = "resume/trained"
"""The trainer's lines of this step and later ones, before it, are of an attempt that was given up."""
PUBLISHED: Final = "resume/published"
"""The same for the orchestrator."""
STEPS_KEPT: Final = 10_000


class Column(NamedTuple):
    """One column: which metric of which roles, and how it reads."""

    title: str
    metric: str
    roles: tuple[str, ...]
    show: Callable[[float], str]
    summed: bool = False
    """Several records of a step add up (bytes); else the newest counts."""


def show_bytes(count: float) -> str:
    """``412 B``, ``1.5 KiB``, ``2.3 GiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def _number(value: float) -> str:
    return f"{value:.4f}"


def _small(value: float) -> str:
    return f"{value:.2e}"


def _seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _whole(value: float) -> str:
    return f"{value:.0f}"


BOTH: Final = ("orchestrator", "trainer")
COLUMNS: Final[Sequence[Column]] = (
    Column("reward", "reward/mean", ("orchestrator",), _number),
    Column("mismatch KL", "mismatch_kl/mean", ("trainer",), _small),
    Column("orch RSS", "memory/rss_bytes", ("orchestrator",), show_bytes),
    Column("kept", "payload/bytes_kept", ("orchestrator",), show_bytes, summed=True),
    Column("fetched", "payload/bytes_fetched", ("trainer",), show_bytes, summed=True),
    Column("removed", "payload/bytes_removed", BOTH, show_bytes, summed=True),
    Column("fetch exposed", "payload/fetch_time_exposed", ("trainer",), _seconds),
    Column("hidden", "payload/fetch_time_hidden", ("trainer",), _seconds),
    Column("dropped mb", "payload/dropped_micro_batches", ("trainer",), _whole, summed=True),
)
TITLES: Final = ("step", *(c.title for c in COLUMNS))


class Follower:
    """Reads what was appended since the last call. Close it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        self.steps: dict[int, dict[str, float]] = {}
        """By step, then by column title; the newest ``STEPS_KEPT`` steps."""

    def read(self) -> list[int]:
        """The steps whose rows changed, ascending."""
        changed = set()
        for record in self._records():
            if record.get("role") == LAUNCHER:
                changed |= self._forget(record)
                continue
            step = record.get("step")
            if type(step) is int and step >= 0 and self._add(step, record):
                changed.add(step)
        while len(self.steps) > STEPS_KEPT:
            self.steps.pop(min(self.steps))
        return sorted(changed & self.steps.keys())

    def skip(self) -> None:
        """What is there by now is not shown again."""
        self.read()
        self.steps.clear()

    def _forget(self, record: dict[str, object]) -> set[int]:
        """Values of the attempt that was given up; of a column of both roles only the whole can go."""
        first = {"trainer": record.get(TRAINED), "orchestrator": record.get(PUBLISHED)}
        changed = set()
        for step, row in self.steps.items():
            over = {role for role, at in first.items() if isinstance(at, int | float) and step >= at}
            for column in COLUMNS:
                if over & set(column.roles) and row.pop(column.title, None) is not None:
                    changed.add(step)
        return changed

    def _records(self) -> Iterator[dict[str, object]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # the file is for people; a torn line must not end a run
            if isinstance(record, dict):
                yield record

    def _add(self, step: int, record: dict[str, object]) -> bool:
        row = self.steps.setdefault(step, {})
        found = False
        for column in COLUMNS:
            value = record.get(column.metric)
            if record.get("role") in column.roles and isinstance(value, int | float):
                row[column.title] = float(value) + (row.get(column.title, 0.0) if column.summed else 0.0)
                found = True
        return found

    def cells(self, step: int) -> list[str]:
        """The row of a step as text, in the order of ``TITLES``."""
        row = self.steps.get(step, {})
        return [str(step), *(c.show(row[c.title]) if c.title in row else "-" for c in COLUMNS)]

    def complete(self, step: int) -> bool:
        """Whether the trainer has reported the step."""
        return COLUMNS[1].title in self.steps.get(step, {})
