"""Marker files beside the journals: ``<inc>.adopted`` (the fence), ``<inc>.dead`` and ``recover.lock``.

Owns their exclusive creation and bounded reading. Refuses to delete a fence: ``.adopted`` stays for ever.
"""

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import Final

import msgspec

from fsref.errors import BadRef, Fenced, JournalCorrupt, ObjectExists, ObjectMissing, StoreError
from fsref.failpoints import failpoint
from fsref.journal.file import FILE_MODE, as_store_error, now_ms, sync_folder
from fsref.journal.place import Ledger
from fsref.refs import check_incarnation

BYTES_MAX: Final = 4096
LOCK_NAME: Final = "recover.lock"


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a marker: who wrote it, and when (for people)."""

    by: str
    ms: int = 0
    why: str = ""


def adopted_path(ledger_dir: Path, inc: str) -> Path:
    return ledger_dir / f"{check_incarnation(inc)}.adopted"


def dead_path(ledger_dir: Path, inc: str) -> Path:
    return ledger_dir / f"{check_incarnation(inc)}.dead"


def write_dead(ledger: Ledger, inc: str, *, by: str = "", why: str = "") -> None:
    """Says that the process of ``inc`` was reaped (waitpid), or that its node is lost. Only whoever knows that may call it.

    ``why`` is for people. Writing it again changes nothing. Raises ``StoreError``.
    """
    try:
        _create(dead_path(ledger.folder, inc), Marker(by=by, ms=now_ms(), why=why[:1000]))
    except ObjectExists:
        return


def write_adopted(ledger: Ledger, inc: str, *, by: str) -> None:
    """Fences ``inc``: exactly one successor can ever create this. Raises ``Fenced`` if another one has."""
    try:
        _create(adopted_path(ledger.folder, inc), Marker(by=check_incarnation(by), ms=now_ms()))
    except ObjectExists:
        owner = read_adopted(ledger, inc)
        if owner != by:
            raise Fenced(f"{inc} was adopted by {owner}, so {by} cannot adopt it") from None


def read_adopted(ledger: Ledger, inc: str) -> str | None:
    """Who adopted ``inc``; None if nobody did."""
    try:
        return check_incarnation(_read(adopted_path(ledger.folder, inc)).by)
    except ObjectMissing:
        return None
    except BadRef as e:
        raise JournalCorrupt(f"{adopted_path(ledger.folder, inc)} does not name an incarnation: {e}") from e


def is_adopted(ledger: Ledger, inc: str) -> bool:
    """One stat: whether the fence of ``inc`` is up. Raises ``StoreError`` if that cannot be known: it is no proof that there is none."""
    return _is_there(adopted_path(ledger.folder, inc))


def is_dead(ledger: Ledger, inc: str) -> bool:
    """Whether a ``.dead`` marker is there. Raises ``StoreError`` if that cannot be known."""
    return _is_there(dead_path(ledger.folder, inc))


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except OSError as e:
        raise as_store_error(e, f"cannot look for {path}") from e
    return True


def acquire_lock(ledger: Ledger, inc: str) -> str | None:
    """Creates ``recover.lock`` for ``inc``. Returns None, or the incarnation that has it (the caller asks whether that one is dead)."""
    try:
        _create(ledger.folder / LOCK_NAME, Marker(by=inc, ms=now_ms()))
    except ObjectExists:
        try:
            return _read(ledger.folder / LOCK_NAME).by
        except ObjectMissing:
            return acquire_lock(ledger, inc)
    return None


def release_lock(ledger: Ledger, inc: str) -> None:
    """Removes ``recover.lock`` if ``inc`` has it; held by nobody else in between, because the folder is locked meanwhile."""
    try:
        fd = os.open(ledger.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise as_store_error(e, f"cannot open the ledger folder {ledger.folder}") from e
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if _read(ledger.folder / LOCK_NAME).by == inc:
            failpoint("marker.release.before")
            (ledger.folder / LOCK_NAME).unlink()
            failpoint("marker.release.after")
    except FileNotFoundError:  # ObjectMissing too
        return
    except OSError as e:
        raise as_store_error(e, f"cannot remove {ledger.folder / LOCK_NAME}") from e
    finally:
        os.close(fd)


def _create(path: Path, marker: Marker) -> None:
    """Exclusive, whole or not at all: written under a private name, then linked."""
    staging = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    data = msgspec.json.encode(marker)
    try:
        fd = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        try:
            try:
                if os.write(fd, data) != len(data):  # a torn marker would be there for ever
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(fd)
            finally:
                os.close(fd)
            _link(staging, path, data)
        finally:
            with contextlib.suppress(OSError):
                staging.unlink()
        sync_folder(path.parent)
        failpoint("marker.create.after")
    except OSError as e:
        raise as_store_error(e, f"cannot create {path}") from e


def _link(staging: Path, path: Path, data: bytes) -> None:
    """An error counts only if ``path`` is not ours afterwards: a network filesystem may lose the answer and ask again."""
    try:
        failpoint("marker.create.before")
        os.link(staging, path, follow_symlinks=False)
    except OSError:
        try:
            ours = not path.is_symlink() and path.read_bytes() == data
        except OSError:
            ours = False
        if not ours:
            raise


def _read(path: Path) -> Marker:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # a FIFO in its place must not stop us
    except FileNotFoundError as e:
        raise ObjectMissing(f"{path} is not there") from e
    except OSError as e:
        raise as_store_error(e, f"cannot read {path}") from e
    try:
        data = os.read(fd, BYTES_MAX)
    except OSError as e:
        raise StoreError(f"cannot read {path}: {e.strerror}") from e
    finally:
        os.close(fd)
    try:
        return msgspec.json.decode(data, type=Marker)
    except msgspec.DecodeError as e:
        raise JournalCorrupt(f"{path} is not a marker: {e}") from e
