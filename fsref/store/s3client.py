"""Clients of one S3-compatible bucket: who asks (credentials), whom (endpoint, region, addressing), and how (time limits, proxy, CA).

Owns the resolution of all that, once, by botocore's own rules, so that obstore (the bytes) and botocore (bulk removal, versions) agree.
Nothing of it is kept readable: no repr, no error and no pickle of these objects shows a secret. Needs the extra ``s3``.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib
import threading
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Never
from urllib.parse import urlsplit

from fsref.config import StoreSection
from fsref.errors import ConfigError, MissingExtra
from fsref.store.credentials import Credentials
from fsref.store.s3errors import from_botocore, from_obstore, no_credentials

try:
    from obstore.store import S3Store
except ImportError:  # a base install: opening an s3:// root says which extra it needs
    _AVAILABLE = False
else:
    _AVAILABLE = True

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config

TOKEN_S: Final = 600.0
"""How long a temporary key is used before it is asked for again. botocore renews 10 to 15 minutes ahead of expiry, obstore asks 5
minutes before this ends: a key in use is never older than its life."""
_NO_PROXY: Final = "http://127.0.0.1:9"
"""Never asked, because the endpoint is excluded: naming some proxy is how the HTTP client is kept from the environment's."""


class S3Client:
    """What reads, writes and controls one bucket below one prefix. Closed by dropping it."""

    def __init__(self, bucket: str, prefix: str, settings: StoreSection, credentials: Credentials | None, *, asked: str) -> None:
        if not _AVAILABLE:
            raise MissingExtra.of("s3", "obstore")
        self.bucket, self.prefix = bucket, prefix
        self._slots = threading.BoundedSemaphore(settings.connections_max)
        session = _session(settings)
        keys = _keys(session, credentials, asked)
        self.control = _control(session, bucket, settings, asked)
        endpoint, region = str(self.control.meta.endpoint_url), str(self.control.meta.region_name)
        virtual = _virtual(bucket, settings)
        parts = urlsplit(endpoint)
        host = f"{bucket}.{parts.netloc}" if virtual else parts.netloc
        config: S3Config = {
            "endpoint": f"{parts.scheme}://{host}{parts.path}".rstrip("/"),
            "region": "us-east-1" if region == "aws-global" else region,
            "virtual_hosted_style_request": virtual,
            "conditional_put": "etag",
        }
        options = _options(settings, endpoint)
        reading: ClientConfig = {**options, "read_timeout": timedelta(seconds=settings.stall_s)}
        self.reader, self.writer = (self._open(config, keys, chosen, asked) for chosen in (reading, options))

    def slot(self) -> AbstractContextManager[Any]:
        """Held during each request: at most ``store.connections_max`` are in flight."""
        return self._slots

    def key(self, name: str) -> str:
        """The whole key of a name below the root."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def name(self, key: str) -> str:
        """Inverse of ``key``."""
        return key[len(self.prefix) + 1 :] if self.prefix else key

    def _open(self, config: S3Config, keys: _Keys, options: ClientConfig, asked: str) -> S3Store:
        try:
            return S3Store(
                self.bucket,
                prefix=self.prefix or None,
                config=config,
                client_options=options,
                credential_provider=keys,
                # One loop retries, Retries of the store: counted, and bounded by the config.
                retry_config={"max_retries": 0, "retry_timeout": timedelta(days=1)},
            )
        except Exception as e:  # noqa: BLE001 - the seam
            error = from_obstore(e, asked)
        raise error

    def __reduce__(self) -> Never:
        raise TypeError("a client of an object store holds credentials: open one per process")


class _Keys:
    """obstore's source of keys: asks botocore's credentials, which renew themselves. Its repr shows nothing."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __call__(self) -> Any:
        frozen = self._source.get_frozen_credentials()
        lasting = not hasattr(self._source, "refresh_needed")
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": None if lasting else datetime.now(UTC) + timedelta(seconds=TOKEN_S),
        }

    def __repr__(self) -> str:
        return "_Keys(redacted)"

    def __reduce__(self) -> Never:
        raise TypeError("credentials are not pickled: let each process find its own")


