"""A run's root in an S3-compatible bucket: obstore moves the bytes, botocore removes in bulk. Needs the extra ``s3``.

One PUT publishes (at most 5 GiB, no multipart, so no orphaned parts), one ranged GET reads, one DeleteObjects removes up to 1,000 names.
Every operation is retried within the config's bounds. A PUT whose reply was lost meets its own object on the retry: equal bytes are
success. A body that breaks off or stands still is continued where it ended. Buckets that keep versions are refused, or emptied by version.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from fsref.config import StoreSection
from fsref.errors import ConfigError, ObjectCorrupt, ObjectExists, StoreDenied, StoreError, StoreUnavailable
from fsref.store.base import Buffer, Deletion, Durability, Entry, ObjectFile, Store, Versioning, check_name
from fsref.store.bulkdelete import BULK_MAX
from fsref.store.credentials import Credentials
from fsref.store.retry import Retries
from fsref.store.s3client import S3Client
from fsref.store.s3delete import remove_bulk, remove_each, remove_versions
from fsref.store.s3errors import exists, from_botocore, from_obstore

with contextlib.suppress(ImportError):  # S3Client says which extra is missing
    import obstore

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta
    from obstore.store import S3Store

PUT_BYTES_MAX: Final = 5 << 30
"""S3's limit for a single PUT."""
STREAM_BYTES: Final = 4 << 20
"""Bytes of a body that are handed over at a time: what at most is asked for again when it breaks off."""
VIEW_BYTES_MAX: Final = 32 << 20
"""A body up to this size is first asked for in one piece, which costs no copy, and no memory beside the HTTP client's own."""
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", re.ASCII)
T = TypeVar("T")


class ObjectStorageFile(ObjectFile):
    """One object; every read is one ranged GET, more only where it breaks off. Nothing is held open."""

    def __init__(self, store: ObjectStorageStore, name: str, byte_count: int) -> None:
        self._store = store
        self.name = name
        self.byte_count = byte_count

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        if offset + len(out) > self.byte_count:
            raise ObjectCorrupt(f"{self.name} ends at {self.byte_count}, {len(out)} bytes at {offset} were asked for: truncated")
        if len(out):
            self._store.fetch(self.name, offset, out, byte_count=self.byte_count)

    def read_view(self, offset: int, size: int, scratch: Callable[[int], NDArray[np.uint8]]) -> NDArray[np.uint8]:
        if not 0 < size <= VIEW_BYTES_MAX or offset + size > self.byte_count:
            return super().read_view(offset, size, scratch)
        return self._store.view(self.name, offset, size, scratch, byte_count=self.byte_count)

    def close(self) -> None:
        return None


