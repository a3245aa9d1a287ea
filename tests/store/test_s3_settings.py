"""How a bucket is reached: certificates, addressing, region, rights; and what the check of it says and costs."""

import datetime
import ipaddress
import itertools
import json
import re
import ssl
import threading
import traceback
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fsref.cli import check
from fsref.config import StoreSection
from fsref.doctor import failed, root_checks
from fsref.errors import ConfigError, FsrefError, MissingExtra, StoreDenied
from fsref.store import Deletion, open_root, probe, s3client
from fsref.store.filesystem import FilesystemStore
from fsref.store.objectstorage import ObjectStorageStore
from tests.support.faultproxy import FaultProxy
from tests.support.s3servers import BUCKET, S3Server

pytestmark = pytest.mark.usefixtures("s3_credentials")
DRIVERS = pytest.mark.parametrize("driver", ["obstore", "fsspec"])


def root() -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """PEM files: an authority's certificate, and the key and certificate that it made for 127.0.0.1."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, n)]) for n in ("fsref tests", "127.0.0.1")]
    start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    made = []
    for n in range(2):
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = (
            x509.CertificateBuilder().subject_name(names[n]).issuer_name(names[0]).public_key(keys[n].public_key()).serial_number(n + 1)
        )
        builder = builder.not_valid_before(start).not_valid_after(start + datetime.timedelta(days=36500))
        builder = builder.add_extension(x509.BasicConstraints(ca=n == 0, path_length=None), critical=True)
        made.append((builder.add_extension(address, critical=False) if n else builder).sign(keys[0], hashes.SHA256()))
    folder = tmp_path_factory.mktemp("tls")
    pem = serialization.Encoding.PEM
    (folder / "authority.pem").write_bytes(made[0].public_bytes(pem))
    key = keys[1].private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "server.pem").write_bytes(key + made[1].public_bytes(pem))
    return folder / "authority.pem", folder / "server.pem"


@DRIVERS
def test_a_private_certificate_authority_is_trusted_where_the_config_names_it(
    moto: S3Server, authority: tuple[Path, Path], driver: str
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority[1])
    with FaultProxy(moto, tls=context) as proxy:
        trusting = moto.settings(endpoint=proxy.endpoint, driver=driver, ca_file=str(authority[0]), retries_max=0)
        with open_root(root(), run="run", settings=trusting) as store:
            store.put("obj/a", [b"x"])
            assert store.read("obj/a", bytes_max=1) == b"x"
            assert store.delete(["obj/a"]) == {"obj/a": Deletion.DONE}
        with pytest.raises(FsrefError):
            open_root(root(), run="run", settings=moto.settings(endpoint=proxy.endpoint, driver=driver, retries_max=0))


def test_a_certificate_file_that_is_not_there_is_a_config_error(moto: S3Server, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ca_file"):
        open_root(root(), run="run", settings=moto.settings(ca_file=str(tmp_path / "none.pem")))


def test_the_bucket_stands_in_the_host_name_on_aws_only_and_where_its_certificate_allows() -> None:
    cases = [
        ("bucket", StoreSection(), True),
        ("my.bucket", StoreSection(), False),
        ("bucket", StoreSection(endpoint="http://x"), False),
        ("bucket", StoreSection(endpoint="http://x", addressing="virtual"), True),
        ("bucket", StoreSection(addressing="path"), False),
    ]
    for bucket, settings, virtual in cases:
        assert s3client._virtual(bucket, settings) is virtual


@DRIVERS
def test_a_key_that_may_not_ask_for_versioning_can_still_use_the_bucket_and_the_check_says_so(
    moto: S3Server, fault_proxy: Callable[[S3Server], FaultProxy], driver: str
) -> None:
    proxy = fault_proxy(moto)
    proxy.add("status", "GET ?versioning", status=403, code="AccessDenied")
    with open_root(root(), run="run", settings=moto.settings(endpoint=proxy.endpoint, driver=driver)) as store:
        found = probe(store)
    assert found.versioning == "unknown"
    assert found.usable
    assert any("s3:GetBucketVersioning" in text for text in found.shortcomings())


@pytest.mark.parametrize(("driver", "requests"), [("obstore", 14), ("fsspec", 20)])
def test_opening_costs_one_request_and_the_check_a_few(
    moto: S3Server, fault_proxy: Callable[[S3Server], FaultProxy], driver: str, requests: int
) -> None:
    proxy = fault_proxy(moto)
    with open_root(root(), run="run", settings=moto.settings(endpoint=proxy.endpoint, driver=driver)) as store:
        assert proxy.counts() == {"GET ?versioning": 1}
        proxy.clear()
        probe(store)
    assert sum(proxy.counts().values()) <= requests


def test_the_doctor_tries_a_bucket_and_leaves_nothing(weed: S3Server) -> None:
    where = root()
    checks = list(root_checks(where, settings=weed.settings()))
    assert [c.name for c in checks] == ["root", "publish", "read", "list", "delete", "capabilities"]
    assert not failed(checks), checks
    assert "removal of 1000 at a time, versioning off" in checks[-1].detail
    assert weed.keys(where.removeprefix(f"s3://{BUCKET}/")) == []


def test_the_doctors_command_takes_the_store_settings_of_a_config(
    weed: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'[run]\nroot = "{root()}"\n[store]\nendpoint = "{weed.endpoint}"\n')
    check.main("", config=str(config), json=True)
    said = {c["name"]: c["status"] for c in json.loads(capsys.readouterr().out)["checks"]}
    assert said["root"] == said["delete"] == said["capabilities"] == "ok"


def test_the_driver_is_what_the_config_says(moto: S3Server, tmp_path: Path) -> None:
    for driver, kind in (("auto", ObjectStorageStore), ("obstore", ObjectStorageStore), ("fsspec", FilesystemStore)):
        with open_root(root(), run="run", settings=moto.settings(driver=driver)) as store:
            assert type(store) is kind
    with pytest.raises(ConfigError, match="s3:// roots only"):
        open_root("memory://x", run="run", settings=StoreSection(driver="obstore"))
    with open_root(str(tmp_path), run="run", settings=StoreSection(driver="fsspec")) as store:
        assert type(store) is FilesystemStore


def test_a_missing_package_is_named_with_its_extra(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("fsref.store.s3client.importlib.import_module", absent)
    s3client.loader.cache_clear()
    for driver in ("obstore", "fsspec"):
        with pytest.raises(MissingExtra, match=r"fsref\[s3\]"):
            open_root(root(), run="run", settings=moto.settings(driver=driver))


def test_a_profile_that_does_not_exist_is_said(moto: S3Server) -> None:
    for driver in ("obstore", "fsspec"):
        with pytest.raises(ConfigError, match="nobody"):
            open_root(root(), run="run", settings=moto.settings(driver=driver, profile="nobody"))


WEB_TOKEN = "SENTINEL-web-token"
SESSION = "a-session"


class Role(BaseHTTPRequestHandler):
    """What a cloud's instance (IMDSv2 only), container and token services answer: temporary keys, at ``/numbered`` new ones."""

    given = itertools.count(1)

    def do_PUT(self) -> None:
        asked = self.path == "/latest/api/token" and self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
        self._answer(SESSION.encode() if asked else b"", status=200 if asked else 400)

    def do_GET(self) -> None:
        if self.path.startswith("/latest/") and self.headers.get("X-aws-ec2-metadata-token") != SESSION:
            self._answer(b"", status=401)
        elif self.path.endswith("/security-credentials/"):
            self._answer(b"the-role")
        else:
            numbered = self.path == "/numbered"
            key = f"AKIANUMBER{next(self.given):010}" if numbered else "AKIAFROMTHEROLE00000"
            keys = {
                "Code": "Success", "AccessKeyId": key, "SecretAccessKey": "SENTINEL-role", "Token": "SENTINEL-token",
                "Expiration": in_minutes(5 if numbered else 360),
            }  # fmt: skip
            self._answer(json.dumps(keys).encode())

    def do_POST(self) -> None:
        form = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        asked = [form.get(k) for k in ("Action", "RoleArn", "WebIdentityToken")]
        if asked != [["AssumeRoleWithWebIdentity"], ["arn:aws:iam::123456789012:role/the-role"], [WEB_TOKEN]]:
            self._answer(b"<ErrorResponse><Error><Code>InvalidIdentityToken</Code></Error></ErrorResponse>", status=400)
            return
        keys = (
            "<AccessKeyId>AKIAFROMTHEROLE00000</AccessKeyId><SecretAccessKey>SENTINEL-role</SecretAccessKey>"
            f"<SessionToken>SENTINEL-token</SessionToken><Expiration>{in_minutes(360)}</Expiration>"
        )
        user = "<Arn>arn:aws:sts::123456789012:assumed-role/the-role/x</Arn><AssumedRoleId>A:x</AssumedRoleId>"
        result = f"<Credentials>{keys}</Credentials><AssumedRoleUser>{user}</AssumedRoleUser>"
        result = f"<AssumeRoleWithWebIdentityResult>{result}</AssumeRoleWithWebIdentityResult>"
        self._answer(f"<AssumeRoleWithWebIdentityResponse>{result}</AssumeRoleWithWebIdentityResponse>".encode())

    def _answer(self, body: bytes, *, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-aws-ec2-metadata-token-ttl-seconds", "21600")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def in_minutes(count: int) -> str:
    return f"{datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=count):%Y-%m-%dT%H:%M:%SZ}"


@pytest.fixture(scope="module")
def role() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Role) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield "http://{}:{}".format(*server.server_address)
        server.shutdown()
        thread.join()


