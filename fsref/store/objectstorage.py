"""A run's root in an S3-compatible bucket, through obstore. Needs the extra ``s3``.

One PUT publishes, ranged GETs read, removals are read key by key. Credentials come from the environment or the instance; they stay in
the client and are never shown. A PUT whose reply was lost meets its own object on the retry: equal bytes are success.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Never

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from fsref.errors import ConfigError, MissingExtra, ObjectCorrupt, ObjectExists, ObjectMissing, StoreDenied, StoreError, StoreUnavailable
from fsref.store.base import Buffer, Deletion, Durability, Entry, ObjectFile, Store, check_name

try:
    import obstore
    from obstore import exceptions as failures
    from obstore.store import S3Store
except ImportError:  # a base install: opening an s3:// root says which extra it needs
    _AVAILABLE = False
else:
    _AVAILABLE = True

if TYPE_CHECKING:
    from obstore.store import S3Config


def _raise_mapped(error: Exception, asked: str) -> Never:
    """The one place where obstore's errors become ours; without the request's headers, which may hold secrets."""
    text = f"{asked}: {type(error).__name__}"
    if isinstance(error, FileNotFoundError | failures.NotFoundError):
        raise ObjectMissing(text) from None
    if isinstance(error, failures.AlreadyExistsError):
        raise ObjectExists(f"{asked}: an object of that name is there already; names are never reused") from None
    if isinstance(error, PermissionError | failures.PermissionDeniedError | failures.UnauthenticatedError):
        raise StoreDenied(f"{text}; check the credentials and the bucket's policy") from None
    if isinstance(error, failures.UnknownConfigurationKeyError):
        raise ConfigError(text) from None
    if isinstance(error, failures.GenericError | OSError | TimeoutError):
        raise StoreUnavailable(f"{text}; {_reason(error)}") from None
    raise StoreError(text) from None


def _reason(error: Exception) -> str:
    """Status and cause from obstore's message, without URLs, headers and bodies."""
    text = str(error)
    status = re.findall(r"status: (\d{3})", text)
    cause = re.findall(r'message: "([^"]{1,80})"', text)
    return ", ".join([f"status {s}" for s in status[:1]] + cause[-1:]) or "no answer"


class ObjectStorageFile(ObjectFile):
    """One object; every read is one ranged GET."""

    def __init__(self, client: S3Store, name: str, byte_count: int) -> None:
        self._client = client
        self.name = name
        self.byte_count = byte_count

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        if offset + len(out) > self.byte_count:
            raise ObjectCorrupt(f"{self.name} ends at {self.byte_count}, {len(out)} bytes at {offset} were asked for: truncated")
        if not len(out):
            return
        try:
            data = obstore.get_range(self._client, self.name, start=offset, length=len(out))
        except (failures.BaseError, OSError) as e:
            _raise_mapped(e, f"reading {len(out)} bytes at {offset} of {self.name}")
        if len(data) != len(out):
            raise ObjectCorrupt(f"{self.name}: {len(data)} bytes at {offset} came, {len(out)} were asked for: truncated")
        out[:] = np.frombuffer(data, np.uint8)

    def close(self) -> None:
        return None


class ObjectStorageStore(Store):
    """Objects of one bucket below a prefix."""

    def __init__(self, url: str, *, endpoint: str = "", region: str = "") -> None:
        if not _AVAILABLE:
            raise MissingExtra.of("s3", "obstore")
        scheme, _, rest = url.partition("://")
        bucket, _, prefix = rest.partition("/")
        if scheme != "s3" or not bucket or "@" in bucket:
            raise ConfigError(f"an object storage root is s3://bucket/prefix, not {url.rpartition('@')[2]!r}")
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        config: S3Config = {}
        if endpoint:
            config["endpoint"] = endpoint
        if region:
            config["region"] = region
        try:
            self._client = S3Store(
                bucket, prefix=prefix.strip("/") or None, config=config, client_options={"allow_http": endpoint.startswith("http://")}
            )
        except (failures.BaseError, ValueError) as e:
            _raise_mapped(e, f"opening {self.url}")

    def put(self, name: str, buffers: Sequence[Buffer], *, durability: Durability = "node") -> None:
        del durability  # a PUT that was answered is durable
        check_name(name)
        data = b"".join(memoryview(b).cast("B") for b in buffers)
        try:
            obstore.put(self._client, name, data, mode="create", use_multipart=False)
        except failures.AlreadyExistsError as e:
            if not self._holds(name, data):
                _raise_mapped(e, f"publishing {self.url}/{name}")
        except (failures.BaseError, OSError) as e:
            _raise_mapped(e, f"publishing {self.url}/{name}")

    def _holds(self, name: str, data: bytes) -> bool:
        try:
            with self.open(name) as file:
                if file.byte_count != len(data):
                    return False
                found = np.empty(len(data), np.uint8)
                file.read_into(0, found)
        except StoreError:
            return False
        return bool(google_crc32c.value(found) == google_crc32c.value(data))

    def replace(self, name: str, data: bytes) -> None:
        check_name(name)
        try:
            obstore.put(self._client, name, data, mode="overwrite", use_multipart=False)
        except (failures.BaseError, OSError) as e:
            _raise_mapped(e, f"publishing {self.url}/{name}")

    def open(self, name: str) -> ObjectStorageFile:
        check_name(name)
        try:
            size = int(obstore.head(self._client, name)["size"])
        except (failures.BaseError, OSError) as e:
            _raise_mapped(e, f"opening {self.url}/{name}")
        return ObjectStorageFile(self._client, name, size)

    def delete(self, names: Sequence[str]) -> dict[str, Deletion | StoreError]:
        out: dict[str, Deletion | StoreError] = {}
        for name in names:
            check_name(name)
            try:
                obstore.delete(self._client, name)
                out[name] = Deletion.DONE
            except (failures.BaseError, OSError) as e:
                try:
                    _raise_mapped(e, f"removing {self.url}/{name}")
                except ObjectMissing:
                    out[name] = Deletion.ABSENT
                except StoreError as mapped:
                    out[name] = mapped
        return out

    def list(self, prefix: str) -> Iterator[Entry]:
        check_name(prefix)
        try:
            for page in obstore.list(self._client, prefix=f"{prefix}/"):
                for info in page:
                    yield Entry(info["path"], int(info["size"]))
        except (failures.BaseError, OSError) as e:
            _raise_mapped(e, f"listing {self.url}/{prefix}")

    def close(self) -> None:
        return None
