"""Reading every journal of a run, incrementally: what audit, adoption, recovery and inspection start from.

Owns the union of both places: a journal's file in the folder is the longer one and wins, else its sealed segments, joined. Owns opening
what other processes write: never through a symlink, never more than the size cap, damaged ones named and not trusted. Refuses journals of
another run (``RunMismatch``) and a row of segments with a gap.
"""

import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from fsref.errors import BadRef, JournalCorrupt, RunMismatch, StoreError, StoreUnavailable
from fsref.journal.catalogue import Catalogue, read_catalogue
from fsref.journal.place import Ledger
from fsref.journal.root_marks import has_mark, mark_name
from fsref.journal.segments import PREFIX, SEGMENT_BYTES_MAX, read_segment, row_of
from fsref.ledger.fold import IDS_BYTE_MAX, IDS_FREE, JournalFold
from fsref.ledger.lines import LineReader
from fsref.ledger.merge import RunFold
from fsref.ledger.records import LINE_BYTES_MAX
from fsref.redact import visible
from fsref.refs import check_incarnation

CHUNK_BYTES: Final = 1 << 20
JOURNAL_BYTES_MAX: Final = 16 << 30
FETCH_THREADS: Final = 8


@dataclass
class OpenJournal:
    """One journal while it is being read."""

    fold: JournalFold
    lines: LineReader = field(default_factory=LineReader)
    problem: str = ""
    in_folder: bool = False
    """Its file is in the folder, and is all of it."""
    dead: bool = False
    """The root has a ``.dead`` mark of it."""
    row: list[int] = field(default_factory=list)
    """Sizes of its sealed segments."""
    checked: int = 0
    """Segments that were read: compared with the file, or taken for it."""

    @property
    def end(self) -> int:
        """Offset behind the last good line."""
        return self.lines.end

    def partial(self, ledger: Ledger) -> bool:
        """Whether records may be missing behind its end: an env worker that did not close, whose file is on a node that is not this one."""
        return ledger.store is not None and not self.in_folder and not self.fold.sealed


