"""What a role's log says about its end. Owns the choice of the one line to show; reads only the end of the file."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

BYTES_TAIL: Final = 64 << 10
_REPORTED: Final = re.compile(r"^error: ")
_RAISED: Final = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Warning|Interrupt|Exit|Failed|Missing|Corrupt|Full|Denied)\b.*"
)
LINE_MAX: Final = 400
_TASK: Final = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,\-]+): (?P<how>.+)")
"""``srun: error: n3: task 0: Killed``, ``... task 1: Exited with exit code 1``."""
_PEER: Final = "another rank"
"""What a trainer rank says whose peer has gone."""


def last_error(log: Path, *, start: int = 0) -> str:
    """The last ``error:`` line from byte ``start`` on, else the last line of a traceback, else the last line; empty for an empty or
    absent log.
    """
    lines = [line.rstrip() for line in _lines(log, start) if line.strip()]
    for pattern in (_REPORTED, _RAISED):
        for line in reversed(lines):
            if pattern.match(line):
                return line[:LINE_MAX]
    return lines[-1][:LINE_MAX] if lines else ""


def why_of_step(own: Path, start: int, reports: Mapping[Path, int]) -> str:
    """Why a step of a job failed: what ``srun`` says in its own log, and the last words of the task in its report (log: where it began).

    A task that was killed has no last words of its own, whatever stands in its log; of several failures the first that ``srun`` saw
    counts, unless another explains itself better than by the absence of its peers. Empty if nobody said anything.
    """
    ended = [m for line in _lines(own, start) if (m := _TASK.match(line))]
    if ended and "exit code" not in ended[0]["how"].lower():
        return f"failed: task {ended[0]['tasks']} on {ended[0]['node']} was ended: {ended[0]['how']}; log: {own}"
    said = [(path, line) for path, at in reports.items() if (line := last_error(path, start=at)) and _REPORTED.match(line)]
    said.sort(key=lambda found: _PEER in found[1])  # stable: in the order of the reports
    if said:
        path, line = said[0]
        return f"failed: {line}; log: {path}"
    raised = [(path, line) for path, at in reports.items() if _RAISED.match(line := last_error(path, start=at))]
    if raised:
        return f"failed: {raised[0][1]}; log: {raised[0][0]}"
    return f"failed: {ended[0][0]}; log: {own}" if ended else ""


def _lines(log: Path, start: int) -> list[str]:
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start, size - BYTES_TAIL))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
