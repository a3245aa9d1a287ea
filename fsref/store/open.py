"""Opening a run's root by its URL: the one place that knows which backend serves which scheme."""

from pathlib import Path
from urllib.parse import unquote

from fsref.config import StoreSection
from fsref.errors import ConfigError
from fsref.refs import check_run
from fsref.store.base import Store
from fsref.store.credentials import Credentials
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


def open_root(
    url: str, *, run: str, settings: StoreSection | None = None, create: bool = False, credentials: Credentials | None = None
) -> Store:
    """The store of ``<url>/<run>``. ``url`` is the reader's own setting, never a part of a message.

    ``create`` makes the folder where the backend has folders. ``credentials`` are keys that the calling program holds itself, for S3;
    without them the environment, the profile, the credentials file or the instance's role give them. Raises ``ConfigError`` for a URL
    that no backend serves or a bucket that cannot hold a run, ``StoreError`` if the root cannot be reached.
    """
    check_run(run)
    if not url:
        raise ConfigError("run.root is empty: name a folder or an fsspec URL")
    chosen = settings or StoreSection()
    if chosen.server != "none" and not chosen.endpoint:
        raise ConfigError(f"store.server = {chosen.server!r}: the server is a run's own, `fsref run` starts it; nobody is there to ask now")
    path = posix_root(url)
    if chosen.driver == "fsspec":
        base = url if path is None else f"file://{path.absolute()}"
        return FilesystemStore(f"{base.rstrip('/')}/{run}", settings=chosen, credentials=credentials)
    if path is not None:
        return PosixStore(path / run, create=create)
    whole = f"{url.rstrip('/')}/{run}"
    if url.startswith("s3://"):
        return ObjectStorageStore(whole, settings=chosen, credentials=credentials)
    if chosen.driver == "obstore":
        raise ConfigError(f'store.driver = "obstore" serves s3:// roots only, not {whole.partition("://")[0]}://')
    return FilesystemStore(whole, settings=chosen)