def use_role(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str, service: str) -> None:
    """Leaves one source of keys in the environment."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    if source == "instance":
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service)
    elif source == "container":
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{service}/keys")
    else:
        (folder / "token").write_text(WEB_TOKEN)
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(folder / "token"))
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/the-role")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", service)


@pytest.mark.parametrize(("driver", "source"), [*itertools.product(["obstore", "fsspec"], ["instance", "container", "web identity"])])
def test_keys_come_from_the_role_of_the_instance_the_container_or_a_web_identity(  # noqa: PLR0917  fixtures and parameters
    moto: S3Server,
    fault_proxy: Callable[[S3Server], FaultProxy],
    role: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    driver: str,
    source: str,
) -> None:
    use_role(monkeypatch, tmp_path, source, role)
    proxy = fault_proxy(moto)
    with open_root(root(), run="run", settings=moto.settings(endpoint=proxy.endpoint, driver=driver)) as store:
        store.put("obj/a/0", [b"x"])
        assert store.read("obj/a/0", bytes_max=1) == b"x"
        assert list(store.delete(["obj/a/0"]).values()) == [Deletion.DONE]
        shown = f"{store!r} {vars(store)!r}"
    assert len(proxy.requests) >= 4
    for request in proxy.requests:
        assert b"Credential=AKIAFROMTHEROLE00000/" in request.head, request.kind
        assert b"SENTINEL-token" in request.head, request.kind
    assert "SENTINEL" not in shown


def test_a_temporary_key_is_asked_for_again_before_it_ends(
    moto: S3Server, fault_proxy: Callable[[S3Server], FaultProxy], role: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_role(monkeypatch, tmp_path, "container", role)
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{role}/numbered")
    monkeypatch.setattr(s3client, "TOKEN_S", 0.0)
    proxy = fault_proxy(moto)
    with open_root(root(), run="run", settings=moto.settings(endpoint=proxy.endpoint)) as store:
        for n in range(3):
            store.put(f"obj/a/{n}", [b"x"])
    used = [re.search(rb"Credential=(AKIANUMBER[0-9]{10})/", r.head) for r in proxy.requests if r.kind == "PUT"]
    assert all(used)
    assert len({m[1] for m in used if m}) == 3


@pytest.mark.parametrize("driver", ["obstore", "fsspec"])
def test_a_web_identity_that_is_refused_is_denied_and_its_token_is_not_shown(
    moto: S3Server, role: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: str
) -> None:
    use_role(monkeypatch, tmp_path, "web identity", role)
    (tmp_path / "token").write_text("SENTINEL-forged")
    with pytest.raises(StoreDenied) as raised:
        open_root(root(), run="run", settings=moto.settings(driver=driver, retries_max=0))
    assert "SENTINEL" not in "".join(traceback.format_exception(raised.value))
