"""One node of a pool by the commands that a person types, on loopback."""

import datetime
import http.client
import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsref.config import StoreSection
from fsref.journal.identity import process_start
from fsref.store import Deletion, open_root
from tests.support.ports import free_ports
from tests.support.s3servers import SECRET_KEY, weed_program


def command(*args: str, **env: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "fsref", "pool", *args]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=240, env=os.environ | {"NO_COLOR": "1"} | env)


def first_port() -> int:
    """Eight free ports as a pool lays them out."""
    for port in free_ports(50):
        first = port - 10_000 if port > 45_000 else port
        if first <= 55_000:
            return first
    raise AssertionError("no port")


def state(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "pool.json").read_bytes())
    return found


@pytest.mark.usefixtures("s3_credentials")
def test_a_pool_of_one_stores_objects_says_how_it_is_and_leaves_nothing_running(
    tmp_path: Path,
) -> None:
    weed_program()
    folder = tmp_path / "node"
    at = ("--folder", str(folder))
    options = (*at, "--address", "127.0.0.1", "--replication", "000", "--bucket", "mine", "--first-port", str(first_port()))
    done = command("start", *options, "--volume-mb", "64", "--volumes-max", "20")
    try:
        assert done.returncode == 0, done.stderr
        assert state(folder)["endpoint"] in done.stdout
        again = command("start", *options)
        assert again.returncode == 1
        assert "run in" in again.stderr
        with open_root("s3://mine/runs", run="r1", settings=StoreSection(endpoint=state(folder)["endpoint"])) as store:
            store.put("obj/a/0", [b"kept"])
            assert store.read("obj/a/0", bytes_max=10) == b"kept"
        healthy = command("health", *at, "--nodes", "1")
        assert healthy.returncode == 0, healthy.stdout
        assert "1 nodes" in healthy.stdout
        assert command("health", *at, "--nodes", "2").returncode == 1
        shown = done.stdout + done.stderr + (folder / "pool.json").read_text()
        shown += "".join(Path(f"/proc/{p['pid']}/cmdline").read_text() for p in state(folder)["programs"])
        shown += (folder / "head.log").read_text() + (folder / "gateway.log").read_text()
        assert SECRET_KEY not in shown
    finally:
        pids = [p["pid"] for p in state(folder)["programs"]] if (folder / "pool.json").exists() else []
        stopped = command("stop", *at, "--grace-s", "0.5")
    assert stopped.returncode == 0, stopped.stderr
    assert "gateway" in stopped.stdout
    assert pids
    assert [pid for pid in pids if process_start(pid) is not None] == []
    assert not (folder / "pool.json").exists()
    assert command("stop", *at).stdout.startswith("no server")


