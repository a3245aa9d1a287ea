"""Sections of docs/results.md that a tool writes: between the heading and the next one of its level."""

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
