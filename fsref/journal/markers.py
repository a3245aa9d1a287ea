"""The marks that go with journals: ``.adopted`` (the fence), ``.dead`` and the lock of recovery.

Owns where each of them is. A root that is a folder has files (``folder_marks``); another root has objects (``root_marks``), and the
fence and the lock are there only, because two places could disagree. ``.dead`` is in both: the folder's copy is what an orchestrator
of the same node looks at every second, without a request. Refuses to delete a fence.
"""

from fsref.errors import BadRef, Fenced, JournalCorrupt, ObjectExists, ObjectMissing
from fsref.journal.file import now_ms
from fsref.journal.folder_marks import LOCK_NAME, adopted_path, create_file, dead_path, is_there, read_file, release_file_lock
from fsref.journal.mark import Marker
from fsref.journal.place import Ledger
from fsref.journal.root_marks import acquire_root_lock, create_mark, has_mark, mark_name, read_mark, release_root_lock
from fsref.refs import check_incarnation


def write_dead(ledger: Ledger, inc: str, *, by: str = "", why: str = "") -> None:
    """Says that the process of ``inc`` was reaped (waitpid), or that its node is lost. Only whoever knows that may call it.

    ``why`` is for people. Writing it again changes nothing. Raises ``StoreError``.
    """
    marker = Marker(by=by, ms=now_ms(), why=why[:1000])
    check_incarnation(inc)
    try:
        if ledger.store is None or (ledger.folder is not None and ledger.folder.is_dir()):
            create_file(dead_path(ledger.here, inc), marker)
    except ObjectExists:
        pass  # said before; the root may not know it yet
    try:
        if ledger.store is not None:
            create_mark(ledger.store, mark_name(inc, "dead"), marker)
    except ObjectExists:
        return


def write_adopted(ledger: Ledger, inc: str, *, by: str) -> None:
    """Fences ``inc``: exactly one successor can ever create this. Raises ``Fenced`` if another one has."""
    marker = Marker(by=check_incarnation(by), ms=now_ms())
    check_incarnation(inc)
    try:
        if ledger.store is None:
            create_file(adopted_path(ledger.here, inc), marker)
        else:
            create_mark(ledger.store, mark_name(inc, "adopted"), marker)
    except ObjectExists:
        owner = read_adopted(ledger, inc)
        if owner != by:
            raise Fenced(f"{inc} was adopted by {owner}, so {by} cannot adopt it") from None


def read_adopted(ledger: Ledger, inc: str) -> str | None:
    """Who adopted ``inc``; None if nobody did."""
    check_incarnation(inc)
    try:
        if ledger.store is None:
            return check_incarnation(read_file(adopted_path(ledger.here, inc)).by)
        return check_incarnation(read_mark(ledger.store, mark_name(inc, "adopted")).by)
    except ObjectMissing:
        return None
    except BadRef as e:
        raise JournalCorrupt(f"the mark {inc}.adopted does not name an incarnation: {e}") from e


def is_adopted(ledger: Ledger, inc: str) -> bool:
    """Whether the fence of ``inc`` is up: one stat, or one HEAD. Raises ``StoreError`` if that cannot be known."""
    if ledger.store is None:
        return is_there(adopted_path(ledger.here, inc))
    return has_mark(ledger.store, mark_name(check_incarnation(inc), "adopted"))


def is_dead(ledger: Ledger, inc: str) -> bool:
    """Whether a ``.dead`` mark is in the folder; one in the root is seen by whoever lists it (``LedgerReader``). Raises ``StoreError``."""
    return ledger.folder is not None and is_there(dead_path(ledger.folder, inc))


def acquire_lock(ledger: Ledger, inc: str) -> str | None:
    """Takes the lock of recovery for ``inc``. Returns None, or the incarnation that has it (the caller asks whether that one is dead)."""
    marker = Marker(by=check_incarnation(inc), ms=now_ms())
    if ledger.store is not None:
        return acquire_root_lock(ledger.store, marker)
    try:
        create_file(ledger.here / LOCK_NAME, marker)
    except ObjectExists:
        try:
            return read_file(ledger.here / LOCK_NAME).by
        except ObjectMissing:
            return acquire_lock(ledger, inc)
    return None


def release_lock(ledger: Ledger, inc: str) -> None:
    """Gives the lock of recovery back if ``inc`` has it; else nothing changes. Raises ``StoreError``."""
    if ledger.store is None:
        release_file_lock(ledger.here, inc)
    else:
        release_root_lock(ledger.store, inc, Marker(by=inc, ms=now_ms()))