def make_certificates(folder: Path) -> tuple[Path, Path, Path]:
    """PEM files: an authority, and a certificate of it with its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, n)]) for n in ("authority", "node")]
    begin = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    pem = serialization.Encoding.PEM
    paths = folder / "ca.pem", folder / "node.pem", folder / "node.key"
    for n in range(2):
        made = x509.CertificateBuilder().subject_name(names[n]).issuer_name(names[0]).public_key(keys[n].public_key()).serial_number(n + 1)
        made = made.not_valid_before(begin).not_valid_after(begin + datetime.timedelta(days=36500))
        made = made.add_extension(x509.BasicConstraints(ca=n == 0, path_length=None), critical=True)
        paths[n].write_bytes(made.sign(keys[0], hashes.SHA256()).public_bytes(pem))
    paths[2].write_bytes(keys[1].private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return paths


def lets_in(port: int, authority: Path, chain: tuple[Path, Path] | None) -> bool:
    """Whether a gRPC port speaks HTTP/2 with who shows this certificate."""
    context = ssl.create_default_context(cafile=str(authority))
    context.check_hostname = False
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on asks for extensions that no weed asks for
    context.set_alpn_protocols(["h2"])
    if chain is not None:
        context.load_cert_chain(*chain)
    try:
        with socket.create_connection(("127.0.0.1", port), 30) as plain, context.wrap_socket(plain) as speaking:
            speaking.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            return bool(speaking.recv(9))
    except (ssl.SSLError, ConnectionError):
        return False


@pytest.mark.usefixtures("s3_credentials")
def test_with_keys_and_certificates_in_the_nodes_folder_its_inner_ports_ask_for_them(tmp_path: Path) -> None:
    weed_program()
    folder = tmp_path / "node"
    folder.mkdir()
    authority, certificate, key = make_certificates(tmp_path)
    roles = "".join(f'[grpc.{r}]\ncert = "{certificate}"\nkey = "{key}"\n' for r in ("master", "volume", "filer", "s3", "client"))
    signing = "".join(f'[jwt.{k}]\nkey = "{secrets.token_hex(32)}"\n' for k in ("signing", "filer_signing", "filer_signing.read"))
    (folder / "security.toml").write_text(f'{signing}[grpc]\nca = "{authority}"\n{roles}')
    (folder / "security.toml").chmod(0o600)
    first = first_port()
    at = ("--folder", str(folder), "--address", "127.0.0.1", "--replication", "000", "--bucket", "mine", "--first-port", str(first))
    done = command("start", *at, "--volume-mb", "64", "--volumes-max", "20")
    try:
        assert done.returncode == 0, done.stderr
        with open_root("s3://mine/runs", run="r1", settings=StoreSection(endpoint=state(folder)["endpoint"])) as store:
            store.put("obj/a/0", [b"kept"])
            assert store.read("obj/a/0", bytes_max=10) == b"kept"
            assert list(store.delete(["obj/a/0"]).values()) == [Deletion.DONE]
        for number, name in enumerate(("master", "volume", "filer")):
            assert lets_in(first + 10_000 + number, authority, (certificate, key)), name
            assert not lets_in(first + 10_000 + number, authority, None), name
        for method, path in (("PUT", "/buckets/mine/forged"), ("GET", "/buckets/mine/runs/")):
            filer = http.client.HTTPConnection("127.0.0.1", first + 2, timeout=30)
            filer.request(method, path, body=b"x" if method == "PUT" else None)
            assert filer.getresponse().status == 401, method
            filer.close()
    finally:
        stopped = command("stop", "--folder", str(folder), "--grace-s", "0.5")
    assert stopped.returncode == 0, stopped.stderr


@pytest.mark.usefixtures("s3_credentials")
def test_what_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    weed_program()
    at = ("--folder", str(tmp_path / "node"), "--address", "127.0.0.1")
    refused = command("start", *at, "--replication", "7")
    assert refused.returncode == 2
    assert "replication '7'" in refused.stderr
    assert command("start", *at, "--replication", "000", AWS_SECRET_ACCESS_KEY="").returncode == 2
    elsewhere = ("--folder", str(tmp_path / "other"), "--address", "203.0.113.7")
    failed = command("start", *elsewhere, "--replication", "000", "--wait-s", "30")
    assert failed.returncode == 1
    assert "head of the pool" in failed.stderr
    assert not (tmp_path / "other" / "pool.json").exists()
    assert command("health").returncode == 2
    assert command("health", "--master", "127.0.0.1:9").returncode == 1


def test_a_pid_that_another_process_has_now_is_not_signalled(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        start = process_start(other.pid)
        assert start is not None
        programs = [{"name": "head", "pid": other.pid, "start": start - 1}]
        node = {"address": "a", "master": "a:1", "endpoint": "http://a:2", "boot_id": boot, "programs": programs}
        (tmp_path / "pool.json").write_text(json.dumps(node))
        assert command("stop", "--folder", str(tmp_path)).stdout.startswith("no server")
        assert other.poll() is None
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait(60)


def test_the_commands_of_a_pool_stand_in_the_docs() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for name in ("start", "join", "health", "stop"):
        assert f"fsref pool {name}" in (docs / "cli.md").read_text()
        assert f"fsref pool {name}" in (docs / "nvme-pool.md").read_text()
        assert command(name, "--help").returncode == 0