@dataclass
class _Body:
    """A range of an object that is asked for."""

    client: S3Store
    name: str
    offset: int
    size: int
    byte_count: int
    """Of the object, as it must be."""
    asked: str
    done: int = 0
    """Bytes that were handed over."""

    def whole(self) -> NDArray[np.uint8]:
        """All of it, in memory of its own."""
        data = np.frombuffer(self._get().bytes(), np.uint8)
        if len(data) != self.size:
            raise self._ended(len(data))
        return data

    def go_on(self, out: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """What is missing in ``out``, [size]; returns ``out``. After an error it may be called again with it."""
        for piece in self._get().stream(min_chunk_size=STREAM_BYTES):
            if self.done + len(piece) > self.size:
                raise self._ended(self.done + len(piece))
            out[self.done : self.done + len(piece)] = np.frombuffer(piece, np.uint8)
            self.done += len(piece)
        if self.done < self.size:
            raise self._ended(self.done)
        return out

    def _get(self) -> GetResult:
        reply = obstore.get(self.client, self.name, options={"range": (self.offset + self.done, self.offset + self.size)})
        size = reply.meta["size"]
        if size != self.byte_count:
            raise ObjectCorrupt(f"{self.asked}: it has {size} bytes, {self.byte_count} are expected: truncated or replaced")
        return reply

    def _ended(self, found: int) -> StoreError:
        if found > self.size:
            return ObjectCorrupt(f"{self.asked}: more bytes came")
        return StoreUnavailable(f"{self.asked}: the body ended after {found} bytes")


class ObjectStorageStore(Store):
    """Objects of one bucket below a prefix.

    Opening asks the bucket once whether it keeps versions. Raises ``ConfigError`` for a root or bucket that cannot be used,
    ``StoreDenied`` without credentials, ``StoreUnavailable`` if nobody answers.
    """

    bulk_delete_max = BULK_MAX
    create_only = True
    retries_itself = True

    def __init__(self, url: str, *, settings: StoreSection, credentials: Credentials | None = None) -> None:
        scheme, _, rest = url.partition("://")
        bucket, _, prefix = rest.partition("/")
        if scheme != "s3" or not _BUCKET.fullmatch(bucket) or "@" in url or "?" in url:
            shown = repr(url) if "@" not in url and "?" not in url else "a URL with credentials or a query (not shown)"
            raise ConfigError(f"an object storage root is s3://bucket/prefix, not {shown}")
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._settings = settings
        self._retries = Retries(retries_max=settings.retries_max, retry_s=settings.retry_s)
        self._client = S3Client(bucket, prefix.strip("/"), settings, credentials, asked=f"opening {self.url}")
        if not settings.bulk_delete:
            self.bulk_delete_max = 1
        self.versioning = self._versioning()
        self._refuse_versions()

    @property
    def retries(self) -> int:
        """Attempts after the first, over all operations so far."""
        return self._retries.count

    def put(self, name: str, buffers: Sequence[Buffer], *, durability: Durability = "node") -> None:
        del durability  # a PUT that was answered is durable
        check_name(name)
        size = sum(memoryview(b).nbytes for b in buffers)
        asked = f"publishing {self.url}/{name}"
        if size > PUT_BYTES_MAX:
            raise StoreError(f"{asked}: {size} bytes, a single PUT takes at most {PUT_BYTES_MAX}; lower store.bytes_object_max")
        data = b"".join(memoryview(b).cast("B") for b in buffers)
        self._retries.run(lambda: self._create(name, data, asked), asked)

    def _create(self, name: str, data: bytes, asked: str) -> None:
        try:
            self._call(lambda: obstore.put(self._client.writer, name, data, mode="create", use_multipart=False), asked)
        except ObjectExists:
            found: ObjectExists | None = exists(asked)
        else:
            return
        if self._holds(name, data):  # raises StoreUnavailable, never a verdict, where that cannot be told
            found = None
        if found is not None:
            raise found

    def _holds(self, name: str, data: bytes) -> bool:
        asked = f"comparing {self.url}/{name} with what was to be published"
        there = self._call(lambda: int(obstore.head(self._client.reader, name)["size"]), asked)
        if there != len(data):
            return False
        found = self._call(lambda: obstore.get(self._client.reader, name).bytes(), asked)
        return bool(google_crc32c.value(bytes(found)) == google_crc32c.value(data))

    def replace(self, name: str, data: bytes) -> None:
        check_name(name)
        asked = f"publishing {self.url}/{name}"
        self._again(lambda: obstore.put(self._client.writer, name, data, mode="overwrite", use_multipart=False), asked)

    def open(self, name: str, *, byte_count: int | None = None) -> ObjectStorageFile:
        check_name(name)
        if byte_count is None:
            byte_count = self._again(lambda: int(obstore.head(self._client.reader, name)["size"]), f"opening {self.url}/{name}")
        return ObjectStorageFile(self, name, byte_count)

    def fetch(self, name: str, offset: int, out: NDArray[np.uint8], *, byte_count: int) -> None:
        """Fills ``out`` from ``offset`` of an object that has ``byte_count`` bytes; a body that breaks off is continued."""
        body = self._body(name, offset, len(out), byte_count)
        self._again(lambda: body.go_on(out), body.asked)

    def view(self, name: str, offset: int, size: int, scratch: Callable[[int], NDArray[np.uint8]], *, byte_count: int) -> NDArray[np.uint8]:
        """``size`` bytes from ``offset`` as they came, without a copy; after a failure as ``fetch``, into ``scratch(size)``."""
        body = self._body(name, offset, size, byte_count)
        failed = False

        def attempt() -> NDArray[np.uint8]:
            nonlocal failed
            if not failed:
                failed = True
                return body.whole()
            return body.go_on(scratch(size))

        return self._again(attempt, body.asked)

    def _body(self, name: str, offset: int, size: int, byte_count: int) -> _Body:
        return _Body(self._client.reader, name, offset, size, byte_count, f"reading {size} bytes at {offset} of {self.url}/{name}")

    def read(self, name: str, *, bytes_max: int) -> bytes:
        """One GET, without asking for the size first."""
        check_name(name)
        asked = f"reading {self.url}/{name}"

        def attempt() -> bytes:
            reply = obstore.get(self._client.reader, name)
            size = reply.meta["size"]
            if size > bytes_max:
                raise StoreError(f"{self.url}/{name} has {size} bytes, at most {bytes_max} are read here")
            data = bytes(reply.bytes())
            if len(data) != size:
                raise StoreUnavailable(f"{asked}: {len(data)} of {size} bytes came")
            return data

        return self._again(attempt, asked)

    def delete(self, names: Sequence[str]) -> dict[str, Deletion | StoreError]:
        for name in names:
            check_name(name)
        if self.versioning in {"on", "suspended"}:
            return remove_versions(self._client, self._retries, names, url=self.url)
        if not self._settings.bulk_delete:
            return remove_each(self._client, self._retries, names, url=self.url)
        return remove_bulk(self._client, self._retries, names, url=self.url)

    def list(self, prefix: str) -> Iterator[Entry]:
        check_name(prefix)
        asked = f"listing {self.url}/{prefix}"
        last: str | None = None
        pages: Iterator[Sequence[ObjectMeta]] | None = None

        def page() -> Sequence[ObjectMeta] | None:
            nonlocal pages
            if pages is None:  # at first, and after an error: goes on behind what was yielded
                pages = iter(obstore.list(self._client.reader, prefix=f"{prefix}/", offset=last))
            try:
                return next(pages, None)
            except BaseException:
                pages = None
                raise

        while (found := self._again(page, asked)) is not None:
            for info in found:
                last = info["path"]
                yield Entry(last, int(info["size"]))

    def close(self) -> None:
        """Ends waits for retries; requests in flight end by their own time limits."""
        self._retries.stop()

    def _again(self, work: Callable[[], T], asked: str) -> T:
        return self._retries.run(lambda: self._call(work, asked), asked)

    def _call(self, work: Callable[[], T], asked: str) -> T:
        """One request; errors of obstore become ours, without their text. Ours pass."""
        with self._client.slot():
            try:
                return work()
            except StoreError:
                raise
            except Exception as e:  # noqa: BLE001 - the seam
                error = from_obstore(e, asked)
        raise error

    def _versioning(self) -> Versioning:
        asked = f"asking whether the bucket of {self.url} keeps versions"

        def ask() -> Versioning:
            try:
                reply = self._client.control.get_bucket_versioning(Bucket=self._client.bucket)
            except Exception as e:  # noqa: BLE001 - the seam
                error = from_botocore(e, asked)
            else:
                return {"Enabled": "on", "Suspended": "suspended"}.get(reply.get("Status", ""), "off")  # type: ignore[return-value]
            if isinstance(error, StoreDenied) and "AccessDenied" in str(error):
                return "unknown"  # least privilege: the key may not ask
            if "NotImplemented" in str(error):
                return "off"
            raise error

        return self._retries.run(ask, asked)

    def _refuse_versions(self) -> None:
        if self.versioning not in {"on", "suspended"}:
            return
        if self._settings.versions == "refuse":
            raise ConfigError(
                f"the bucket of {self.url} keeps versions ({self.versioning}), so what is removed would stay: use a bucket "
                'without versioning, or set store.versions = "delete" to remove every version by its id'
            )
        if self._locks():
            raise ConfigError(f"the bucket of {self.url} locks new objects by default, so nothing could be removed: use another bucket")

    def _locks(self) -> bool:
        try:
            reply = self._client.control.get_object_lock_configuration(Bucket=self._client.bucket)
        except Exception:  # noqa: BLE001 - no lock configuration is an error in S3's terms; a locked object shows at its removal
            return False
        return bool(reply.get("ObjectLockConfiguration", {}).get("Rule"))
