"""Is the writer of a journal gone? Proof only, never a timeout (ledger.md section 7).

Owns the oracle: a ``close`` record, a ``.dead`` marker by whoever reaped the process, the journal's lock obtainable on the same boot of
the same host, or its pid gone there. Whatever cannot be proved is alive.
"""

import fcntl
import os
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from fsref.errors import LedgerError
from fsref.journal import identity
from fsref.journal.file import journal_path
from fsref.journal.markers import is_dead
from fsref.journal.place import Ledger
from fsref.journal.read import OpenJournal
from fsref.ledger.records import LINE_BYTES_MAX, Close, Open, decode_line, line_ok

How = Literal["closed", "dead", "flock", "forced"]
"""How an incarnation's end is known; the word of the ``adopt`` record."""


def how_ended(ledger: Ledger, journal: OpenJournal, *, forced: Collection[str] = ()) -> How | None:
    """How the end of an incarnation is proved; None if it may be alive. ``forced``: incarnations that an operator declared dead."""
    inc = journal.fold.inc
    if journal.fold.sealed:
        return "closed"
    if journal.dead or is_dead(ledger, inc):
        return "dead"
    opened = journal.fold.open
    if opened is not None and _same_boot(opened) and (_lock_is_free(ledger, inc) or _process_is_gone(opened)):
        return "flock"
    return "forced" if inc in forced else None


def ends_with_close(ledger_dir: Path, inc: str) -> bool:
    """Whether a journal's last line is its close record; one small read. False for a journal that cannot be read."""
    try:
        fd = os.open(journal_path(ledger_dir, inc), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            at = max(0, os.fstat(fd).st_size - LINE_BYTES_MAX - 1)
            tail = os.pread(fd, LINE_BYTES_MAX + 1, at)
        finally:
            os.close(fd)
    except OSError:
        return False
    line = tail.removesuffix(b"\n").rpartition(b"\n")[2]
    try:
        return tail.endswith(b"\n") and line_ok(line) and isinstance(decode_line(line), Close)
    except LedgerError:
        return False


def _same_boot(opened: Open) -> bool:
    here = identity.this_process()
    return bool(here.boot_id) and (opened.host, opened.boot_id) == (here.host, here.boot_id)


def _lock_is_free(ledger: Ledger, inc: str) -> bool:
    """Whether the journal is here and nobody holds its lock. Its own fd, so that the probe's lock ends with it."""
    if ledger.folder is None:
        return False
    try:
        fd = os.open(journal_path(ledger.folder, inc), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _process_is_gone(opened: Open) -> bool:
    """A pid of this boot that does not exist, or is another process by now. Containers hide pids of others: then the lock decides."""
    if opened.pstart == 0 or not _sees_all_pids():
        return False
    return identity.process_start(opened.pid) != opened.pstart


def _sees_all_pids() -> bool:
    """Whether this process is in the first pid namespace (its number is fixed); elsewhere a pid proves nothing about other namespaces."""
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == "pid:[4026531836]"
    except OSError:
        return False
