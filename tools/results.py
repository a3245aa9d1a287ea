"""What tools share that write figures: a run's metrics, and sections of docs/results.md (up to the next heading of their level)."""

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

RESULTS: Final = Path(__file__).resolve().parent.parent / "docs" / "results.md"


def replace_section(title: str, lines: Sequence[str], *, path: Path = RESULTS) -> None:
    """Replaces the section of this title, or adds it at the end."""
    text = path.read_text(encoding="utf-8")
    section = "\n".join([f"## {title}", "", *lines]) + "\n"
    head, found, rest = text.partition(f"## {title}\n")
    if not found:
        path.write_text(f"{text.rstrip()}\n\n{section}", encoding="utf-8")
        return
    _, more, tail = rest.partition("\n## ")
    path.write_text(head + section + (f"\n## {tail}" if more else ""), encoding="utf-8")


def paragraph(text: str) -> list[str]:
    """Prose as the pages have it: lines of at most 140 characters."""
    return textwrap.wrap(text, 140, break_long_words=False, break_on_hyphens=False)


def series(run_dir: Path, role: str, name: str) -> list[float]:
    """A metric's values by step, of one role of a run."""
    found: dict[int, float] = {}
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["role"] == role and name in event:
            found[event["step"]] = event[name]
    return [found[step] for step in sorted(found)]
