"""What the ledger tells about single objects: kept when, dropped by whom, gone when. For people (``fsref inspect``).

Owns the look-up; the facts come from the same fold as the audit. Times are wall clocks of the writers, for information only.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fsref.errors import LedgerError, StoreError
from fsref.journal.place import Ledger
from fsref.journal.read import LedgerReader
from fsref.ledger.ids import split
from fsref.ledger.merge import Place
from fsref.ledger.records import decode_line, line_ok
from fsref.store.base import Store

State = Literal["unknown", "live", "dropped", "removed"]


@dataclass(frozen=True)
class History:
    """One object's way through the ledger. Times in milliseconds; 0 where there is none."""

    state: State = "unknown"
    """``dropped``: the decision is made, the removal is not confirmed yet."""
    byte_count: int = 0
    by: str = ""
    """The incarnation that dropped it."""
    reason: str = ""
    step: int = -1
    """The step in which it was shipped; -1 if it was not."""
    kept_ms: int = 0
    dropped_ms: int = 0
    done_ms: int = 0


def history(store: Store, ledger_dir: Path | None, object_ids: Iterable[str]) -> dict[str, History]:
    """The history of each object; ``unknown`` where no journal names it. One pass over all journals.

    Raises ``BadRef`` for an id outside the grammar, ``RunMismatch``; damaged journals count up to their damage.
    """
    wanted = [(object_id, *split(object_id)) for object_id in object_ids]
    reader = LedgerReader(Ledger.of(store, ledger_dir), compare=False)
    reader.refresh()
    run = reader.merge(accept_corrupt=True)
    times = _Times(reader)
    out: dict[str, History] = {}
    for object_id, inc, seq in wanted:
        fold = run.journals.get(inc)
        kept = fold.kept.get(seq) if fold else None
        drop = run.drops.get(inc, {}).get(seq)
        done = run.done.get(inc, {}).get(seq)
        batch = run.batch_of.get(inc, {}).get(seq)
        if kept is None and drop is None:
            out[object_id] = History()
            continue
        out[object_id] = History(
            state="live" if drop is None else "removed" if done else "dropped",
            byte_count=kept[0] if kept else 0,
            by=drop.journal if drop else "",
            reason=drop.reason if drop else "",
            step=batch[0] if batch else -1,
            kept_ms=times.at((inc, kept[1])) if kept else 0,
            dropped_ms=times.at(drop.place) if drop else 0,
            done_ms=times.at(done[:2]) if done else 0,
        )
    return out


class _Times:
    """The wall clock of the record at a place, read from its line again: the fold does not carry what it must not use."""

    def __init__(self, reader: LedgerReader) -> None:
        self._reader = reader
        self._known: dict[Place, int] = {}

    def at(self, place: Place) -> int:
        if place not in self._known:
            self._known[place] = self._read(*place)
        return self._known[place]

    def _read(self, inc: str, offset: int) -> int:
        line = self._reader.line_at(inc, offset)
        if not line_ok(line):
            raise StoreError(f"the journal of {inc} changed at {offset} while it was read")
        try:
            return decode_line(line).ms
        except LedgerError:
            return 0
