"""A run's root as a local or network filesystem folder: dirfd-relative access, no symlink is ever followed below the root.

Publishing is temp name in the same directory, fsync, rename, directory fsync. fsspec's local filesystem is not used for that: it writes
in place, or stages in the system's temp folder. Errors of the kernel are mapped here and nowhere else. An answer that a network filesystem
lost is looked up, not believed: a rename that failed and happened counts as done.
"""

import contextlib
import errno
import os
import shutil
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Never

import numpy as np
from numpy.typing import NDArray

from fsref.errors import ObjectCorrupt, ObjectExists, ObjectMissing, StoreDenied, StoreError, StoreFull, StoreUnavailable
from fsref.failpoints import armed, failpoint
from fsref.store.base import Buffer, Deletion, Durability, Entry, ObjectFile, Store, check_name

DIR_FDS_MAX: Final = 64
DEPTH_MAX: Final = 32
"""Folders inside each other that a listing goes into."""
IOV_MAX: Final = 1 if armed("store.put.mid") else 512
"""Buffers per write. A test that stops in the middle of a file needs a middle."""
FOLDER_MODE: Final = 0o2770
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_FOLDER: Final = {errno.ELOOP, errno.ENOTDIR}
"""What opening a symbolic link, or a file, in the place of a folder gives: present and wrong, never absent."""
_DENIED: Final = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EMLINK, *_NO_FOLDER}
_LATER: Final = {
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
    errno.ENOTCONN, errno.ECONNABORTED, errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EREMOTEIO,
}  # fmt: skip
"""Among them what a FUSE mount says whose process died."""


def raise_mapped(error: OSError, asked: str) -> Never:
    """Raises the ``StoreError`` for an ``OSError``; ``asked`` says what was tried on what."""
    if isinstance(error, StoreError):
        raise error
    text = f"{asked}: {error.strerror or error}"
    if error.errno == errno.ENOENT:
        raise ObjectMissing(text) from error
    if error.errno == errno.EEXIST:
        raise ObjectExists(f"{asked}: a file of that name is there already; names are never reused") from error
    if error.errno in _FULL:
        raise StoreFull(f"{text}; free space or inodes, or raise the quota") from error
    if error.errno in _DENIED:
        hint = "files and symbolic links in a folder's place are refused" if error.errno in _NO_FOLDER else "check owner, mode and mount"
        raise StoreDenied(f"{text}; {hint}") from error
    if error.errno in _LATER:
        raise StoreUnavailable(text) from error
    raise StoreError(text) from error


