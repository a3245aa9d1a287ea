"""One journal: the only writer of ``<ledger>/<inc>.jnl``.

Owns appends (one ``write(2)`` per record), the sync that W1 and W2 rest on, the lock that is held for life, and the poison: after a
failed append or sync the file's tail is unknown, so nothing more is written and the process must stop keeping and removing.
Refuses to write after a fork; the child opens its own journal.
"""

import contextlib
import fcntl
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from fsref import __version__
from fsref.errors import JournalPoisoned, LedgerError, StoreDenied, StoreError, StoreFull
from fsref.failpoints import ARMED, failpoint
from fsref.journal import identity
from fsref.journal.place import Ledger
from fsref.journal.segments import Sealer
from fsref.ledger import records
from fsref.ledger.ids import IDS_PART_MAX, pack_known, pack_parts
from fsref.ledger.records import AnyRecord, encode_line
from fsref.refs import check_incarnation
from fsref.store.posix import raise_mapped, rename_known, share

FILE_MODE: Final = 0o640
SMALL_SET_MAX: Final = 256
"""So few ids fit one line whatever their producers are."""
BYTES_PART_MAX: Final = 30_000
"""Of a piece of a set that is split; ``done`` may carry a second set of that size."""
SEAL_RETRY_S: Final = 60.0
_open_journals: "weakref.WeakSet[Journal]" = weakref.WeakSet()


def now_ms() -> int:
    """Wall clock in milliseconds: for people, never for a decision."""
    return time.time_ns() // 1_000_000


def journal_path(ledger_dir: Path, inc: str) -> Path:
    return ledger_dir / f"{check_incarnation(inc)}.jnl"


