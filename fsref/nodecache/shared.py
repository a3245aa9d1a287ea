"""The file that the ranks of a node share: found or made, checked, joined, locked, left, and removed by the last one.

Owns its name, its modes and its locks. Refuses a file that is a link, is not of this user or lets others in: what it holds goes into
training. Every lock is the kernel's and ends with its process, so a killed rank holds up nobody, and a file that no rank has joined is what
dead runs left; it is removed by whoever opens a cache in the same folder next.
"""

import contextlib
import errno
import mmap
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fsref.errors import ConfigError, StoreDenied, StoreError, StoreFull, StoreUnavailable
from fsref.failpoints import failpoint
from fsref.nodecache.locks import locked_elsewhere, try_lock, unlock
from fsref.nodecache.table import MEMBERS_MAX, Geometry, Table
from fsref.store.posix import raise_mapped

LOCK_S: Final = 1.0
"""How long to try for the table; it is held for a copy of at most 1 MiB. Who does not get it reads from the store."""
SUSPEND_S: Final = 30.0
"""How long the cache is left alone after that: a stopped process holds the table."""
OPEN_S: Final = 30.0
_PREFIX: Final = "fsref-cache-"
_MUTEX_AT: Final = 0
_MEMBERS_AT: Final = 1
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)


class SharedFile:
    """One rank's membership. ``table`` is used inside ``locked`` only."""

    def __init__(self, folder: str | Path, *, name: str, bytes_max: int) -> None:
        """Joins the file ``name`` of this user in ``folder``, which is made where it is not there.

        Raises ``ConfigError`` for ranks with other sizes or too many of them, ``StoreDenied``, ``StoreFull`` without room for the table,
        ``StoreUnavailable`` if a stopped process holds the table.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name[:80]!r} cannot name a node cache: letters, digits, '.', '_' and '-' can")
        self._folder = Path(folder)
        self.path = self._folder / f"{_PREFIX}{os.geteuid()}-{name}"
        self.geometry = Geometry.of(bytes_max)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._users, self._closed, self._suspended_until = 0, False, 0.0
        remove_leftovers(self._folder, but=self.path)
        self.fd = self._opened()
        try:
            self._map = mmap.mmap(self.fd, self.geometry.file_bytes)
            self.table = Table(self._map, self.geometry)
            self.member = self._joined()
        except BaseException:
            os.close(self.fd)
            raise
        unlock(self.fd, _MUTEX_AT)

    @contextlib.contextmanager
    def used(self) -> Iterator[bool]:
        """Keeps descriptor and map open inside the block, also if ``close`` is called meanwhile. False: it is closed."""
        with self._lock:
            usable = not self._closed and os.getpid() == self._pid
            self._users += usable
        try:
            yield usable
        finally:
            if usable:
                with self._lock:
                    self._users -= 1
                    self._shut_if_over()

    @contextlib.contextmanager
    def locked(self) -> Iterator[Table | None]:
        """The table, for this thread alone on the whole node; None if it cannot be had within ``LOCK_S``, in a forked child, or closed."""
        if not self._acquired(suspended=time.monotonic() < self._suspended_until):
            yield None
            return
        try:
            self.table.begin()
            yield self.table
            self.table.end()
        finally:
            unlock(self.fd, _MUTEX_AT)
            self._lock.release()

    def alive(self, member: int | None) -> bool:
        """Whether the process of a member lives (or a child that it forked); None never does."""
        return member is not None and (member == self.member or locked_elsewhere(self.fd, _MEMBERS_AT + member))

    def members(self) -> list[int]:
        """Living members, this one included."""
        if not locked_elsewhere(self.fd, _MEMBERS_AT, MEMBERS_MAX):
            return [self.member]
        return [m for m in range(MEMBERS_MAX) if self.alive(m)]

    def punch(self, offset: int, size: int) -> None:
        """Gives memory of the file back to the system; does nothing in folders whose filesystem cannot."""
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_REMOVE, offset, size)

    def close(self) -> None:
        """Leaves; the last member removes the file. Idempotent. A thread that is still in ``used`` keeps the descriptor till it is back."""
        acquired = self._acquired(suspended=False)
        try:
            if not acquired:
                self._lock.acquire()
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            if acquired and not locked_elsewhere(self.fd, _MEMBERS_AT, MEMBERS_MAX) and os.fstat(self.fd).st_nlink:
                self.path.unlink(missing_ok=True)
            unlock(self.fd, _MEMBERS_AT + self.member)
            self._shut_if_over(locked=acquired)
        finally:
            self._lock.release()

    def _shut_if_over(self, *, locked: bool = False) -> None:
        if self._closed and not self._users:
            self._map.close()
            os.close(self.fd)  # ends every lock
        elif locked:
            unlock(self.fd, _MUTEX_AT)

    def _acquired(self, *, suspended: bool) -> bool:
        """Takes this process's lock, then the node's."""
        start = time.monotonic()
        if suspended or not self._lock.acquire(timeout=LOCK_S):
            return False
        wait_s = 20e-6
        try:
            while not self._closed and os.getpid() == self._pid:
                if try_lock(self.fd, _MUTEX_AT):
                    return True
                if time.monotonic() - start > LOCK_S:
                    self._suspended_until = time.monotonic() + SUSPEND_S
                    break
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, 1e-3)
        except BaseException:
            self._lock.release()
            raise
        self._lock.release()
        return False

    def _opened(self) -> int:
        """A descriptor of the file, with the node's lock, of the right geometry."""
        end = time.monotonic() + OPEN_S
        while True:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
            except OSError as e:
                raise_mapped(e, f"opening the node cache {self.path}")
            try:
                self._check_owner(fd)
                while not try_lock(fd, _MUTEX_AT):
                    if time.monotonic() > end:
                        raise StoreUnavailable(
                            f"a process holds the node cache {self.path} and does nothing: stop it, or choose another folder"
                        )
                    time.sleep(1e-3)
                if os.fstat(fd).st_nlink:
                    self._check_geometry(fd)
                    return fd
            except OSError as e:
                os.close(fd)
                raise_mapped(e, f"locking the node cache {self.path}")
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # the last one of those before us has just removed it

    def _check_owner(self, fd: int) -> None:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077 or info.st_nlink > 1:
            raise StoreDenied(
                f"{self.path} is not a regular file with one name that user {os.geteuid()} owns and nobody else may open: refused; "
                "remove it, or choose another folder"
            )

    def _check_geometry(self, fd: int) -> None:
        """Writes the header of a new file, or one that nobody uses; else it must be ours."""
        header = self.geometry.header()
        if os.pread(fd, len(header), 0) == header and os.fstat(fd).st_size == self.geometry.file_bytes:
            return
        if locked_elsewhere(fd, _MEMBERS_AT, MEMBERS_MAX):
            raise ConfigError(
                f"the node cache {self.path} is in use with another size: all ranks of a node need the same store.node_cache_bytes"
            )
        try:
            os.ftruncate(fd, 0)
            os.posix_fallocate(fd, 0, self.geometry.data_at)  # a map of memory that is not there would end the process
            os.ftruncate(fd, self.geometry.file_bytes)
            failpoint("nodecache.open.empty")
            os.pwrite(fd, header, 0)
        except OSError as e:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
            if e.errno == errno.ENOSPC:
                raise StoreFull(f"no room for the table of the node cache {self.path} ({self.geometry.data_at} bytes)") from e
            raise_mapped(e, f"making the node cache {self.path}")

    def _joined(self) -> int:
        for member in range(MEMBERS_MAX):
            if try_lock(self.fd, _MEMBERS_AT + member):
                self.table.begin()
                if not locked_elsewhere(self.fd, _MEMBERS_AT, MEMBERS_MAX):
                    self.table.reset()  # what dead ranks left
                self.table.join(member)
                self.table.end()
                return member
        raise ConfigError(f"the node cache {self.path} has {MEMBERS_MAX} members already")


def remove_leftovers(folder: Path, *, but: Path) -> int:
    """Removes caches of this user in ``folder`` that no process has joined, except ``but``; returns how many."""
    removed = 0
    try:
        found = [p for p in folder.glob(f"{_PREFIX}{os.geteuid()}-*") if p != but]
    except OSError as e:
        raise_mapped(e, f"looking for node caches in {folder}")
    for path in found:
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue  # gone meanwhile, or no file of ours
        try:
            ours = stat.S_ISREG(os.fstat(fd).st_mode) and os.fstat(fd).st_uid == os.geteuid()
            if ours and try_lock(fd, _MUTEX_AT) and not locked_elsewhere(fd, _MEMBERS_AT, MEMBERS_MAX) and os.fstat(fd).st_nlink:
                path.unlink()
                removed += 1
        except OSError as e:
            raise StoreError(f"removing the node cache {path} of a run that is over: {e}") from e
        finally:
            os.close(fd)
    return removed
