"""Journals in memory: records with the offsets that they would have in files, folded and judged without any I/O."""

from collections.abc import Callable, Iterable, Mapping

from fsref.ledger.fold import JournalFold
from fsref.ledger.ids import pack, sum_of
from fsref.ledger.merge import RunFold
from fsref.ledger.predicates import Evidence, StoreView, violations
from fsref.ledger.records import Adopt, AnyRecord, Close, Done, Drop, Keep, Open, Ship, StepRecord, Take, encode_line
from fsref.ledger.report import Audit, conclude

UUID = "0" * 32


class Book:
    """One journal being written."""

    def __init__(self, inc: str, *, boot: str = "boot") -> None:
        self.inc = inc
        self.records: list[tuple[int, AnyRecord]] = []
        self.end = self.synced = 0
        self.add(Open(0, 1, UUID, inc, "host", boot, 1, 1, "user", "test"))
        self.sync()

    def sync(self) -> None:
        """Makes what is there durable: a power loss cannot take it."""
        self.synced = self.end

    def lose_tail(self, keep_share: float) -> None:
        """A power loss: of the records that were not synced, only the first ``keep_share`` are left."""
        unsynced = [at for at, _ in self.records if at >= self.synced]
        if unsynced:
            at = [*unsynced, self.end][int(keep_share * len(unsynced))]
            self.records = [r for r in self.records if r[0] < at]
            self.end = at

    def add(self, record: AnyRecord) -> int:
        at = self.end
        self.records.append((at, record))
        self.end += len(encode_line(record))
        return at

    def keep(self, *seqs: int, byte_count: int = 100) -> None:
        for seq in seqs:
            self.add(Keep(0, seq, byte_count, 1, 10, 1))

    def take(self, *ids: str) -> int:
        return self.add(Take(0, "q", pack(ids)))

    def ship(self, step: int, *ids: str) -> int:
        return self.add(Ship(0, step, len(ids), 100 * len(ids), sum_of(ids), pack(ids)))

    def step(self, step: int, *ids: str, st: str = "taken", miss: Mapping[str, Iterable[str]] | None = None) -> int:
        classes = {kind: pack(missed) for kind, missed in (miss or {}).items()}
        return self.add(StepRecord(0, step, st, len(ids), sum_of(ids), classes))

    def drop(self, reason: str, *ids: str) -> int:
        return self.add(Drop(0, reason, pack(ids)))

    def drop_steps(self, lo: int, hi: int) -> int:
        return self.add(Drop(0, "trained", steps=(lo, hi)))

    def done(self, *ids: str, attempt: int = 1, absent: Iterable[str] = ()) -> int:
        return self.add(Done(0, pack(ids), a=pack(absent), k=attempt))

    def done_steps(self, lo: int, hi: int) -> int:
        return self.add(Done(0, steps=(lo, hi)))

    def adopt(self, h: "Book", *, how: str = "dead", n: int | None = None, extra: str = "", void: str = "", lost: str = "") -> int:
        return self.add(Adopt(0, h.inc, how, h.end, n, extra, void, lost))

    def close(self, *, n: int | None = None, void: str = "", **counters: int) -> int:
        return self.add(Close(0, n, {k: v for k, v in counters.items() if v}, void))

    def fold(self) -> JournalFold:
        fold = JournalFold(self.inc)
        for at, record in self.records:
            fold.feed(at, record)
        return fold


def env(label: str = "a", boot: int = 1) -> Book:
    return Book(f"env.{label}.{boot:016x}")


def orc(boot: int = 2) -> Book:
    return Book(f"orc.main.{boot:016x}")


def trn(boot: int = 3) -> Book:
    return Book(f"trn.main.{boot:016x}")


def rec(boot: int = 4) -> Book:
    return Book(f"rec.main.{boot:016x}")


def ids(book: Book, *seqs: int) -> list[str]:
    return [f"{book.inc}/{seq}" for seq in seqs]


def merged(*books: Book) -> RunFold:
    return RunFold({book.inc: book.fold() for book in books})


def evidence(*books: Book, present: Iterable[str] = (), change: Callable[[RunFold], None] | None = None, final: bool = False) -> Evidence:
    run = merged(*books)
    if change:
        change(run)
    view: dict[str, set[int]] = {}
    for object_id in present:
        inc, seq = object_id.split("/")
        view.setdefault(inc, set()).add(int(seq))
    return Evidence(run, StoreView(view), complete=not run.problems, final=final)


def broken(*books: Book, present: Iterable[str] = (), final: bool = False) -> set[str]:
    """The predicates that fail."""
    return {v.predicate for v in violations(evidence(*books, present=present, final=final))}


def judged(*books: Book, present: Iterable[str] = (), final: bool = False) -> Audit:
    return conclude("r", evidence(*books, present=present, final=final))
