"""The fold of one journal: a set of facts, each with the offset that proves it.

Owns what a single journal says, in a form that merges by union (``fsref.ledger.merge``). Refuses records that no correct writer
produces in that order (no ``open`` first, anything after ``close``, a broken group of parts): ``JournalCorrupt``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from fsref.errors import BadRef, JournalCorrupt
from fsref.ledger.ids import IDS_RECORD_MAX, unpack, unpack_seqs
from fsref.ledger.records import VERSION, Adopt, AnyRecord, Close, Done, Drop, Keep, Open, Ship, StepRecord, Take
from fsref.refs import check_incarnation

IDS_JOURNAL_MAX: Final = 1 << 30
"""Ids that one journal may name, counted with repetition."""
IDS_FREE: Final = 1 << 21
IDS_BYTE_MAX: Final = 128
"""So many ids for each byte of the journal, beyond ``IDS_FREE``: ranges are short and ids cost memory. Writers put at most
``IDS_PART_MAX`` ids into a line, so an honest journal stays below."""
VOID_SEQS_MAX: Final = 1 << 20
"""Sequence numbers are dense: so many may be minted without a keep, more is no honest journal."""
SeqMap = dict[str, dict[int, Any]]
"""Producer to seq to fact."""


class ShipFact(NamedTuple):
    """A shipped step as one journal tells it."""

    step: int
    n: int
    byte_count: int
    checksum: int
    offset: int
    ids: dict[str, list[int]]


class StepFact(NamedTuple):
    """A ``step`` record; ``key`` names the batch."""

    n: int
    checksum: int
    offset: int


class StepRange(NamedTuple):
    """A drop or done over steps, both ends included."""

    lo: int
    hi: int
    offset: int
    attempt: int = 1
    reason: str = ""


@dataclass
class Adoption:
    """An ``adopt`` record, parts merged."""

    h: str
    how: str
    end: int
    n: int | None
    offset: int
    extra: set[int] = field(default_factory=set)
    void: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)


class JournalFold:
    """What one journal says. ``feed`` in order of offsets; then read only."""

    def __init__(self, inc: str, *, ids_max: int = IDS_JOURNAL_MAX) -> None:
        self.inc = check_incarnation(inc)
        self.role = inc.partition(".")[0]
        self.open: Open | None = None
        self.close: Close | None = None
        self.last = -1
        """Offset of the last record that took effect."""
        self.count = 0
        self.kept: dict[int, tuple[int, int]] = {}
        """Seq to (bytes, offset)."""
        self.kept_bytes = 0
        self.taken: SeqMap = {}
        """To offset."""
        self.ships: dict[int, ShipFact] = {}
        self.shipped: SeqMap = {}
        """To (step, offset)."""
        self.steps: dict[int, list[StepFact]] = {}
        """Step to its ``taken`` records."""
        self.used: dict[int, list[StepFact]] = {}
        self.missed: dict[int, SeqMap] = {}
        """Step to the ids that could not be fetched, to their class."""
        self.drops: SeqMap = {}
        """To (offset, reason)."""
        self.step_drops: list[StepRange] = []
        self.done: SeqMap = {}
        """To (offset, attempt)."""
        self.step_done: list[StepRange] = []
        self.absent: SeqMap = {}
        """Ids that a first attempt found absent, to offset."""
        self.adopts: dict[str, Adoption] = {}
        self.void: set[int] = set()
        """What the close says never held an object."""
        self.repeats: list[tuple[str, str, int, int]] = []
        """(predicate, id, first offset, second offset): what this journal does twice."""
        self.ids_named = 0
        """With repetition: what the fold costs."""
        self._ids_max = ids_max
        self._offset = 0
        self._parts: list[tuple[int, AnyRecord]] = []

    @property
    def sealed(self) -> bool:
        """Whether it ended with ``close``."""
        return self.close is not None

    def feed(self, offset: int, record: AnyRecord) -> None:
        """Adds one record. Raises ``JournalCorrupt``."""
        self._offset = offset
        kind = type(record)
        if self.open is None or self.close is not None or kind is Open:
            self._check_order(offset, record)
        part = None if kind in _WHOLE else record.part  # type: ignore[union-attr]
        if part is None and not self._parts:
            _APPLY[kind](self, offset, record)
        else:
            self._feed_part(offset, record, part)
            if self._parts:
                return
        self.last = offset
        self.count += 1

    def _check_order(self, offset: int, record: AnyRecord) -> None:
        if self.open is None and not isinstance(record, Open):
            raise JournalCorrupt(f"{self.inc}: the first record is {type(record).__name__}, not open")
        if self.close is not None:
            raise JournalCorrupt(f"{self.inc}: a record at {offset} follows the close")
        if self.open is not None and isinstance(record, Open):
            raise JournalCorrupt(f"{self.inc}: a second open at {offset}")
        if isinstance(record, Open):
            if record.v > VERSION:
                raise JournalCorrupt(f"{self.inc}: written in format {record.v}, this version reads up to {VERSION}: use a newer fsref")
            if record.inc != self.inc:
                raise JournalCorrupt(f"{self.inc}: its open record names {record.inc[:80]!r}: the file was renamed or copied")

    def _feed_part(self, offset: int, record: AnyRecord, part: tuple[int, int] | None) -> None:
        """A set split over records takes effect when its last part is there; a group that breaks off at the end never does."""
        k, m = part or (0, 0)
        first = self._parts[0][1] if self._parts else record
        same = type(first) is type(record) and getattr(first, "part", (0, 0))[1] == m
        if k != len(self._parts) + 1 or (k > 1 and not same) or k > m:
            raise JournalCorrupt(f"{self.inc}: part {k} of {m} at {offset} does not continue a group of {len(self._parts)}")
        self._parts.append((offset, record))
        if k == m:
            for _, piece in self._parts:
                _APPLY[type(piece)](self, offset, piece)
            self._parts = []

    def _unpack(self, packed: dict[str, str]) -> dict[str, list[int]]:
        ids = unpack(packed)
        self._spend(sum(map(len, ids.values())))
        return ids

    def _spend(self, count: int) -> None:
        named = self.ids_named = self.ids_named + count
        if named > self._ids_max or named > IDS_FREE + IDS_BYTE_MAX * self._offset:
            raise JournalCorrupt(f"{self.inc}: names {self.ids_named} ids in {self._offset} bytes, more ids than the limit")

    def _open(self, _: int, record: Open) -> None:
        self.open = record

    def _keep(self, offset: int, record: Keep) -> None:
        if self.role != "env":
            raise JournalCorrupt(f"{self.inc}: keep at {offset}, which only env incarnations write")
        kept, seq = self.kept, record.s
        if seq > len(kept) + VOID_SEQS_MAX:
            raise JournalCorrupt(f"{self.inc}: keep of number {seq} at {offset} after {len(kept)} keeps: numbers are dense")
        if seq in kept:
            self.repeats.append(("I1", f"{self.inc}/{seq}", kept[seq][1], offset))
            return
        self._spend(1)
        kept[seq] = (record.b, offset)
        self.kept_bytes += record.b

    def _take(self, offset: int, record: Take) -> None:
        for inc, seqs in self._unpack(record.i).items():
            _add_first(self.taken.setdefault(inc, {}), seqs, offset)

    def _ship(self, offset: int, record: Ship) -> None:
        ids = self._unpack(record.i)
        known = self.ships.get(record.step)
        if known is None:
            self.ships[record.step] = ShipFact(record.step, record.n, record.b, record.sum, offset, ids)
        elif known.offset == offset:  # a further part
            for inc, seqs in ids.items():
                known.ids.setdefault(inc, []).extend(seqs)
        else:
            self.repeats.append(("I7", f"step {record.step}", known.offset, offset))
        fact = (record.step, offset)
        for inc, seqs in ids.items():
            into = self.shipped.setdefault(inc, {})
            self.repeats += [("I7", f"{inc}/{seq}", into[seq][1], offset) for seq in _add_first(into, seqs, fact)]

    def _step(self, offset: int, record: StepRecord) -> None:
        fact = StepFact(record.n, record.sum, offset)
        (self.steps if record.st == "taken" else self.used).setdefault(record.step, []).append(fact)
        for kind, packed in record.miss.items():
            into = self.missed.setdefault(record.step, {})
            for inc, seqs in self._unpack(packed).items():
                into.setdefault(inc, {}).update(dict.fromkeys(seqs, kind))

    def _drop(self, offset: int, record: Drop) -> None:
        if record.steps is not None:
            self.step_drops.append(StepRange(*record.steps, offset, 1, record.r))
            return
        fact = (offset, record.r)
        for inc, seqs in self._unpack(record.i).items():
            into = self.drops.setdefault(inc, {})
            self.repeats += [("I2", f"{inc}/{seq}", into[seq][0], offset) for seq in _add_first(into, seqs, fact)]

    def _done(self, offset: int, record: Done) -> None:
        if record.steps is not None:
            self.step_done.append(StepRange(*record.steps, offset, record.k))
        fact = (offset, record.k)
        for inc, seqs in self._unpack(record.i).items():
            _add_first(self.done.setdefault(inc, {}), seqs, fact)
        if record.a and record.k == 1:
            for inc, seqs in self._unpack(record.a).items():
                self.absent.setdefault(inc, {}).update(dict.fromkeys(seqs, offset))

    def _adopt(self, offset: int, record: Adopt) -> None:
        try:
            check_incarnation(record.h)
        except BadRef as e:
            raise JournalCorrupt(f"{self.inc}: adopt at {offset}: {e}") from e
        known = self.adopts.get(record.h)
        if known is None or known.offset != offset:
            if known is not None:
                self.repeats.append(("I8", record.h, known.offset, offset))
                return
            known = self.adopts[record.h] = Adoption(record.h, record.how, record.end, record.n, offset)
        for text, into in ((record.extra, known.extra), (record.void, known.void), (record.lost, known.lost)):
            if text:
                seqs = unpack_seqs(text, ids_max=IDS_RECORD_MAX)
                self._spend(len(seqs))
                into.update(seqs)

    def _close(self, offset: int, record: Close) -> None:
        if record.n is not None and record.n > len(self.kept) + VOID_SEQS_MAX:
            raise JournalCorrupt(f"{self.inc}: close at {offset} counts {record.n} numbers after {len(self.kept)} keeps: numbers are dense")
        if record.void:
            self.void.update(unpack_seqs(record.void))
            self._spend(len(self.void))
        self.close = record

    def cut(self, end: int) -> int | None:
        """Forgets every fact at or behind offset ``end`` (the journal was adopted there). Returns the last forgotten offset, if any."""
        if self.last < end:
            return None
        cut_at, self.last = self.last, end - 1
        self.kept = {s: k for s, k in self.kept.items() if k[1] < end}
        self.kept_bytes = sum(b for b, _ in self.kept.values())
        self.taken = _before(self.taken, end, int)
        self.ships = {s: k for s, k in self.ships.items() if k.offset < end}
        self.shipped = _before(self.shipped, end, lambda fact: int(fact[1]))
        for steps in (self.steps, self.used):
            for step in list(steps):
                steps[step] = [f for f in steps[step] if f.offset < end]
                if not steps[step]:
                    del steps[step]
        self.drops = _before(self.drops, end, lambda fact: int(fact[0]))
        self.done = _before(self.done, end, lambda fact: int(fact[0]))
        self.absent = _before(self.absent, end, int)
        self.step_drops = [r for r in self.step_drops if r.offset < end]
        self.step_done = [r for r in self.step_done if r.offset < end]
        self.adopts = {h: a for h, a in self.adopts.items() if a.offset < end}
        self.repeats = [r for r in self.repeats if r[3] < end]
        self.close = None
        self.void = set()
        return cut_at


def _add_first(into: dict[int, Any], seqs: list[int], fact: object) -> list[int]:
    """Gives each number the fact that it has not got yet; returns those that had one. All numbers of a set share one fact."""
    if into.keys().isdisjoint(seqs):
        into.update(dict.fromkeys(seqs, fact))
        return []
    known = [seq for seq in seqs if seq in into]
    into.update((seq, fact) for seq in seqs if seq not in into)
    return known


def _before(facts: SeqMap, end: int, offset_of: Callable[[Any], int]) -> SeqMap:
    return {inc: {s: f for s, f in seqs.items() if offset_of(f) < end} for inc, seqs in facts.items()}


_WHOLE: Final = frozenset({Open, Keep, Close})
"""Records that are never split."""
_APPLY: Final[dict[type, Callable[[JournalFold, int, Any], None]]] = {
    Open: JournalFold._open,  # noqa: SLF001
    Keep: JournalFold._keep,  # noqa: SLF001
    Take: JournalFold._take,  # noqa: SLF001
    Ship: JournalFold._ship,  # noqa: SLF001
    StepRecord: JournalFold._step,  # noqa: SLF001
    Drop: JournalFold._drop,  # noqa: SLF001
    Done: JournalFold._done,  # noqa: SLF001
    Adopt: JournalFold._adopt,  # noqa: SLF001
    Close: JournalFold._close,  # noqa: SLF001
}
