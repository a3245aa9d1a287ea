"""Publishing a folder of files: complete and durable, or not there.

Owns staging, fsync, rename and pruning of ``step_000012`` folders. Refuses to replace a published folder: a caller that trains a
step again removes it first.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fsref.errors import StoreDenied, StoreError, StoreFull
from fsref.steps import step_name

MARKER: Final = "STABLE"
"""Empty file that is written last; readers wait for it."""
_NAME: Final = re.compile(r"step_([0-9]{6,9})", re.ASCII)


@contextmanager
def mapped(doing: str) -> Iterator[None]:
    """Turns an ``OSError`` of the local filesystem into the nearest ``StoreError``."""
    try:
        yield
    except StoreError:
        raise
    except OSError as e:
        kind: type[StoreError] = StoreError
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            kind = StoreFull
        elif e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            kind = StoreDenied
        raise kind(f"{doing}: {e.strerror or e} ({e.filename or 'no file named'})") from e


def publish(parent: Path, version: int, write: Callable[[Path], None]) -> Path:
    """Lets ``write`` fill a staging folder, makes it durable, renames it to ``parent/step_<version>`` and marks it ``STABLE``.

    Raises ``StoreError`` subclasses; nothing is published then. A leftover without the marker is removed first.
    """
    target, staging = parent / step_name(version), parent / f".{step_name(version)}.tmp"
    with mapped(f"writing {target}"):
        parent.mkdir(parents=True, exist_ok=True)
        for leftover in (staging, target):
            if leftover.exists() and not (leftover / MARKER).exists():
                shutil.rmtree(leftover)
        staging.mkdir()
        write(staging)
        for path in sorted(staging.rglob("*")):
            _sync(path)
        _sync(staging)
        staging.rename(target)
        _sync(parent)
        (target / MARKER).touch()
        _sync(target)
    return target


def published(parent: Path) -> dict[int, Path]:
    """The complete folders by version, ascending."""
    found = {int(m[1]): p for p in (parent.iterdir() if parent.is_dir() else ()) if (m := _NAME.fullmatch(p.name))}
    return {v: found[v] for v in sorted(found) if (found[v] / MARKER).is_file()}


def prune(parent: Path, *, keep: int) -> None:
    """Removes all but the newest ``keep`` complete folders; the marker goes first, so that no reader takes a half removed one."""
    folders = list(published(parent).values())
    for folder in folders[: max(0, len(folders) - keep)]:
        remove(folder)


def remove(folder: Path) -> None:
    """Removes one folder, its marker first."""
    with mapped(f"removing {folder}"):
        (folder / MARKER).unlink(missing_ok=True)
        shutil.rmtree(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