class LedgerReader:
    """All journals of one run. ``refresh`` reads what is new; ``merge`` gives the union once reading is over."""

    def __init__(self, ledger: Ledger, *, run_uuid: str | None = None, compare: bool = True) -> None:
        """``compare`` also reads the segments of journals whose file is here, to see that they are the same."""
        self.ledger = ledger
        self._run_uuid = run_uuid
        self._compare = compare
        self.journals: dict[str, OpenJournal] = {}
        self.problems: list[str] = []
        """Problems with the folder or the root itself."""
        self.listed = False
        """Whether the folder, and the root where it is another place, could be listed at the last ``refresh``."""
        self.marked: set[str] = set()
        """Incarnations that a ``.dead`` or ``.adopted`` marker names."""
        self.dead: set[str] = set()
        """Incarnations that a ``.dead`` marker names."""

    def refresh(self, want: Callable[[str], bool] | None = None) -> dict[str, int]:
        """Reads everything that was appended since the last call. Returns journal to the offset up to which it is known.

        ``want`` chooses the incarnations whose journals are read; None: all.
        Raises ``RunMismatch`` for a journal of another run; unreadable or damaged journals become problems.
        """
        self.problems, self.listed = [], True
        found = self._list_root(PREFIX)  # before the files: they can only be longer
        files = self._list_folder()
        for inc in sorted(filter(want, files | set(found.segments))):
            self._read(inc, found.segments.get(inc, []), listed=inc in files)
        return {inc: journal.end for inc, journal in self.journals.items()}

    def names(self) -> set[str]:
        """Every incarnation that has a journal, in the folder or in the root; nothing but listings is read."""
        return self._list_folder() | set(self._list_root(PREFIX).segments)

    def refresh_all(self) -> dict[str, int]:
        """As ``refresh``, for decisions that need every journal. Raises ``StoreUnavailable`` if one may not have been seen."""
        ends = self.refresh()
        if self.problems:
            raise StoreUnavailable(f"nothing is decided while the ledger cannot be read as a whole: {'; '.join(self.problems)}")
        return ends

    def read_one(self, inc: str) -> OpenJournal | None:
        """Reads one journal only; None if it is nowhere."""
        found = self._list_root(f"{PREFIX}/{check_incarnation(inc)}")
        self._read(inc, found.segments.get(inc, []), listed=True)
        journal = self.journals.get(inc)
        if journal is not None and self.ledger.store is not None:
            journal.dead = has_mark(self.ledger.store, mark_name(inc, "dead"))
        return journal

    def line_at(self, inc: str, offset: int) -> bytes:
        """The line at an offset of a journal that was read, without its LF. Raises ``StoreError``."""
        data = self._file_bytes(inc, offset)
        if not data and self.ledger.store is not None:
            at = 0
            for n, size in enumerate(self.journals[inc].row):
                if at <= offset < at + size:
                    start = offset - at
                    data = read_segment(self.ledger.store, inc, n, byte_count=size, start=start, stop=start + LINE_BYTES_MAX)
                    break
                at += size
        return data.partition(b"\n")[0]

    def _file_bytes(self, inc: str, offset: int) -> bytes:
        fd = self._open(inc) if self.ledger.folder is not None else -1
        if fd < 0:
            return b""
        try:
            return os.pread(fd, LINE_BYTES_MAX, offset)
        except OSError as e:
            raise StoreError(f"the journal of {inc} cannot be read: {e.strerror}") from e
        finally:
            os.close(fd)

    def _list_root(self, prefix: str) -> Catalogue:
        if self.ledger.store is None:
            return Catalogue()
        try:
            found = read_catalogue(self.ledger.store, prefix)
        except StoreError as e:
            self.listed = False
            self.problems.append(f"the sealed journals under {self.ledger.text} cannot be listed: {e}")
            return Catalogue()
        self.problems += [f"{self.ledger.store.url}/{visible(name)} is not named as a part of a ledger" for name in found.odd]
        self.marked |= found.dead | found.adopted
        self.dead |= found.dead
        return found

    def _list_folder(self) -> set[str]:
        """Incarnations with a file in the folder."""
        found: set[str] = set()
        for name in self._names():
            stem, _, suffix = name.rpartition(".")
            if name.startswith(".") or suffix not in ("jnl", "dead", "adopted"):
                continue
            try:
                inc = check_incarnation(stem)
            except BadRef:
                self.problems.append(f"{self.ledger.here / visible(name)} is not named after an incarnation")
                continue
            if suffix == "jnl":
                found.add(inc)
            else:
                self.marked.add(inc)
                self.dead |= {inc} if suffix == "dead" else set()
        return found

    def _names(self) -> list[str]:
        folder = self.ledger.folder
        if folder is None:
            return []
        if folder.is_symlink():
            self.listed = False
            self.problems.append(f"the ledger folder {folder} is a symbolic link: refused")
            return []
        try:
            return sorted(path.name for path in folder.iterdir())
        except FileNotFoundError:
            if self.ledger.store is None:
                self.listed = False
                self.problems.append(f"the ledger folder {folder} is not there")
        except OSError as e:
            self.listed = False
            self.problems.append(f"the ledger folder {folder} cannot be listed: {e.strerror}")
        return []

    def _read(self, inc: str, listed_segments: list[tuple[int, int]], *, listed: bool) -> None:
        fd = self._open(inc) if listed and self.ledger.folder is not None else -1
        try:
            if fd < 0 and not listed_segments and inc not in self.journals:
                return
            journal = self.journals.setdefault(inc, OpenJournal(JournalFold(inc)))
            journal.dead = inc in self.dead
            try:
                self._read_new(journal, fd, listed_segments)
            except JournalCorrupt as e:
                journal.problem = f"the journal {self._where(inc, fd)} is damaged: {e}"
            except OSError as e:
                self.problems.append(f"the journal {self._where(inc, fd)} cannot be read: {e.strerror or e}")
        finally:
            if fd >= 0:
                os.close(fd)

    def _open(self, inc: str) -> int:
        """The journal's file; -1 where there is none or it cannot be opened (then it is a problem)."""
        path = self.ledger.here / f"{inc}.jnl"
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return -1
        except OSError as e:
            self.problems.append(f"the journal {path} cannot be opened: {e.strerror}")
            return -1

    def _where(self, inc: str, fd: int) -> str:
        return str(self.ledger.here / f"{inc}.jnl") if fd >= 0 else f"{self.ledger.text}/{inc}"

    def _read_new(self, journal: OpenJournal, fd: int, listed: list[tuple[int, int]]) -> None:
        size = _size_of(fd) if fd >= 0 else 0
        row, damage = row_of(listed, bytes_max=JOURNAL_BYTES_MAX)
        if row[: len(journal.row)] != journal.row:
            raise JournalCorrupt("a segment that was there is gone, or has another size")
        journal.row = row
        journal.in_folder = fd >= 0 and size >= sum(row)
        if max(size, sum(row)) < journal.lines.size:
            raise JournalCorrupt(f"it had {journal.lines.size} bytes and has {max(size, sum(row))} now: it was truncated")
        if journal.problem:
            return
        self._check_named()
        if self._compare or not journal.in_folder:
            self._read_segments(journal, fd)
        if journal.in_folder:
            os.lseek(fd, journal.lines.size, os.SEEK_SET)
            while chunk := os.read(fd, CHUNK_BYTES):
                self._feed(journal, chunk)
        if damage:
            raise JournalCorrupt(damage)

    def _read_segments(self, journal: OpenJournal, fd: int) -> None:
        """Segments that were not read before: fed where they are the journal, compared with the file where there is one."""
        store, inc, row = self.ledger.store, journal.fold.inc, journal.row
        if store is None or journal.checked == len(row):
            return
        at = sum(row[: journal.checked])
        with ThreadPoolExecutor(FETCH_THREADS) as pool:
            while window := _window(row, journal.checked):
                for data in pool.map(lambda n: read_segment(store, inc, n, byte_count=row[n]), window):
                    self._accept(journal, fd, data, at=at)
                    at += len(data)
                    journal.checked += 1

    def _accept(self, journal: OpenJournal, fd: int, data: bytes, *, at: int) -> None:
        if fd >= 0 and not data.startswith(os.pread(fd, len(data), at)):
            raise JournalCorrupt(f"its file and its sealed segment differ behind {at}")
        known = journal.lines.size - at
        if not journal.in_folder and known < len(data):
            self._feed(journal, data[max(0, known) :])

    def _feed(self, journal: OpenJournal, chunk: bytes) -> None:
        for offset, record in journal.lines.feed(chunk):
            journal.fold.feed(offset, record)
            if offset == 0:
                self._check_run(journal.fold)
        self._check_named()

    def _check_named(self) -> None:
        """Many small journals that each name as many ids as one may are no honest ledger either."""
        named = sum(j.fold.ids_named for j in self.journals.values())
        if named > IDS_FREE + IDS_BYTE_MAX * sum(j.lines.size for j in self.journals.values()):
            raise JournalCorrupt(f"the journals up to here name {named} ids, more than their size explains")

    def _check_run(self, fold: JournalFold) -> None:
        if self._run_uuid is not None and fold.open is not None and fold.open.run_uuid != self._run_uuid:
            raise RunMismatch(
                f"the journal of {fold.inc} in {self.ledger.text} belongs to a run with run_uuid {fold.open.run_uuid[:40]}, "
                f"this run has {self._run_uuid}: the folder was used by another run"
            )

    def merge(self, *, accept_corrupt: bool = False) -> RunFold:
        """The union of all journals; call it last, it cuts the folds where they were adopted. Damaged journals count up to their damage.

        ``accept_corrupt`` leaves damage out of the problems (an operator decided that).
        """
        problems = list(self.problems)
        journals = {inc: j.fold for inc, j in self.journals.items() if j.fold.open is not None}
        problems += [j.problem for j in self.journals.values() if j.problem and not accept_corrupt]
        problems += [f"the journal of {inc} is missing: only its marker is there" for inc in sorted(self.marked - set(self.journals))]
        run = RunFold(journals, problems)
        run.problems += [f"the journal of {inc} is missing, but other journals name it" for inc in run.missing_journals()]
        for inc, journal in self.journals.items():
            found = run.adoption_of(inc)
            if found is not None and found[1].end > journal.end and not journal.problem:
                run.problems.append(
                    f"the journal of {inc} is truncated: {found[0]} read {found[1].end} bytes of it, {journal.end} are there"
                )
        return run


def _window(row: list[int], start: int) -> range:
    """The next segments to fetch side by side: a few, and together not more than the largest single one may be."""
    stop, total = start, 0
    while stop < len(row) and stop - start < FETCH_THREADS and (stop == start or total + row[stop] <= SEGMENT_BYTES_MAX):
        total += row[stop]
        stop += 1
    return range(start, stop)


def _size_of(fd: int) -> int:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1 or info.st_size > JOURNAL_BYTES_MAX:
        raise JournalCorrupt(f"it is not a regular file with one name and at most {JOURNAL_BYTES_MAX} bytes")
    return info.st_size