def make_folder(ledger_dir: Path) -> None:
    """Creates the ledger's folder (2770) if it is not there; a symlink in its place is refused."""
    try:
        if ledger_dir.is_symlink():
            raise StoreDenied(f"{ledger_dir} is a symbolic link; the ledger must be a real folder")
        if ledger_dir.is_dir():
            return
        ledger_dir.mkdir(parents=True, exist_ok=True)
        fd = os.open(ledger_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            share(fd)
        finally:
            os.close(fd)
    except OSError as e:
        raise as_store_error(e, f"cannot create the ledger folder {ledger_dir}") from e


def as_store_error(error: OSError, doing: str) -> StoreError:
    """An ``OSError`` of the ledger's folder as the nearest class of ours, as the store maps it."""
    try:
        raise_mapped(error, doing)
    except StoreError as mapped:
        return mapped


def sync_folder(folder: Path) -> None:
    """Makes names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Journal:
    """Append-only writer; thread-safe. A context manager that closes the file (it writes no ``close`` record by itself)."""

    def __init__(self, ledger: Ledger, inc: str, *, run_uuid: str, why: str = "", retry_s: float = SEAL_RETRY_S) -> None:
        """Creates the file under a private name, locks it, writes ``open``, then gives it its name. Raises ``StoreError`` subclasses.

        On a root that is no folder ``open`` is sealed too: who is at work can be told from every machine. ``retry_s``: how long sealing
        is tried. ``why`` goes into ``open``: what an operator asked for.
        """
        self.inc = inc
        self.path = journal_path(ledger.here, inc)
        self._lock = threading.Lock()
        self._fd = -1
        self._poison = ""
        self._size = 0
        self._synced = 0
        self._retry_s = retry_s
        self._sealer = Sealer(ledger.store, inc, self._read) if ledger.store is not None else None
        who = identity.this_process()
        staging = self.path.with_name(f".{self.path.name}.tmp")
        opened = records.Open(
            now_ms(), records.VERSION, run_uuid, inc, who.host, who.boot_id, who.pid, who.pstart, who.user, f"fsref {__version__}", why
        )
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(staging, flags, FILE_MODE)
        except OSError as e:
            raise as_store_error(e, f"cannot create the journal {self.path}") from e
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            _open_journals.add(self)
            self.append(opened)
            self._sync_file(self._size)
            failpoint("journal.open.before")
            self._name(staging)  # a journal that can be seen is locked and names its process
            failpoint("journal.open.after")
        except (OSError, JournalPoisoned) as e:
            self._close_fd()
            with contextlib.suppress(OSError):
                staging.unlink()
            raise self._not_created(e) from e
        try:
            self.seal()
        except (StoreError, LedgerError):
            self.append(records.Close(now_ms()))  # nobody shall take it for a live one
            self._close_fd()
            raise

    def _name(self, staging: Path) -> None:
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            rename_known(staging.name, self.path.name, os.fstat(self._fd), dir_fd=folder)
            os.fsync(folder)
        finally:
            os.close(folder)

    def _not_created(self, error: OSError | JournalPoisoned) -> StoreError:
        asked = f"cannot create the journal {self.path}"
        if isinstance(error, OSError):
            return as_store_error(error, asked)
        cause = error.__cause__
        return as_store_error(cause, asked) if isinstance(cause, OSError) else StoreFull(f"{asked}: {error}")

    @property
    def size(self) -> int:
        """Bytes appended: the offset behind the last record."""
        return self._size

    @property
    def poisoned(self) -> bool:
        return bool(self._poison)

    def append(self, record: AnyRecord) -> int:
        """Appends a record with one ``write(2)``. Returns its offset.

        Raises ``JournalPoisoned`` if the write fails or is short, and ever after.
        """
        line = encode_line(record)
        with self._lock:
            return self._write(line)

    def append_all(self, parts: Iterable[AnyRecord]) -> None:
        """``append`` for each, without others in between; none if one of them cannot be encoded."""
        lines = [encode_line(r) for r in parts]
        with self._lock:
            for line in lines:
                self._write(line)

    def _write(self, line: bytes) -> int:
        if self._poison:
            raise JournalPoisoned(self._poison)
        start = self._size
        try:
            if ARMED:
                failpoint("journal.append.before")
            count = os.write(self._fd, line)
            if ARMED:
                failpoint("journal.append.after")
        except OSError as e:
            self._poison = f"append to {self.path} failed: {e.strerror}"
            raise JournalPoisoned(self._poison) from e
        if count != len(line):
            self._poison = f"append to {self.path} was short ({count} of {len(line)} bytes): a full disk or a limit"
            raise JournalPoisoned(self._poison)
        self._size = start + count
        return start

    def sync(self, upto: int | None = None, *, retry_s: float | None = None) -> None:
        """Makes records durable (W1, W2): all that were appended so far, or those before the offset ``upto``.

        On a root that is no folder that takes a segment too, of an env worker excepted: if its node is lost its keeps are lost with its
        drops, so it seals at its close. Raises ``JournalPoisoned``: after a failed sync nothing is known about the tail. ``StoreError``:
        the segment may not be there after ``retry_s`` seconds of trying; nothing counts as durable, call again. ``Fenced``.
        """
        with self._lock:
            self._check()
            need = self._size if upto is None else upto
        self._sync_file(need)
        if not self.inc.startswith("env."):
            self.seal(need, retry_s=retry_s)

    def seal(self, upto: int | None = None, *, retry_s: float | None = None) -> None:
        """Puts what was synced and not sealed yet into the root, if the records before ``upto`` are not all there. Nothing on a folder.

        Raises ``StoreError``, ``Fenced``.
        """
        if self._sealer is not None and self._sealer.sealed < (self._synced if upto is None else upto):
            self._sealer.seal(self._synced, retry_s=self._retry_s if retry_s is None else retry_s)

    def _read(self, offset: int, count: int) -> bytes:
        with self._lock:
            self._check()
            fd = os.dup(self._fd)
        try:
            out = os.pread(fd, count, offset)
        except OSError as e:
            raise as_store_error(e, f"cannot read {self.path}") from e
        finally:
            os.close(fd)
        if len(out) != count:
            raise StoreError(f"{self.path} gave {len(out)} of {count} bytes at {offset}")
        return out

    def _sync_file(self, need: int) -> None:
        with self._lock:
            self._check()
            if self._synced >= need:
                return
            size, fd = self._size, os.dup(self._fd)
        try:
            failpoint("journal.sync.before")
            os.fdatasync(fd)
            failpoint("journal.sync.after")
            gone = os.fstat(fd).st_nlink == 0
        except OSError as e:
            with self._lock:
                self._poison = f"sync of {self.path} failed: {e.strerror}"
            raise JournalPoisoned(self._poison) from e
        finally:
            os.close(fd)
        if gone:
            with self._lock:
                self._poison = f"{self.path} was removed under a live run"
            raise JournalPoisoned(self._poison)
        with self._lock:
            self._synced = max(self._synced, size)

    def close(self) -> None:
        """Releases the lock and the file."""
        with self._lock:
            self._close_fd()
            self._poison = self._poison or f"{self.path} is closed"

    def forked(self) -> None:
        """In the child of a fork: the inherited writer is unusable; the parent's lock stays."""
        self._lock = threading.Lock()
        self._close_fd()
        self._poison = f"{self.path} was opened before a fork: the child must open its own incarnation"

    def _check(self) -> None:
        if self._poison:
            raise JournalPoisoned(self._poison)

    def _close_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _after_fork_in_child() -> None:
    for journal in list(_open_journals):
        journal.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)


def parts_of(make: Callable[[dict[str, str], tuple[int, int] | None], AnyRecord], object_ids: Sequence[str]) -> list[AnyRecord]:
    """The record of a set of checked ids; where it does not fit one line, one record per piece, numbered by ``part``."""
    if len(object_ids) <= SMALL_SET_MAX:
        return [make(pack_known(object_ids), None)]
    sets = pack_parts(object_ids, ids_max=IDS_PART_MAX, bytes_max=BYTES_PART_MAX)
    if len(sets) > records.PARTS_MAX:
        raise LedgerError(f"a set over {len(sets)} records is above the limit of {records.PARTS_MAX}")
    if len(sets) == 1:
        return [make(sets[0], None)]
    return [make(piece, (k, len(sets))) for k, piece in enumerate(sets, 1)]
