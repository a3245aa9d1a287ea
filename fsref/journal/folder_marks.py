"""Markers as files beside the journals: ``<inc>.adopted`` (the fence), ``<inc>.dead`` and ``recover.lock``.

Owns their exclusive creation and bounded reading. Refuses to delete a fence: ``.adopted`` stays for ever.
"""

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import Final

import msgspec

from fsref.errors import ObjectMissing, StoreError
from fsref.failpoints import failpoint
from fsref.journal.file import FILE_MODE, as_store_error, sync_folder
from fsref.journal.mark import BYTES_MAX, Marker, decode_marker
from fsref.refs import check_incarnation

LOCK_NAME: Final = "recover.lock"


def adopted_path(ledger_dir: Path, inc: str) -> Path:
    return ledger_dir / f"{check_incarnation(inc)}.adopted"


def dead_path(ledger_dir: Path, inc: str) -> Path:
    return ledger_dir / f"{check_incarnation(inc)}.dead"


def is_there(path: Path) -> bool:
    """Whether a marker is there. Raises ``StoreError`` if that cannot be known: it is no proof that there is none."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except OSError as e:
        raise as_store_error(e, f"cannot look for {path}") from e
    return True


def release_file_lock(folder: Path, inc: str) -> None:
    """Removes ``recover.lock`` if ``inc`` has it; held by nobody else in between, because the folder is locked meanwhile."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise as_store_error(e, f"cannot open the ledger folder {folder}") from e
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if read_file(folder / LOCK_NAME).by == inc:
            failpoint("marker.release.before")
            (folder / LOCK_NAME).unlink()
            failpoint("marker.release.after")
    except FileNotFoundError:  # ObjectMissing too
        return
    except OSError as e:
        raise as_store_error(e, f"cannot remove {folder / LOCK_NAME}") from e
    finally:
        os.close(fd)


def create_file(path: Path, marker: Marker) -> None:
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


def read_file(path: Path) -> Marker:
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
    return decode_marker(data, name=str(path))