def rename_known(source: str, target: str, written: os.stat_result, *, dir_fd: int) -> None:
    """Renames within a folder. An error counts only if ``target`` is not the file ``written`` after it: the answer may have been lost."""
    try:
        os.rename(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except OSError:
        try:
            there = os.path.samestat(os.stat(target, dir_fd=dir_fd, follow_symlinks=False), written)
        except OSError:
            there = False
        if not there:
            raise


def _from(views: Sequence[Buffer], count: int) -> list[Buffer]:
    """What is left of the buffers behind their first ``count`` bytes."""
    left = [memoryview(v) for v in views]
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    if count:
        left[0] = left[0][count:]
    return list(left)


class PosixFile(ObjectFile):
    """An open regular file."""

    def __init__(self, fd: int, name: str, byte_count: int) -> None:
        self._fd = fd
        self.descriptor = fd
        self.name = name
        self.byte_count = byte_count

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        self.read_scattered(offset, [out])

    def read_scattered(self, offset: int, outs: Sequence[NDArray[np.uint8]]) -> None:
        wanted, done = sum(map(len, outs)), 0
        views: list[Buffer] = [out for out in outs if len(out)]
        while True:
            try:
                n = os.preadv(self._fd, views[:IOV_MAX], offset + done)
            except OSError as e:
                raise_mapped(e, f"reading {wanted} bytes at {offset} of {self.name}")
            done += n
            if done == wanted:
                return
            if n == 0:
                raise ObjectCorrupt(f"{self.name} ends at {offset + done}, {wanted} bytes at {offset} were asked for: truncated")
            views = _from(views, n)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class PosixStore(Store):
    """Objects as files below one folder."""

    def __init__(self, root: str | Path, *, create: bool = False) -> None:
        path = Path(root).absolute()
        self.url = str(path)
        self.posix_path = str(path)
        self._lock = threading.Lock()
        self._dirs: OrderedDict[str, int] = OrderedDict()
        self._serial = 0
        try:
            if create:
                path.mkdir(parents=True, exist_ok=True)
            self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as e:
            raise_mapped(e, f"opening the root {path}")

    def put(self, name: str, buffers: Sequence[Buffer], *, durability: Durability = "node") -> None:
        check_name(name)
        folder, _, leaf = name.rpartition("/")
        with self._folder(folder, create=True) as fd:
            self._publish(fd, leaf, f".{leaf.rsplit('.', 1)[0]}.tmp", buffers, durability=durability, replace=False)

    def replace(self, name: str, data: bytes) -> None:
        check_name(name)
        folder, _, leaf = name.rpartition("/")
        with self._lock:
            self._serial += 1
            staging = f".{leaf}.{os.getpid()}-{self._serial}.tmp"
        with self._folder(folder, create=True) as fd:
            self._publish(fd, leaf, staging, [data], durability="node", replace=True)

    def _publish(self, folder: int, leaf: str, staging: str, buffers: Sequence[Buffer], *, durability: Durability, replace: bool) -> None:
        asked = f"publishing {leaf} under {self.url}"
        failpoint("store.put.before")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(staging, flags, 0o640, dir_fd=folder)
        except OSError as e:
            raise_mapped(e, asked)
        left = staging
        try:
            try:
                _write_all(fd, buffers)
                failpoint("store.put.written")
                if durability == "node":
                    os.fsync(fd)
                written = os.fstat(fd)
            finally:
                os.close(fd)
            if not replace and _exists(leaf, folder):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            rename_known(staging, leaf, written, dir_fd=folder)
            left = "" if replace else leaf
            failpoint("store.put.renamed")
            if durability == "node":
                os.fsync(folder)
        except BaseException as e:
            if left:
                with contextlib.suppress(OSError):
                    os.unlink(left, dir_fd=folder)
            if isinstance(e, OSError):
                raise_mapped(e, asked)
            raise

    def open(self, name: str, *, byte_count: int | None = None) -> PosixFile:
        del byte_count  # fstat costs nothing
        check_name(name)
        folder, _, leaf = name.rpartition("/")
        with self._folder(folder, create=False) as fd_folder:
            try:
                fd = os.open(leaf, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=fd_folder)
            except OSError as e:
                raise_mapped(e, f"opening {self.url}/{name}")
        try:
            info = os.fstat(fd)
        except OSError as e:
            os.close(fd)
            raise_mapped(e, f"opening {self.url}/{name}")
        if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
            os.close(fd)
            raise StoreDenied(f"{self.url}/{name} is not a regular file with one name: refused")
        return PosixFile(fd, name, info.st_size)

    def delete(self, names: Sequence[str]) -> dict[str, Deletion | StoreError]:
        out: dict[str, Deletion | StoreError] = {}
        for name in names:
            check_name(name)
            folder, _, leaf = name.rpartition("/")
            try:
                failpoint("store.delete.before")
                with self._folder(folder, create=False) as fd:
                    os.unlink(leaf, dir_fd=fd)
                failpoint("store.delete.after")
                out[name] = Deletion.DONE
            except (ObjectMissing, FileNotFoundError):
                out[name] = Deletion.ABSENT
            except StoreError as e:
                out[name] = e
            except OSError as e:
                try:
                    raise_mapped(e, f"removing {self.url}/{name}")
                except StoreError as mapped:
                    out[name] = mapped
        return out

    def list(self, prefix: str) -> Iterator[Entry]:
        check_name(prefix)
        try:
            failpoint("store.list.before")
            with self._folder(prefix, create=False) as folder:
                fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)  # a dup would share its place in the folder
        except ObjectMissing as e:
            self._check_root(e)
            return
        except OSError as e:
            raise_mapped(e, f"listing {self.url}/{prefix}")
        try:
            yield from self._walk(fd, prefix)
        finally:
            os.close(fd)

    def _check_root(self, cause: ObjectMissing) -> None:
        """Nothing below a root that was removed proves that nothing was there. Raises ``StoreError``."""
        try:
            gone = os.fstat(self._root).st_nlink == 0
        except OSError as e:
            raise_mapped(e, f"looking at the root {self.url}")
        if gone:
            raise StoreError(f"the root {self.url} was removed while it was in use: restore it, or stop") from cause

    def _walk(self, fd: int, prefix: str) -> Iterator[Entry]:
        try:
            with os.scandir(fd) as entries:
                found = sorted(entries, key=lambda e: e.name)
            for entry in found:
                name = f"{prefix}/{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    if name.count("/") > DEPTH_MAX:
                        yield Entry(name, 0)  # no folder of a run is so deep; it is listed itself, as something foreign
                        continue
                    inner = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                    try:
                        yield from self._walk(inner, name)
                    finally:
                        os.close(inner)
                    continue
                try:
                    size = os.stat(entry.name, dir_fd=fd, follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue  # removed since the scan, as if it had been listed a moment later
                yield Entry(name, size)
        except OSError as e:
            raise_mapped(e, f"listing {self.url}/{prefix}")

    def remove_all(self, prefix: str) -> int:
        check_name(prefix)
        count = sum(1 for _ in self.list(prefix))
        folder, _, leaf = prefix.rpartition("/")
        try:
            with self._folder(folder, create=False) as fd:
                shutil.rmtree(leaf, dir_fd=fd)  # relative to descriptors all the way down, and it refuses links
                os.fsync(fd)
        except (ObjectMissing, FileNotFoundError):
            return 0
        except OSError as e:
            raise_mapped(e, f"removing {self.url}/{prefix}")
        return count

    def close(self) -> None:
        with self._lock:
            for fd in self._dirs.values():
                os.close(fd)
            self._dirs.clear()
            if self._root >= 0:
                os.close(self._root)
                self._root = -1

    @contextlib.contextmanager
    def _folder(self, folder: str, *, create: bool) -> Iterator[int]:
        """A descriptor of a folder below the root, each component opened without following links; valid inside the block."""
        try:
            with self._lock:
                cached = self._dirs.get(folder)
                if cached is not None and _usable(cached):
                    self._dirs.move_to_end(folder)
                    fd = os.dup(cached)
                else:
                    fd = self._open_folder(folder, create=create)
                    self._remember(folder, os.dup(fd))
        except OSError as e:
            raise_mapped(e, f"opening the folder {self.url}/{folder}")
        try:
            yield fd
        finally:
            os.close(fd)

    def _open_folder(self, folder: str, *, create: bool) -> int:
        at = os.dup(self._root)
        try:
            for part in folder.split("/") if folder else ():
                made = create and _make(part, at)
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
                os.close(at)
                at = inner
                if made:
                    share(at)
        except OSError as e:
            os.close(at)
            raise_mapped(e, f"opening the folder {self.url}/{folder}")
        return at

    def _remember(self, folder: str, fd: int) -> None:
        old = self._dirs.pop(folder, None)
        if old is not None:
            os.close(old)
        self._dirs[folder] = fd
        while len(self._dirs) > DIR_FDS_MAX:
            _, evicted = self._dirs.popitem(last=False)
            os.close(evicted)


def share(folder: int) -> None:
    """Mode 2770, whatever the umask: every role of the run must be able to remove what another one's user wrote."""
    with contextlib.suppress(OSError):  # a mount without modes decides by itself who may
        os.fchmod(folder, FOLDER_MODE)


def _make(name: str, folder: int) -> bool:
    """Makes a folder; whether it was not there."""
    try:
        os.mkdir(name, FOLDER_MODE, dir_fd=folder)
    except FileExistsError:
        return False
    return True


def _usable(folder: int) -> bool:
    """Whether a descriptor that was kept still names its folder: not removed, not stale."""
    try:
        return os.fstat(folder).st_nlink > 0
    except OSError:
        return False


def _write_all(fd: int, buffers: Sequence[Buffer]) -> None:
    views = [memoryview(b).cast("B") for b in buffers if memoryview(b).nbytes]
    at = 0
    while at < len(views):
        n = os.writev(fd, views[at : at + IOV_MAX])
        if n == 0:
            raise OSError(errno.EIO, "write made no progress")
        while at < len(views) and n >= len(views[at]):
            n -= len(views[at])
            at += 1
        if n:
            views[at] = views[at][n:]
        if at < len(views):
            failpoint("store.put.mid")


def _exists(leaf: str, folder: int) -> bool:
    try:
        os.stat(leaf, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
