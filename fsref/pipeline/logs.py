"""What a role's log says about its end. Owns the choice of the one line to show; reads only the end of the file."""

import re
from pathlib import Path
from typing import Final

BYTES_TAIL: Final = 64 << 10
_REPORTED: Final = re.compile(r"^error: ")
_RAISED: Final = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Warning|Interrupt|Exit|Failed|Missing|Corrupt|Full|Denied)\b.*"
)
LINE_MAX: Final = 400


def last_error(log: Path, *, start: int = 0) -> str:
    """The last ``error:`` line from byte ``start`` on, else the last line of a traceback, else the last line; empty for an empty or
    absent log.
    """
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start, size - BYTES_TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    for pattern in (_REPORTED, _RAISED):
        for line in reversed(lines):
            if pattern.match(line):
                return line[:LINE_MAX]
    return lines[-1][:LINE_MAX] if lines else ""
