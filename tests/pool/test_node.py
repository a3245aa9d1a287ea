"""One node of a pool by the commands that a person types, on loopback."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsref.config import StoreSection
from fsref.journal.identity import process_start
from fsref.store import open_root
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
