"""Reading every journal of a run, incrementally: what audit, adoption, recovery and inspection start from.

Owns opening files that other processes write: never through a symlink, never more than the size cap, damaged ones named and not
trusted. Refuses journals of another run (``RunMismatch``).
"""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fsref.errors import BadRef, JournalCorrupt, RunMismatch, StoreUnavailable
from fsref.journal.place import Ledger
from fsref.ledger.fold import IDS_BYTE_MAX, IDS_FREE, JournalFold
from fsref.ledger.lines import LineReader
from fsref.ledger.merge import RunFold
from fsref.redact import visible
from fsref.refs import check_incarnation

CHUNK_BYTES: Final = 1 << 20
JOURNAL_BYTES_MAX: Final = 16 << 30


@dataclass
class OpenJournal:
    """One journal while it is being read."""

    fold: JournalFold
    lines: LineReader = field(default_factory=LineReader)
    problem: str = ""

    @property
    def end(self) -> int:
        """Offset behind the last good line."""
        return self.lines.end


class LedgerReader:
    """All journals of one ledger folder. ``refresh`` reads what is new; ``merge`` gives the union once reading is over."""

    def __init__(self, ledger: Ledger, *, run_uuid: str | None = None) -> None:
        self.ledger = ledger
        self._folder = ledger.folder
        self._run_uuid = run_uuid
        self.journals: dict[str, OpenJournal] = {}
        self.problems: list[str] = []
        """Problems with the folder itself."""
        self.listed = False
        """Whether the folder could be listed at the last ``refresh``."""
        self.marked: set[str] = set()
        """Incarnations that a ``.dead`` or ``.adopted`` marker names."""

    def refresh(self) -> dict[str, int]:
        """Reads everything that was appended since the last call. Returns journal to the offset up to which it is known.

        Raises ``RunMismatch`` for a journal of another run; unreadable or damaged journals become problems.
        """
        self.problems = []
        for name in self._names():
            stem, _, suffix = name.rpartition(".")
            if name.startswith(".") or suffix not in ("jnl", "dead", "adopted"):
                continue
            try:
                inc = check_incarnation(stem)
            except BadRef:
                self.problems.append(f"{self._folder / visible(name)} is not named after an incarnation")
                continue
            if suffix == "jnl":
                self._read(inc, self._folder / name)
            else:
                self.marked.add(inc)
        return {inc: journal.end for inc, journal in self.journals.items()}

    def refresh_all(self) -> dict[str, int]:
        """As ``refresh``, for decisions that need every journal. Raises ``StoreUnavailable`` if one may not have been seen."""
        ends = self.refresh()
        if self.problems:
            raise StoreUnavailable(f"nothing is decided while the ledger cannot be read as a whole: {'; '.join(self.problems)}")
        return ends

    def read_one(self, inc: str) -> OpenJournal | None:
        """Reads one journal only; None if it is not there."""
        self._read(inc, self._folder / f"{check_incarnation(inc)}.jnl")
        return self.journals.get(inc)

    def _names(self) -> list[str]:
        self.listed = False
        if self._folder.is_symlink():
            self.problems.append(f"the ledger folder {self._folder} is a symbolic link: refused")
            return []
        try:
            names = sorted(path.name for path in self._folder.iterdir())
        except FileNotFoundError:
            self.problems.append(f"the ledger folder {self._folder} is not there")
        except OSError as e:
            self.problems.append(f"the ledger folder {self._folder} cannot be listed: {e.strerror}")
        else:
            self.listed = True
            return names
        return []

    def _read(self, inc: str, path: Path) -> None:
        journal = self.journals.get(inc)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return
        except OSError as e:
            self.problems.append(f"the journal {path} cannot be opened: {e.strerror}")
            return
        if journal is None:
            journal = self.journals[inc] = OpenJournal(JournalFold(inc))
        try:
            self._read_new(journal, fd)
        except JournalCorrupt as e:
            journal.problem = f"the journal {path} is damaged: {e}"
        except OSError as e:
            self.problems.append(f"the journal {path} cannot be read: {e.strerror}")
        finally:
            os.close(fd)

    def _read_new(self, journal: OpenJournal, fd: int) -> None:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1 or info.st_size > JOURNAL_BYTES_MAX:
            raise JournalCorrupt(f"it is not a regular file with one name and at most {JOURNAL_BYTES_MAX} bytes")
        if info.st_size < journal.lines.size:
            raise JournalCorrupt(f"it had {journal.lines.size} bytes and has {info.st_size} now: it was truncated")
        if journal.problem:
            return
        self._check_named()
        os.lseek(fd, journal.lines.size, os.SEEK_SET)
        while chunk := os.read(fd, CHUNK_BYTES):
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
                f"{self._folder / fold.inc}.jnl belongs to a run with run_uuid {fold.open.run_uuid[:40]}, "
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
