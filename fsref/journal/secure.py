"""Making the journal of an ended incarnation safe before it is adopted up to its end: nothing may shorten it after that.

Owns the sync of a file that another process wrote, and for a root that is no folder the sealing of what that process left unsealed,
where its file can be read here. Refuses to leave the row of segments open behind a process that did not close: the next name is taken,
by a segment of no bytes, so that one that was declared dead and lives on cannot seal, and therefore not remove or ship, anything more.
"""

import os
from collections.abc import Iterable
from typing import Final

from fsref.errors import Fenced, StoreError, StoreUnavailable
from fsref.journal.catalogue import read_catalogue
from fsref.journal.file import as_store_error, journal_path
from fsref.journal.place import Ledger
from fsref.journal.read import JOURNAL_BYTES_MAX, OpenJournal
from fsref.journal.segments import PREFIX, SEGMENT_BYTES_MAX, put_segment, row_of
from fsref.store.base import Store

LATE_MAX: Final = 8
"""Segments of a process that lives on which may come between the looks of its adopter."""


def sync_ended(ledger: Ledger, journals: Iterable[OpenJournal]) -> None:
    """Makes the files of processes that have ended durable, *before* they are read to their end: what is read after this cannot be lost
    with its node any more, and a decision never rests on a record that can. Raises ``StoreError``."""
    for journal in journals:
        if journal.in_folder:
            _sync_file(ledger, journal.fold.inc)


def sync_journal(ledger: Ledger, journal: OpenJournal) -> None:
    """Makes a fenced incarnation's journal durable up to ``journal.end``. Raises ``StoreError``."""
    inc = journal.fold.inc
    if journal.in_folder:
        _sync_file(ledger, inc)
    if ledger.store is None:
        return
    for _ in range(LATE_MAX):
        try:
            _seal_rest(ledger, ledger.store, journal)
        except Fenced:
            continue  # its own segment came first; look again
        return
    raise StoreUnavailable(f"{inc} still seals its journal: stop its process, then try again")


def _seal_rest(ledger: Ledger, store: Store, journal: OpenJournal) -> None:
    inc = journal.fold.inc
    listed = read_catalogue(store, f"{PREFIX}/{inc}").segments.get(inc, [])
    sizes, damage = row_of(listed, bytes_max=JOURNAL_BYTES_MAX)
    if damage:
        return  # nothing can be joined to it; the audit names it
    at = sum(sizes)
    n = len(sizes)
    while journal.in_folder and at < journal.end:
        count = min(journal.end - at, SEGMENT_BYTES_MAX)
        put_segment(store, inc, n, _read_file(ledger, inc, at, count))
        n, at = n + 1, at + count
    if not journal.fold.sealed:
        put_segment(store, inc, n, b"")


def _sync_file(ledger: Ledger, inc: str) -> None:
    try:
        fd = os.open(journal_path(ledger.here, inc), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as e:
        raise as_store_error(e, f"cannot sync the journal of {inc}") from e


def _read_file(ledger: Ledger, inc: str, offset: int, count: int) -> bytes:
    try:
        fd = os.open(journal_path(ledger.here, inc), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            out = os.pread(fd, count, offset)
        finally:
            os.close(fd)
    except OSError as e:
        raise as_store_error(e, f"cannot read the journal of {inc}") from e
    if len(out) != count:
        raise StoreError(f"the journal of {inc} gave {len(out)} of {count} bytes at {offset}")
    return out