def _botocore(module: str) -> Any:
    """A module of botocore; imported only for roots that need it, because it takes a third of a second."""
    try:
        return importlib.import_module(f"botocore.{module}")
    except ImportError:
        raise MissingExtra.of("s3", "botocore") from None


@functools.cache
def loader() -> Any:
    """botocore's service descriptions, parsed once per process."""
    return _botocore("loaders").create_loader()


def _session(settings: StoreSection) -> Any:
    session = _botocore("session").Session(profile=settings.profile or None)
    session.register_component("data_loader", loader())
    if settings.credentials_file:
        session.set_config_variable("credentials_file", str(Path(settings.credentials_file).expanduser()))
    check_profile(session, settings)
    return session


def check_profile(session: Any, settings: StoreSection) -> None:
    """Raises ``ConfigError`` for a profile that no file has: other keys must not be used in its place."""
    if settings.profile and settings.profile not in session.available_profiles:
        raise ConfigError(f"store.profile {settings.profile!r} is in neither the AWS config file nor the credentials file")


def _keys(session: Any, credentials: Credentials | None, asked: str) -> _Keys:
    if credentials is not None:
        session.set_credentials(credentials.access_key_id, credentials.secret_access_key, credentials.session_token)
    try:
        found = session.get_credentials()
    except Exception as e:  # noqa: BLE001 - the seam
        error = from_botocore(e, asked)
    else:
        if found is not None:
            return _Keys(found)
        error = no_credentials(asked)
    raise error


def _control(session: Any, bucket: str, settings: StoreSection, asked: str) -> Any:
    """A botocore client that tries once: the store's own loop retries."""
    proxies = None if settings.proxy == "environment" else {s: settings.proxy for s in ("http", "https") if settings.proxy}
    config = _botocore("config").Config(
        proxies=proxies,
        connect_timeout=settings.connect_s,
        read_timeout=settings.stall_s,
        max_pool_connections=settings.connections_max,
        retries={"total_max_attempts": 1, "mode": "standard"},
        s3={"addressing_style": "virtual" if _virtual(bucket, settings) else "path"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        region = settings.region or session.get_config_variable("region") or ("us-east-1" if settings.endpoint else None)
        client = session.create_client(
            "s3", region_name=region, endpoint_url=settings.endpoint or None, verify=settings.ca_file or None, config=config
        )
    except Exception as e:  # noqa: BLE001 - the seam
        error = ConfigError(f"{asked}: {e}") if isinstance(e, ValueError) else from_botocore(e, asked)
    else:
        client.meta.events.register("before-sign.s3.DeleteObjects", _add_md5)
        return client
    raise error


def _add_md5(request: Any, **_: Any) -> None:
    """Older servers want Content-MD5 on a bulk removal, and know no other checksum."""
    if "Content-MD5" not in request.headers and request.data:
        data = request.data.encode() if isinstance(request.data, str) else request.data
        request.headers["Content-MD5"] = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _virtual(bucket: str, settings: StoreSection) -> bool:
    """Whether the bucket is part of the host name: as the config says, else on AWS, where its certificate allows that."""
    if settings.addressing != "auto":
        return settings.addressing == "virtual"
    return not settings.endpoint and "." not in bucket


def _options(settings: StoreSection, endpoint: str) -> ClientConfig:
    out: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=settings.connect_s),
        "timeout": timedelta(seconds=settings.request_s),
        "pool_max_idle_per_host": str(settings.connections_max),
    }
    if settings.proxy and settings.proxy != "environment":
        out["proxy_url"] = settings.proxy
    elif not settings.proxy:
        host = urlsplit(endpoint).hostname or ""
        out["proxy_url"], out["proxy_excludes"] = _NO_PROXY, f"{host},.{host}"
    if settings.ca_file:
        try:
            out["root_certificate"] = Path(settings.ca_file).expanduser().read_bytes()
        except OSError as e:
            raise ConfigError(f"store.ca_file {settings.ca_file!r} cannot be read: {e.strerror}") from e
    return out
