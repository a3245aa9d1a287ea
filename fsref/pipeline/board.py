"""What a person sees while a run goes on: a live table on a terminal, plain lines elsewhere.

Owns the output of the launcher. Nothing here is read back by anyone.
"""

import sys
import time
from types import TracebackType
from typing import Final, Protocol, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fsref.pipeline.metrics import TITLES, Follower

ROWS_SHOWN: Final = 12


class Board(Protocol):
    """How the launcher speaks. A context manager."""

    def say(self, text: str) -> None:
        """One line that stays."""

    def refresh(self, follower: Follower) -> None:
        """Shows what is new; called a few times a second."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class PlainBoard:
    """One line for each event and each finished step."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._start = time.monotonic()
        self._headed = False
        self._shown = -1

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:7.1f} s] {text}", file=self._out, flush=True)

    def refresh(self, follower: Follower) -> None:
        follower.read()
        for step in sorted(s for s in follower.steps if s > self._shown and follower.complete(s)):
            self._shown = step
            self.say("  ".join(f"{t} {c}" for t, c in zip(TITLES, follower.cells(step), strict=True)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass


class LiveBoard:
    """A table of the newest steps that is drawn in place, with the launcher's lines above it."""

    def __init__(self, console: Console, *, title: str, steps: int) -> None:
        self._console = console
        self._title = title
        self._steps = steps
        self._start = time.monotonic()
        self._status = "starting"
        self._table: Table | None = None
        self._live = Live(console=console, refresh_per_second=4, transient=False, get_renderable=self._render)

    def say(self, text: str) -> None:
        self._status = text
        self._console.print(f"[dim]{time.monotonic() - self._start:7.1f} s[/dim]  ", Text(text), sep="")

    def refresh(self, follower: Follower) -> None:
        follower.read()
        table = Table(title=self._title, title_justify="left", caption_justify="left")
        for title in TITLES:
            table.add_column(title, justify="right", no_wrap=True)
        for step in sorted(follower.steps)[-ROWS_SHOWN:]:
            table.add_row(*follower.cells(step))
        done = sum(map(follower.complete, follower.steps))
        table.caption = f"{done} of {self._steps} steps trained, {time.monotonic() - self._start:.0f} s"
        self._table = table

    def _render(self) -> Group:
        return Group(*([self._table] if self._table is not None and self._table.row_count else [Text(self._status, style="dim")]))

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.__exit__(kind, error, trace)


def make_board(*, title: str, steps: int) -> Board:
    """The live one if stdout is a terminal, else the plain one."""
    return LiveBoard(Console(), title=title, steps=steps) if sys.stdout.isatty() else PlainBoard(sys.stdout)
