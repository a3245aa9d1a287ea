"""Opening a run's root by its URL: the one place that knows which backend serves which scheme."""

from pathlib import Path
from urllib.parse import unquote

from fsref.config import StoreSection
from fsref.errors import ConfigError
from fsref.refs import check_run
from fsref.store.base import Store
from fsref.store.filesystem import FilesystemStore
from fsref.store.objectstorage import ObjectStorageStore
from fsref.store.posix import PosixStore


def posix_root(url: str) -> Path | None:
    """The local path of a root URL that is one (a plain path or ``file://``), else None."""
    if "://" not in url:
        return Path(url).expanduser()
    if url.startswith("file://"):
        return Path(unquote(url.removeprefix("file://")))
    return None


def open_root(url: str, *, run: str, settings: StoreSection | None = None, create: bool = False) -> Store:
    """The store of ``<url>/<run>``. ``url`` is the reader's own setting, never a part of a message.

    ``create`` makes the folder where the backend has folders. Raises ``ConfigError`` for a URL that no backend serves,
    ``StoreError`` if the root cannot be reached.
    """
    check_run(run)
    if not url:
        raise ConfigError("run.root is empty: name a folder or an fsspec URL")
    path = posix_root(url)
    if path is not None:
        return PosixStore(path / run, create=create)
    whole = f"{url.rstrip('/')}/{run}"
    if url.startswith("s3://"):
        chosen = settings or StoreSection()
        return ObjectStorageStore(whole, endpoint=chosen.endpoint, region=chosen.region)
    return FilesystemStore(whole)
