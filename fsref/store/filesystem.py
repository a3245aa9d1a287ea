"""A run's root on any fsspec filesystem: memory, s3fs, and whatever else can put atomically, list after a write, and remove.

Publishing relies on the filesystem: object stores put atomically; others get a temp name and a move. Bulk removal goes through S3's own
request, whose per-key results are read; the filesystem's removal of a list is never used: s3fs reports success for keys that stayed.
Errors are mapped here, by the reply's code where there is one. Nothing in them shows a URL with credentials.
"""

import errno
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import fsspec
import numpy as np
from numpy.typing import NDArray

from fsref.config import StoreSection
from fsref.errors import (
    ConfigError,
    FsrefError,
    MissingExtra,
    ObjectCorrupt,
    ObjectExists,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from fsref.store.base import Buffer, Deletion, Durability, Entry, ObjectFile, Store, check_name
from fsref.store.bulkdelete import BULK_MAX, remove_in_bulk
from fsref.store.credentials import Credentials
from fsref.store.retry import Retries
from fsref.store.s3client import check_profile, loader
from fsref.store.s3errors import exists, from_botocore

_ATOMIC_PUT: Final = {"memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "oss"}
_BOTOCORE: Final = {"botocore", "aiobotocore"}
_S3: Final = {"s3", "s3a"}
_LATER: Final = {errno.EIO, errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT, errno.ESTALE, errno.EREMOTEIO, errno.EINTR}
SINGLE_PUT_BYTES: Final = 5 << 30
T = TypeVar("T")


def _mapped(error: Exception, asked: str) -> FsrefError:
    """Our error for whatever an fsspec filesystem raised. s3fs keeps the server's reply in the cause, where it says more."""
    if isinstance(error, FsrefError):
        return error
    for told in (error, error.__cause__):
        if isinstance(told, Exception) and (isinstance(getattr(told, "response", None), dict) or _package(told) in _BOTOCORE):
            return exists(asked) if _code(told) in {"PreconditionFailed", "412"} else from_botocore(told, asked)
    if isinstance(error, FileExistsError):
        return exists(asked)
    text = f"{asked}: {type(error).__name__}" + (f", {error.strerror}" if isinstance(error, OSError) and error.strerror else "")
    return _kind(error)(text)


def _kind(error: Exception) -> type[StoreError]:
    number = error.errno if isinstance(error, OSError) else None
    later = isinstance(error, TimeoutError | ConnectionError) or number in _LATER or _package(error) == "aiohttp"
    kinds: tuple[tuple[bool, type[StoreError]], ...] = (
        (isinstance(error, FileNotFoundError), ObjectMissing),
        (isinstance(error, PermissionError), StoreDenied),
        (number in {errno.ENOSPC, errno.EDQUOT}, StoreFull),
        (later, StoreUnavailable),
    )
    return next((kind for fits, kind in kinds if fits), StoreError)


def _code(error: Exception) -> str:
    reply = getattr(error, "response", None)
    return str(reply.get("Error", {}).get("Code", "")) if isinstance(reply, dict) else ""


def _package(error: Exception) -> str:
    return type(error).__module__.partition(".")[0]


class FilesystemFile(ObjectFile):
    """One object, read by ranges; nothing is held open."""

    def __init__(self, store: "FilesystemStore", name: str, byte_count: int) -> None:
        self._store = store
        self.name = name
        self.byte_count = byte_count

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        out[:] = self._read(offset, len(out))

    def read_view(self, offset: int, size: int, scratch: Callable[[int], NDArray[np.uint8]]) -> NDArray[np.uint8]:
        del scratch  # the filesystem hands out bytes of its own
        return self._read(offset, size)

    def _read(self, offset: int, size: int) -> NDArray[np.uint8]:
        if offset + size > self.byte_count:
            raise ObjectCorrupt(f"{self.name} ends at {self.byte_count}, {size} bytes at {offset} were asked for: truncated")
        data = self._store.fetch(self.name, offset, offset + size) if size else b""
        if len(data) != size:
            raise ObjectCorrupt(f"{self.name}: {len(data)} bytes at {offset} came, {size} were asked for: truncated")
        return np.frombuffer(data, np.uint8)

    def close(self) -> None:
        return None


class FilesystemStore(Store):
    """Objects of an fsspec filesystem below one URL. Further ``options`` go to the filesystem."""

    retries_itself = True

    def __init__(self, url: str, *, settings: StoreSection | None = None, credentials: Credentials | None = None, **options: Any) -> None:
        settings = settings or StoreSection()
        self.url = _shown(url)
        self._s3 = url.partition("://")[0] in _S3
        if self._s3:
            options = {**s3_options(settings, credentials), **options}
        self._retries = Retries(retries_max=settings.retries_max, retry_s=settings.retry_s)
        try:
            self._fs, self._base = fsspec.core.url_to_fs(url, **options)
        except ImportError as e:
            raise MissingExtra(f"the root {_shown(url)} needs another package: {e}") from e
        except ValueError as e:
            raise ConfigError(f"the root {_shown(url)} cannot be opened: {e}") from e
        self._base = self._base.rstrip("/")
        protocols = self._fs.protocol if isinstance(self._fs.protocol, tuple | list) else (self._fs.protocol,)
        self._atomic = bool(_ATOMIC_PUT.intersection(protocols))
        self.create_only = self._s3 or "memory" in protocols
        self._lock = threading.Lock()
        if self._s3:
            self._fs.retries = 1  # one loop retries, this store's
            self.bulk_delete_max = BULK_MAX if settings.bulk_delete else 1
            self._check_versions()

    @property
    def retries(self) -> int:
        """Attempts after the first, over all operations so far."""
        return self._retries.count

    def put(self, name: str, buffers: Sequence[Buffer], *, durability: Durability = "node") -> None:
        del durability  # the filesystem decides
        path = self._path(name)
        asked = f"publishing {self.url}/{name}"
        size = sum(memoryview(b).nbytes for b in buffers)
        if self._s3 and size > SINGLE_PUT_BYTES:
            raise StoreError(f"{asked}: {size} bytes, a single PUT takes at most {SINGLE_PUT_BYTES}; lower store.bytes_object_max")
        data = b"".join(bytes(memoryview(b).cast("B")) for b in buffers)
        attempts = 0

        def attempt() -> None:
            nonlocal attempts
            attempts += 1
            try:
                self._call(lambda: self._create(path, data, asked), asked)
            except ObjectExists:
                refused = True
            else:
                return
            # A reply may have been lost: of this call's earlier attempt, or of one that the client library made by itself.
            if (self._s3 or attempts > 1) and self._call(lambda: self._fs.cat_file(path), asked) == data:
                refused = False
            if refused:
                raise exists(asked)

        self._retries.run(attempt, asked)

    def _create(self, path: str, data: bytes, asked: str) -> None:
        if self._s3:
            self._fs.pipe_file(path, data, mode="create", chunksize=SINGLE_PUT_BYTES)
            return
        with self._lock:
            if self._fs.exists(path):
                raise exists(asked)
            self._write(path, data)

    def replace(self, name: str, data: bytes) -> None:
        path = self._path(name)

        def write() -> None:
            if self._s3:
                self._fs.pipe_file(path, data, chunksize=SINGLE_PUT_BYTES)
                return
            with self._lock:
                self._write(path, data)

        self._again(write, f"publishing {self.url}/{name}")

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

    def open(self, name: str, *, byte_count: int | None = None) -> FilesystemFile:
        path = self._path(name)
        if byte_count is not None and self._s3:
            return FilesystemFile(self, name, byte_count)

        def size() -> int:
            self._fs.invalidate_cache(path.rpartition("/")[0])
            return int(self._fs.size(path))

        return FilesystemFile(self, name, self._again(size, f"opening {self.url}/{name}"))

    def fetch(self, name: str, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop`` of an object; short where it ends before."""
        path = self._path(name)
        asked = f"reading {stop - start} bytes at {start} of {self.url}/{name}"
        data: bytes = self._again(lambda: self._fs.cat_file(path, start=start, end=stop), asked)
        return data

    def delete(self, names: Sequence[str]) -> dict[str, Deletion | StoreError]:
        paths = {n: self._path(n) for n in names}
        out: dict[str, Deletion | StoreError] = {}
        if self.bulk_delete_max > 1:
            for at in range(0, len(names), self.bulk_delete_max):
                out |= self._delete_bulk(names[at : at + self.bulk_delete_max])
            return out
        for name, path in paths.items():
            asked = f"removing {self.url}/{name}"
            try:
                self._again(lambda p=path: self._fs.rm_file(p), asked)  # type: ignore[misc]
                out[name] = Deletion.DONE
            except ObjectMissing:
                out[name] = Deletion.ABSENT
            except StoreError as e:
                out[name] = e
        return out

    def _delete_bulk(self, names: Sequence[str]) -> dict[str, Deletion | StoreError]:
        bucket, _, prefix = self._base.partition("/")
        keys = {n: f"{prefix}/{n}" if prefix else n for n in names}

        def remove(left: list[dict[str, str]]) -> Any:
            return self._fs.call_s3("delete_objects", Bucket=bucket, Delete={"Objects": left, "Quiet": False})

        targets = [{"Key": k} for k in keys.values()]
        asked = f"removing {len(names)} objects of {self.url}"
        outcomes = remove_in_bulk(lambda left: self._call(lambda: remove(left), asked), self._retries, targets, asked=asked)
        return dict(zip(keys, outcomes, strict=True))

    def list(self, prefix: str) -> Iterator[Entry]:
        path = self._path(prefix)

        def find() -> Any:
            self._fs.invalidate_cache(path)
            return self._fs.find(path, detail=True)

        try:
            found = self._again(find, f"listing {self.url}/{prefix}")
        except ObjectMissing:
            return
        for full, info in sorted(found.items()):
            if info.get("type") != "file":  # a server may show an empty folder where objects were
                continue
            yield Entry(full.removeprefix(self._base + "/"), int(info.get("size") or 0))

    def close(self) -> None:
        """Ends waits for retries."""
        self._retries.stop()

    def _path(self, name: str) -> str:
        return f"{self._base}/{check_name(name)}"

    def _again(self, work: Callable[[], T], asked: str) -> T:
        return self._retries.run(lambda: self._call(work, asked), asked)

    def _call(self, work: Callable[[], T], asked: str) -> T:
        try:
            return work()
        except Exception as e:  # noqa: BLE001 - the seam
            error = _mapped(e, asked)
        raise error

    def _check_versions(self) -> None:
        bucket = self._base.partition("/")[0]
        asked = f"asking whether the bucket of {self.url} keeps versions"
        try:
            reply = self._again(lambda: self._fs.call_s3("get_bucket_versioning", Bucket=bucket), asked)
        except StoreDenied as e:
            if "AccessDenied" not in str(e):
                raise
            self.versioning = "unknown"  # least privilege: the key may not ask
            return
        status = reply.get("Status", "")
        self.versioning = "on" if status == "Enabled" else "suspended" if status == "Suspended" else "off"
        if status:
            raise ConfigError(
                f'the bucket of {self.url} keeps versions ({self.versioning}): use one without versioning, or store.driver = "obstore" '
                'with store.versions = "delete"'
            )


def s3_options(settings: StoreSection, credentials: Credentials | None) -> dict[str, Any]:
    """What s3fs needs to follow ``[store]``: no shared instances, no listing cache, no proxy of the environment, one attempt a call."""
    try:
        session = importlib.import_module("aiobotocore.session").AioSession(profile=settings.profile or None)
    except ImportError:
        raise MissingExtra.of("s3", "s3fs") from None
    session.register_component("data_loader", loader())
    if settings.credentials_file:
        session.set_config_variable("credentials_file", str(Path(settings.credentials_file).expanduser()))
    check_profile(session, settings)
    addressing = settings.addressing if settings.addressing != "auto" else ("path" if settings.endpoint else "auto")
    config: dict[str, Any] = {
        "connect_timeout": settings.connect_s,
        "read_timeout": settings.stall_s,
        "max_pool_connections": settings.connections_max,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "s3": {"addressing_style": addressing},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    if settings.proxy != "environment":
        config["proxies"] = {s: settings.proxy for s in ("http", "https") if settings.proxy}
    client = {"region_name": settings.region or ("us-east-1" if settings.endpoint else None), "verify": settings.ca_file or None}
    out: dict[str, Any] = {
        "session": session,
        "config_kwargs": config,
        "client_kwargs": {k: v for k, v in client.items() if v is not None},
        "skip_instance_cache": True,
        "use_listings_cache": False,
    }
    if settings.endpoint:
        out["endpoint_url"] = settings.endpoint
    if credentials is not None:
        out |= {"key": credentials.access_key_id, "secret": credentials.secret_access_key, "token": credentials.session_token}
    return out


def _shown(url: str) -> str:
    """The URL without user info and query, for messages."""
    head, sep, rest = url.partition("://")
    if not sep:
        return url
    return f"{head}://{rest.rpartition('@')[2].partition('?')[0]}"
