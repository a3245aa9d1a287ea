"""A run's root on any fsspec filesystem: memory, s3fs, and whatever else can put atomically, list after a write, and remove.

Publishing relies on the filesystem: object stores put atomically; others get a temp name and a move. Removal goes one by one,
because bulk removal of some filesystems reports success for keys that stayed.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

import fsspec
import numpy as np
from numpy.typing import NDArray

from fsref.errors import ConfigError, MissingExtra, ObjectCorrupt, ObjectExists, ObjectMissing, StoreDenied, StoreError, StoreUnavailable
from fsref.store.base import Buffer, Deletion, Durability, Entry, ObjectFile, Store, check_name

_ATOMIC_PUT: Final = {"memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "oss"}


def _mapped(error: Exception, asked: str) -> StoreError:
    """The ``StoreError`` for whatever an fsspec filesystem raised."""
    if isinstance(error, StoreError):
        return error
    text = f"{asked}: {error}"
    if isinstance(error, FileNotFoundError):
        return ObjectMissing(text)
    if isinstance(error, FileExistsError):
        return ObjectExists(text)
    if isinstance(error, PermissionError):
        return StoreDenied(text)
    if isinstance(error, TimeoutError | ConnectionError):
        return StoreUnavailable(text)
    return StoreError(text)


class FilesystemFile(ObjectFile):
    """One object, read by ranges; nothing is held open."""

    def __init__(self, fs: Any, path: str, name: str, byte_count: int) -> None:
        self._fs, self._path = fs, path
        self.name = name
        self.byte_count = byte_count

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        try:
            data = self._fs.cat_file(self._path, start=offset, end=offset + len(out))
        except Exception as e:
            raise _mapped(e, f"reading {self.name}") from e
        if len(data) != len(out):
            raise ObjectCorrupt(f"{self.name}: {len(data)} bytes at {offset} came, {len(out)} were asked for: truncated")
        out[:] = np.frombuffer(data, np.uint8)

    def close(self) -> None:
        return None


class FilesystemStore(Store):
    """Objects of an fsspec filesystem below one URL."""

    def __init__(self, url: str, **options: Any) -> None:
        try:
            self._fs, self._base = fsspec.core.url_to_fs(url, **options)
        except ImportError as e:
            raise MissingExtra(f"the root {_shown(url)} needs another package: {e}") from e
        except ValueError as e:
            raise ConfigError(f"the root {_shown(url)} cannot be opened: {e}") from e
        self._base = self._base.rstrip("/")
        protocols = self._fs.protocol if isinstance(self._fs.protocol, tuple | list) else (self._fs.protocol,)
        self._atomic = bool(_ATOMIC_PUT.intersection(protocols))
        self._lock = threading.Lock()
        self.url = _shown(url)

    def put(self, name: str, buffers: Sequence[Buffer], *, durability: Durability = "node") -> None:
        del durability  # the filesystem decides
        path = self._path(name)
        try:
            with self._lock:
                if self._fs.exists(path):
                    raise ObjectExists(f"publishing {self.url}/{name}: an object of that name is there already; names are never reused")
                self._write(path, b"".join(bytes(memoryview(b).cast("B")) for b in buffers))
        except Exception as e:
            raise _mapped(e, f"publishing {self.url}/{name}") from e

    def replace(self, name: str, data: bytes) -> None:
        try:
            with self._lock:
                self._write(self._path(name), data)
        except Exception as e:
            raise _mapped(e, f"publishing {self.url}/{name}") from e

    def _write(self, path: str, data: bytes) -> None:
        folder, _, leaf = path.rpartition("/")
        self._fs.makedirs(folder, exist_ok=True)
        if self._atomic:
            self._fs.pipe_file(path, data)
            return
        staging = f"{folder}/.{leaf.rsplit('.', 1)[0]}.tmp"
        try:
            self._fs.pipe_file(staging, data)
            self._fs.mv(staging, path)
        except BaseException:
            if self._fs.exists(staging):
                self._fs.rm_file(staging)
            raise

    def open(self, name: str) -> FilesystemFile:
        path = self._path(name)
        try:
            self._fs.invalidate_cache(path.rpartition("/")[0])
            size = int(self._fs.size(path))
        except Exception as e:
            raise _mapped(e, f"opening {self.url}/{name}") from e
        return FilesystemFile(self._fs, path, name, size)

    def delete(self, names: Sequence[str]) -> dict[str, Deletion | StoreError]:
        out: dict[str, Deletion | StoreError] = {}
        for name in names:
            path = self._path(name)
            try:
                if self._fs.exists(path):
                    self._fs.rm_file(path)
                    out[name] = Deletion.DONE
                else:
                    out[name] = Deletion.ABSENT
            except FileNotFoundError:
                out[name] = Deletion.ABSENT
            except Exception as e:  # noqa: BLE001 - the seam
                out[name] = _mapped(e, f"removing {self.url}/{name}")
        return out

    def list(self, prefix: str) -> Iterator[Entry]:
        path = self._path(prefix)
        try:
            self._fs.invalidate_cache(path)
            found = self._fs.find(path, detail=True)
        except FileNotFoundError:
            return
        except Exception as e:
            raise _mapped(e, f"listing {self.url}/{prefix}") from e
        for full, info in sorted(found.items()):
            yield Entry(full.removeprefix(self._base + "/"), int(info.get("size") or 0))

    def close(self) -> None:
        return None

    def _path(self, name: str) -> str:
        return f"{self._base}/{check_name(name)}"


def _shown(url: str) -> str:
    """The URL without user info and query, for messages."""
    head, sep, rest = url.partition("://")
    if not sep:
        return url
    rest = rest.split("?", 1)[0]
    host, slash, tail = rest.partition("/")
    return f"{head}://{host.rpartition('@')[2]}{slash}{tail}"
